"""
The chat server as a web application: the page, OpenAI's interface and health.

The life of a request: `Gate` lets it in (gate.py), `Api.answer` has it read and checked (requests.py, responses.py),
gives it to a worker (worker.py) and turns the chunks that come back into JSON or into server-sent events (replies.py).

Limits are checked before work is done. Nothing that a user writes gets into a log.
"""
import asyncio
import contextlib
import secrets
import weakref
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nanochat.serve.gate import Gate, read_body, show_error
from nanochat.serve.openai_requests import BaseRequest, ChatRequest, CompletionRequest
from nanochat.serve.protocol import ApiError, Chunk, Chunks, Json, Request
from nanochat.serve.replies import ChatReply, Reply
from nanochat.serve.responses import ResponsesReply, ResponsesRequest
from nanochat.serve.worker import Pending, ServedModel

READERS = 2     # bodies of one address that are read at once: a thread each, of which there are few
PAGE = Path(__file__).with_name("ui.html")


def create_app(
    models: list[ServedModel], max_new_tokens: int, defaults: Json, api_key: str = "", hosts: Sequence[str] = (),
) -> Starlette:
    """
    The application. The models' workers start and end with it. defaults: of temperature and top_k, where a request does
    not say. api_key "": everybody may ask. hosts: the names that it answers to; none: any.
    """
    api = Api(models, max_new_tokens, defaults)
    routes = [
        Route("/", page),
        Route("/health", api.health),
        Route("/v1/models", api.list_models),
        Route("/v1/models/{id}", api.one_model),
        Route("/v1/chat/completions", partial(api.answer, ChatRequest, ChatReply), methods=["POST"]),
        Route("/v1/completions", partial(api.answer, CompletionRequest, Reply), methods=["POST"]),
        Route("/v1/responses", partial(api.answer, ResponsesRequest, ResponsesReply), methods=["POST"]),
    ]
    gate = Middleware(Gate, api_key=api_key, hosts=hosts)

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
    app = Starlette(routes=routes, middleware=[gate], exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False     # it would send clients to whatever their Host says
    return app


async def page(http: HttpRequest) -> Response:
    """One file, whose own inline script and style run, known by a nonce; it talks to this server only."""
    nonce = secrets.token_urlsafe()
    html = PAGE.read_text(encoding="utf-8").replace("NONCE", nonce)
    policy = (
        "default-src 'none'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'")
    return HTMLResponse(html, headers={"Content-Security-Policy": policy})


class Api:
    """The endpoints that speak of models."""

    def __init__(self, models: list[ServedModel], max_new_tokens: int, defaults: Json):
        self.models = {model.id: model for model in models}
        self.max_new_tokens, self.defaults = max_new_tokens, defaults
        self.readers: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()

    async def health(self, http: HttpRequest) -> Response:
        """
        200 while every model can answer, however slowly. The state of each worker: loading, ready, slow, silent or
        dead; and how many answers are being written, and wait for a place.
        """
        models = self.models.values()
        states = {model.id: [worker.condition for worker in model.workers] for model in models}
        ready = all({"ready", "slow"} & {*its_states} for its_states in states.values())
        body = {
            "status": "ok" if ready else "unavailable",
            "running": sum(model.running for model in models), "waiting": sum(model.waiting for model in models),
            "models": states,
        }
        return JSONResponse(body, 200 if ready else 503)

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
            "id": model.id, "object": "model", "created": 0, "owned_by": "nanochat",
            "context_length": model.context, "max_tokens": min(self.max_new_tokens, model.context),
            "chat": model.chats, "examples": list(model.examples), **self.defaults,
        }

    async def answer(self, kind: type[BaseRequest], make_reply: type[Reply], http: HttpRequest) -> Response:
        """Have a worker answer; return that as JSON or as a stream. A client that goes ends the work."""
        body = await read_body(http)
        client = http.client.host if http.client else ""
        # In a thread: a megabyte takes up to a second to read, and others want their tokens meanwhile.
        places = self.readers.setdefault(client, asyncio.Semaphore(READERS))    # forgotten with its last user
        async with places:
            asked, model, request = await asyncio.to_thread(self.read, kind, body, client)
        reply = make_reply(asked, model, request)
        pending = model.submit(request)
        pending.watcher = asyncio.create_task(cancel_at_the_end(http, pending))
        chunks = pending.chunks()
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
        if asked.size > model.max_choices:
            words = f"{asked.size:,} answers at once; this server takes at most {model.max_choices}"
            raise ApiError(400, words, param="n")
        prompts, echo_from = asked.encode(model.tokenizer, model.chats, model.context)
        longest = max(map(len, prompts))
        if longest > model.context:     # in OpenAI's words: clients look for them
            words = (f"This model's maximum context length is {model.context} tokens. However, your {asked.param} "
                     f"resulted in {longest} tokens. Please reduce the length of the {asked.param}.")
            raise ApiError(400, words, "context_length_exceeded", asked.param)
        grammar = asked.grammar(model.tokenizer)
        tools = asked.calculates and model.chats and grammar is None
        sampling = asked.sampling(model.tokenizer, self.max_new_tokens, tools)
        request = Request(prompts, sampling, grammar, asked.n, asked.stop, client, echo_from)
        return asked, model, request


async def joined(first: list[Chunk], later: Chunks) -> Chunks:
    yield first
    async for several in later:
        yield several


async def cancel_at_the_end(http: HttpRequest, pending: Pending) -> None:
    """Cancel what is left of a request when its client has gone, or when the response is complete."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    pending.cancel()
