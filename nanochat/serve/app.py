"""
The chat server as a web application: the page, OpenAI's interface and health.

The life of a request: `Gate` lets it in (gate.py), `Api.answer` parses and checks it (openai_requests.py), gives it to
an engine (served_model.py) and turns the engine's chunks into JSON or server-sent events (replies.py).

Limits are checked before work is done. No user's text gets into a log.
"""
import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path

from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nanochat.runtime.console import log_error
from nanochat.serve.gate import Gate, read_body, show_error, show_failure
from nanochat.serve.openai_requests import BaseRequest, ChatRequest, CompletionRequest
from nanochat.serve.protocol import ApiError, Json, Request
from nanochat.serve.replies import ChatReply, Reply
from nanochat.serve.runs import state
from nanochat.serve.served_model import ServedModel

FOLDER = Path(__file__).parent
# Files that become part of the page, one document.
PARTS = "watch.css", "watch.js", "inside.js"
# Seconds between checks for a new model.
LOOK_EVERY = 2


def create_app(
    models: list[ServedModel], max_new_tokens: int, defaults: Json, api_key: str = "", hosts: Sequence[str] = (),
    newer: Callable[[], ServedModel | None] | None = None,
) -> Starlette:
    """
    The application. The model's engine starts and ends with it. models: one, or none yet. defaults: temperature and
    top_k of requests that do not set them. api_key "": no key is needed. hosts: the names that the server answers to;
    none: any name. newer: if given, runs of the base folder are shown, and each model that it returns replaces the one
    before.
    """
    api = Api(models, max_new_tokens, defaults)
    routes = [
        Route("/", partial(page, bool(newer))),
        *([Route("/runs", api.runs)] if newer else []),
        Route("/health", api.health),
        Route("/v1/models", api.list_models),
        Route("/v1/chat/completions", partial(api.answer, ChatRequest, ChatReply), methods=["POST"]),
        Route("/v1/completions", partial(api.answer, CompletionRequest, Reply), methods=["POST"]),
    ]
    gate = Middleware(Gate, api_key=api_key, hosts=hosts)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        for model in models:
            model.start()
        # The event loop itself keeps no reference to a task.
        following = asyncio.create_task(follow(models, newer))
        yield
        following.cancel()
        for model in models:
            model.stop()
            model.thread.join(10)

    handlers = {HTTPException: show_error, Exception: show_failure}
    app = Starlette(routes=routes, middleware=[gate], exception_handlers=handlers, lifespan=lifespan)
    # A redirect would send clients to any address that their Host header names.
    app.router.redirect_slashes = False
    return app


async def follow(models: list[ServedModel], newer: Callable[[], ServedModel | None] | None) -> None:
    """Serve each new model, and stop the others once their answers have ended. Without `newer` there are none."""
    while newer:
        await asyncio.sleep(LOOK_EVERY)
        try:
            model = await asyncio.to_thread(newer)
        # For example a damaged checkpoint. The runs can still be watched.
        except Exception as error:
            log_error("no new model", error)
            continue
        if model is None:
            continue
        model.start()
        models.append(model)
        for old in models[:-1]:
            while old.running or old.waiting:
                await asyncio.sleep(LOOK_EVERY / 10)
            models.remove(old)
            old.stop()


async def page(watches: bool, http: HttpRequest) -> Response:
    """One document. A nonce allows only its own inline script and style, and it talks only to this server."""
    nonce = secrets.token_urlsafe()
    html = (FOLDER / "ui.html").read_text(encoding="utf-8")
    for name in PARTS:
        html = html.replace(f"/* {name} */", (FOLDER / name).read_text(encoding="utf-8"))
    html = html.replace("NONCE", nonce).replace('data-watches=""', f'data-watches="{"yes" if watches else ""}"')
    policy = (
        "default-src 'none'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'")
    return HTMLResponse(html, headers={"Content-Security-Policy": policy})


class Api:
    """The endpoints that need the model. While it replaces an older one, whose answers end, there are two."""

    def __init__(self, models: list[ServedModel], max_new_tokens: int, defaults: Json):
        self.models, self.max_new_tokens, self.defaults = models, max_new_tokens, defaults

    async def health(self, http: HttpRequest) -> Response:
        """
        200 while every model can answer. The body has each model's state, and how many answers are running or waiting.
        """
        is_ready = all(model.state == "ready" for model in self.models)
        body = {
            "status": "ok" if is_ready else "unavailable",
            "running": sum(model.running for model in self.models),
            "waiting": sum(model.waiting for model in self.models),
            "models": {model.id: model.state for model in self.models},
        }
        return JSONResponse(body, 200 if is_ready else 503)

    async def runs(self, http: HttpRequest) -> Response:
        """What the view of runs shows, and the models to talk to."""
        shown = await asyncio.to_thread(state)
        body = to_json(shown | {"models": [model.id for model in self.models]}, inf_nan_mode="null")
        return Response(body, media_type="application/json")

    async def list_models(self, http: HttpRequest) -> Response:
        data = [
            {"id": model.id, "object": "model", "created": 0, "owned_by": "nanochat",
             "context_length": model.context, "max_tokens": min(self.max_new_tokens, model.context),
             "chat": model.chats, "examples": model.examples, **self.defaults}
            for model in self.models]
        return JSONResponse({"object": "list", "data": data})

    def find(self, id: str) -> ServedModel:
        """The model with this name; without a name the newest. ApiError, 404, if there is none."""
        for model in reversed(self.models):
            if id in ("", model.id):
                return model
        names = ", ".join(model.id for model in self.models) or "none yet"
        raise ApiError(404, f"there is no model {id!r:.80}; this server has {names}", "model_not_found", "model")

    async def answer(self, kind: type[BaseRequest], make_reply: type[Reply], http: HttpRequest) -> Response:
        """An engine's answer, as JSON or as a stream. When the client disconnects, the work ends."""
        body = await read_body(http)
        # Threads do the parsing: a megabyte takes up to a second. Meanwhile the event loop passes on others' tokens.
        asked, model, request = await asyncio.to_thread(self.read, kind, body)
        reply = make_reply(asked, model, request)
        model.submit(request)
        request.watcher = asyncio.create_task(cancel_at_the_end(http, request))
        if asked.stream:
            events = reply.events(request.chunks())
            return StreamingResponse(events, headers={"X-Accel-Buffering": "no"}, media_type="text/event-stream")
        async for chunk in request.chunks():
            reply.add(chunk)
        # Thousands of log-probabilities take seconds.
        return await asyncio.to_thread(lambda: JSONResponse(reply.whole()))

    def read(self, kind: type[BaseRequest], body: bytes) -> tuple[BaseRequest, ServedModel, Request]:
        asked = kind.parse(body, self.defaults)
        model = self.find(asked.model)
        request = asked.prepare(model, self.max_new_tokens)
        if request.sampling.tools:
            model.tools.refresh()
        return asked, model, request


async def cancel_at_the_end(http: HttpRequest, request: Request) -> None:
    """Cancel the rest of a request when its client disconnects, or when the response is complete."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    request.end(ApiError(499, "the client has disconnected"))
