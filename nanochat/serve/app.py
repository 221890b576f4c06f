"""
The chat server as a web application: the page, OpenAI's interface, health and metrics.

The life of a request: `Gate` lets it in (gate.py), `Api.answer` has it read and checked (requests.py, responses.py),
gives it to a worker (worker.py) and turns the chunks that come back into JSON or into server-sent events (replies.py).

Limits are checked before work is done. Nothing that a user writes gets into a log.
"""
import asyncio
import base64
import contextlib
import hashlib
import re
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nanochat.serve.gate import Gate, read_body, show_error
from nanochat.serve.protocol import ApiError, Chunk, Chunks, Json, Request
from nanochat.serve.replies import ChatReply, Reply
from nanochat.serve.requests import BaseRequest, ChatRequest, CompletionRequest
from nanochat.serve.responses import ResponsesReply, ResponsesRequest
from nanochat.serve.worker import Pending, ServedModel

TIMEOUT = 300.0     # seconds for a request; then its answers end with what they have
PAGE = Path(__file__).with_name("ui.html")
BUCKETS = 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120  # of histograms, in seconds


def create_app(
    models: list[ServedModel], max_new_tokens: int, defaults: Json, api_key: str = "", hosts: Sequence[str] = (),
) -> Starlette:
    """
    The application. The models' workers start and end with it. defaults: of temperature and top_k, where a request does
    not say. api_key "": everybody may ask. hosts: the names that it answers to; none: any.
    """
    metrics = Metrics(models)
    api = Api(models, metrics, max_new_tokens, defaults)
    routes = [
        Route("/", page),
        Route("/health", api.health),
        Route("/metrics", metrics.read),
        Route("/v1/models", api.list_models),
        Route("/v1/models/{id}", api.one_model),
        Route("/v1/chat/completions", partial(api.answer, ChatRequest, ChatReply), methods=["POST"]),
        Route("/v1/completions", partial(api.answer, CompletionRequest, Reply), methods=["POST"]),
        Route("/v1/responses", partial(api.answer, ResponsesRequest, ResponsesReply), methods=["POST"]),
    ]
    paths = {route.path for route in routes}
    gate = Middleware(Gate, responses=metrics.responses, paths=paths, api_key=api_key, hosts=hosts)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        workers = [worker for model in models for worker in model.workers]
        for worker in workers:
            await worker.start()
        yield
        for worker in workers:
            worker.stop()
        await asyncio.wait([worker.reading for worker in workers], timeout=10)

    handlers = {HTTPException: show_error}
    return Starlette(routes=routes, middleware=[gate], exception_handlers=handlers, lifespan=lifespan)


async def page(http: HttpRequest) -> Response:
    """One file, whose own inline script and style run, known by their hashes; it talks to this server only."""
    html = PAGE.read_text(encoding="utf-8")
    policy = (
        "default-src 'none'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'")
    for tag in ("script", "style"):
        policy += f"; {tag}-src"
        for text in re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", html, re.DOTALL):
            checksum = base64.b64encode(hashlib.sha256(text.encode()).digest())
            policy += f" 'sha256-{checksum.decode()}'"
    return HTMLResponse(html, headers={"Content-Security-Policy": policy})


