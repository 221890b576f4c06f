"""What Prometheus reads of the server."""
from collections.abc import Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from nanochat.serve.worker import ServedModel

SECONDS = 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120  # limits of the histograms' buckets


class Metrics:
    """Counters and histograms of all requests, gauges of the models."""

    def __init__(self, models: Sequence[ServedModel]):
        self.registry = CollectorRegistry()
        self.responses = Counter(
            "nanochat_requests", "Responses by path and status", ["path", "status"], registry=self.registry)
        each = {"labelnames": ["model"], "registry": self.registry}
        times = each | {"buckets": SECONDS}
        self.first_token = Histogram("nanochat_time_to_first_token_seconds", "From request to first token", **times)
        self.duration = Histogram("nanochat_request_seconds", "From request to the end of its answers", **times)
        self.tokens = Counter("nanochat_tokens", "Tokens written", **each)
        running = Gauge("nanochat_running", "Answers being written", **each)
        waiting = Gauge("nanochat_queue_length", "Answers that wait for a place", **each)
        for model in models:
            self.tokens.labels(model.id)  # 0 before the first one
            running.labels(model.id).set_function(lambda model=model: model.running)
            waiting.labels(model.id).set_function(lambda model=model: model.waiting)

    async def read(self, http: HttpRequest) -> Response:
        return Response(generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
