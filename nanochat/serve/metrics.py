"""What the chat server tells Prometheus."""
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from nanochat.serve.answers import Answers
from nanochat.serve.worker import ServedModel

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)  # limits of the histograms' buckets


class Metrics:
    """What the models know themselves is asked of them when somebody reads."""

    def __init__(self, models: list[ServedModel]):
        self.models, self.registry = models, CollectorRegistry()
        self.requests = Counter("nanochat_requests", "Responses by path and status", ["path", "status"], registry=self.registry)
        self.first_token = Histogram("nanochat_time_to_first_token_seconds", "From request to first token", ["model"], buckets=SECONDS, registry=self.registry)
        self.duration = Histogram("nanochat_request_seconds", "From request to the end of its answers", ["model"], buckets=SECONDS, registry=self.registry)
        self.registry.register(self)

    def observe(self, model: ServedModel, answers: Answers) -> None:
        """A request that was answered to its end."""
        if answers.first_token is not None:
            self.first_token.labels(model.id).observe(answers.first_token - answers.started)
        self.duration.labels(model.id).observe(time.monotonic() - answers.started)

    def collect(self) -> Iterator[Metric]:
        for name, help, attribute in (("running", "Answers being written", "running"), ("queue_length", "Answers that wait for a place", "waiting")):
            family = GaugeMetricFamily(f"nanochat_{name}", help, labels=["model"])
            for model in self.models:
                family.add_metric([model.id], getattr(model, attribute))
            yield family
        tokens = CounterMetricFamily("nanochat_tokens", "Tokens written", labels=["model"])
        for model in self.models:
            tokens.add_metric([model.id], sum(worker.tokens for worker in model.workers))
        yield tokens