class Metrics:
    """What Prometheus reads: counters and histograms of all requests, gauges of the models."""

    def __init__(self, models: Sequence[ServedModel]):
        self.registry = CollectorRegistry()
        self.responses = Counter(
            "nanochat_requests", "Responses by path and status", ["path", "status"], registry=self.registry)
        each = {"labelnames": ["model"], "registry": self.registry}
        self.first_token = Histogram(
            "nanochat_time_to_first_token_seconds", "From request to first token", buckets=BUCKETS, **each)
        self.duration = Histogram(
            "nanochat_request_seconds", "From request to the end of its answers", buckets=BUCKETS, **each)
        self.tokens = Counter("nanochat_tokens", "Tokens written", **each)
        running = Gauge("nanochat_running", "Answers being written", **each)
        waiting = Gauge("nanochat_queue_length", "Answers that wait for a place", **each)
        for model in models:
            self.tokens.labels(model.id)  # 0 before the first one
            running.labels(model.id).set_function(lambda model=model: model.running)
            waiting.labels(model.id).set_function(lambda model=model: model.waiting)

    async def read(self, http: HttpRequest) -> Response:
        return Response(generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


class Api:
    """The endpoints that speak of models."""

    def __init__(self, models: list[ServedModel], metrics: Metrics, max_new_tokens: int, defaults: Json):
        self.models = {model.id: model for model in models}
        self.metrics, self.max_new_tokens, self.defaults = metrics, max_new_tokens, defaults

    async def health(self, http: HttpRequest) -> Response:
        """200 while every model can answer. status: ok, degraded (not all of its workers), loading, hung or dead."""
        states = {model.id: [worker.state for worker in model.workers] for model in self.models.values()}
        present = set().union(*states.values())
        usable = all("ready" in its_states for its_states in states.values())
        status = "ok" if present == {"ready"} else "degraded"
        if not usable:
            status = next(state for state in ("loading", "hung", "dead") if state in present)
        return JSONResponse({"status": status, "models": states}, 200 if usable else 503)

    async def list_models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self.describe(model) for model in self.models.values()]})

    async def one_model(self, http: HttpRequest) -> Response:
        return JSONResponse(self.describe(self.find(http.path_params["id"])))

    def find(self, id: str) -> ServedModel:
        if id not in self.models:
            words = f"there is no model {id!r:.80}; this server has {', '.join(self.models)}"
            raise ApiError(404, words, "model_not_found", "model")
        return self.models[id]

    def describe(self, model: ServedModel) -> Json:
        return {
            "id": model.id, "object": "model", "created": model.created, "owned_by": "nanochat",
            "context_length": model.context, "max_tokens": min(self.max_new_tokens, model.context),
            "chat": model.chats, "examples": list(model.examples), **self.defaults,
        }

    async def answer(self, kind: type[BaseRequest], make_reply: type[Reply], http: HttpRequest) -> Response:
        """Have a worker answer; return that as JSON or as a stream. A client that goes ends the work."""
        body = await read_body(http)
        client = http.client.host if http.client else ""
        # In a thread: a megabyte takes up to a second to read, and others want their tokens meanwhile.
        asked, model, request = await asyncio.to_thread(self.read, kind, body, client)
        prompt_tokens = sum(map(len, request.prompts))
        reply = make_reply(asked, model.id, model.tokenizer, prompt_tokens)
        pending = model.submit(request)
        pending.watcher = asyncio.create_task(cancel_at_the_end(http, pending))
        chunks = self.chunks(model, pending)
        if not asked.stream:
            async for several in chunks:
                reply.add(several)
            return JSONResponse(reply.whole())
        first = await anext(chunks)  # an error before it has a status of its own
        events = reply.events(joined(first, chunks))
        return StreamingResponse(events, headers={"X-Accel-Buffering": "no"}, media_type="text/event-stream")

    def read(self, kind: type[BaseRequest], body: bytes, client: str) -> tuple[BaseRequest, ServedModel, Request]:
        """What a body asks for, and its model. ApiError for what cannot be answered."""
        asked = kind.parse(body, self.defaults)
        model = self.find(asked.model)
        prompts = asked.encode(model.tokenizer, model.chats)
        size = len(prompts) * asked.n
        if size > model.max_choices:
            words = f"{size:,} answers at once; this server takes at most {model.max_choices}"
            raise ApiError(400, words, param="n")
        longest = max(map(len, prompts))
        if longest > model.context:     # in OpenAI's words: clients look for them
            words = (f"This model's maximum context length is {model.context} tokens. However, your {asked.param} "
                     f"resulted in {longest} tokens. Please reduce the length of the {asked.param}.")
            raise ApiError(400, words, "context_length_exceeded", asked.param)
        grammar = asked.grammar(model.tokenizer)
        tools = asked.calculates and model.chats and grammar is None
        sampling = asked.sampling(model.tokenizer, self.max_new_tokens, tools)
        echo_from = asked.echo_from(prompts)
        request = Request(prompts, sampling, TIMEOUT, grammar, asked.n, asked.stop, client, echo_from)
        return asked, model, request

    async def chunks(self, model: ServedModel, pending: Pending) -> Chunks:
        async for several in pending.chunks():
            self.metrics.tokens.labels(model.id).inc(sum(chunk.tokens for chunk in several))
            yield several
        started = pending.request.started
        if pending.first_token is not None:
            self.metrics.first_token.labels(model.id).observe(pending.first_token - started)
        self.metrics.duration.labels(model.id).observe(time.monotonic() - started)


async def joined(first: list[Chunk], later: Chunks) -> Chunks:
    yield first
    async for several in later:
        yield several


async def cancel_at_the_end(http: HttpRequest, pending: Pending) -> None:
    """Cancel what is left of a request when its client has gone, or when the response is complete."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    pending.cancel()
