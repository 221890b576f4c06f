"""
The chat server as a web application: the page, OpenAI's interface, health and metrics.

The life of a request: `Gate` lets it in (gate.py), `Api.chat` or `Api.complete` reads and checks it (openai_api.py),
`Api.answer` gives it to a worker (worker.py) and turns the chunks that come back into JSON or into server-sent events
(replies.py).

Limits are checked before work is done. Nothing that a user writes gets into a log.
"""
import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nanochat.data.conversation import drop_oldest, render_prompt, render_text
from nanochat.serve.api_error import ApiError
from nanochat.serve.engine_process import Chunk, Request
from nanochat.serve.gate import Gate, read_body, show_error
from nanochat.serve.metrics import Metrics
from nanochat.serve.openai_api import (
    BaseRequest,
    ChatRequest,
    CompletionRequest,
    Message,
    conversation_of,
    json_object,
)
from nanochat.serve.openapi import describe
from nanochat.serve.page import page
from nanochat.serve.replies import Reply
from nanochat.serve.request_id import RequestId
from nanochat.serve.responses import BODY, ResponsesReply, chat_fields
from nanochat.serve.tokenization import DetokenizeRequest, TokenizeRequest, tokenizer_info
from nanochat.serve.worker import Pending, ServedModel


@dataclass(frozen=True)
class Limits:
    """What a request may ask for, and what it gets where it does not say."""
    max_body_bytes: int
    max_messages: int
    max_chars: int             # of all messages or prompts together
    max_new_tokens: int        # of an answer
    max_n: int                 # answers to each prompt
    timeout_s: float           # from the arrival of a request to the end of its answers
    temperature: float
    top_k: int
    truncate: str = ""         # "oldest": exchanges are dropped from a chat that is too long


def create_app(
    models: list[ServedModel], limits: Limits, api_key: str = "", cors_origins: Sequence[str] = (),
    hosts: Sequence[str] = (),
) -> Starlette:
    """
    The application. The models' workers start and end with it. api_key "": everybody may ask. hosts: the names that it
    answers to; none: any.
    """
    metrics = Metrics(models)
    api = Api(models, limits, metrics)
    routes = [
        Route("/", page), Route("/health", api.health), Route("/metrics", metrics.read),
        Route("/v1", api.list_endpoints), Route("/v1/models", api.list_models), Route("/v1/models/{id}", api.one_model),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.complete, methods=["POST"]),
        Route("/v1/responses", api.respond, methods=["POST"]),
        Route("/tokenize", api.tokenize, methods=["POST"]), Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/tokenizer_info", api.tokenizer_info),
    ]
    bodies = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest, "/v1/responses": BODY,
              "/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest}
    described = JSONResponse(describe(routes, bodies, [*api.models], ["max_tokens", *api.defaults]))
    routes.append(Route("/openapi.json", described, methods=["GET"]))
    gate = Middleware(Gate, metrics=metrics, paths={r.endpoint: r.path for r in routes}, api_key=api_key, hosts=hosts)
    cors = Middleware(
        CORSMiddleware, allow_origins=cors_origins, allow_methods=["GET", "HEAD", "POST"], allow_headers=["*"],
        expose_headers=["Retry-After", "X-Request-Id"])

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        workers = [worker for model in models for worker in model.workers]
        for worker in workers:
            worker.start()
        yield
        for worker in workers:
            worker.stop()
            worker.thread.join(timeout=10)

    middleware = [Middleware(RequestId), *([cors] if cors_origins else []), gate]
    return Starlette(
        routes=routes, middleware=middleware, exception_handlers={HTTPException: show_error}, lifespan=lifespan)


class Api:
    """The endpoints that speak of models."""

    def __init__(self, models: list[ServedModel], limits: Limits, metrics: Metrics):
        self.models, self.limits, self.metrics = {model.id: model for model in models}, limits, metrics
        self.defaults = {"temperature": limits.temperature, "top_k": limits.top_k}
        # By client, while its grammar is compiled: a client has one compiled at a time, others wait for one of them.
        self.turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    # ---- What there is

    async def health(self, http: HttpRequest) -> Response:
        """200 while every model can answer. status: ok, degraded (not all of its workers), loading, hung or dead."""
        states = {model.id: [worker.state for worker in model.workers] for model in self.models.values()}
        present, usable = set().union(*states.values()), all("ready" in its_states for its_states in states.values())
        if present == {"ready"}:
            status = "ok"
        elif usable:
            status = "degraded"
        else:
            status = next(state for state in ("loading", "hung", "dead") if state in present)
        return JSONResponse({"status": status, "models": states}, 200 if usable else 503)

    async def list_endpoints(self, http: HttpRequest) -> Response:
        below = [route for route in http.app.routes if route.path.startswith("/v1")]
        endpoints = [f"{method} {route.path}" for route in below for method in sorted(route.methods)]
        return JSONResponse({"object": "api", "endpoints": endpoints})

    async def list_models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self.describe(model) for model in self.models.values()]})

    async def one_model(self, http: HttpRequest) -> Response:
        return JSONResponse(self.describe(self.find(http.path_params["id"])))

    def find(self, id: str | None) -> ServedModel:
        """The model of that name; None: the first one."""
        id = next(iter(self.models)) if id is None else id
        if id not in self.models:
            words = f"there is no model {id!r:.80}; this server has {', '.join(self.models)}"
            raise ApiError(404, words, "model_not_found", "model")
        return self.models[id]

    def describe(self, model: ServedModel) -> dict:
        return {
            "id": model.id, "object": "model", "created": model.created, "owned_by": "nanochat", "step": model.step,
            "context_length": model.context, "max_tokens": min(self.limits.max_new_tokens, model.context),
            "chat": model.chats, "examples": list(model.examples), **self.defaults,
        }

    # ---- Answers

    async def chat(self, http: HttpRequest) -> Response:
        return await self.answer_chat(http, await read_body(http, self.limits.max_body_bytes))

    async def respond(self, http: HttpRequest) -> Response:
        fields = json_object(await read_body(http, self.limits.max_body_bytes))
        return await self.answer_chat(http, chat_fields(fields), partial(ResponsesReply, fields))

    async def answer_chat(
        self, http: HttpRequest, body: bytes | dict, make_reply: Callable[..., Reply] = Reply
    ) -> Response:
        request = ChatRequest.parse(
            body, self.limits.max_messages, max_tokens=self.limits.max_new_tokens, **self.defaults)
        model = self.find(request.model)
        if request.functions and not model.chats:
            raise ApiError(400, f"{model.id} is a base model: it calls no functions", param="tools")
        self.check_choices(request, model, 1, "messages")
        request.max_tokens = request.max_completion_tokens or request.max_tokens
        most = min(request.max_tokens, self.limits.max_new_tokens, model.context // 4)
        ids = self.render(model, request.definitions() + request.messages, room=model.context - most)
        return await self.answer(http, request, model, [ids], "messages", make_reply=make_reply)

    def render(self, model: ServedModel, messages: Sequence[Message], room: int) -> list[int]:
        """The tokens of a chat. room: for how many, where older exchanges are dropped to fit in."""
        conversation = conversation_of(messages)
        self.check_chars([part.text for message in messages for part in message.parts], "messages")
        render = partial(partial(render_prompt, continue_last=True) if model.chats else render_text, model.tokenizer)
        ids = render(conversation)
        if self.limits.truncate == "oldest" and len(ids) > room:
            ids = render(drop_oldest(conversation, lambda shorter: len(render(shorter)) <= room))
        return ids

    async def complete(self, http: HttpRequest) -> Response:
        """Continues a text, after <|bos|>; nothing is computed on the way. Tokens may be any, the special ones too."""
        body = await read_body(http, self.limits.max_body_bytes)
        request = CompletionRequest.parse(body, max_tokens=16, **self.defaults)
        model = self.find(request.model)
        self.check_choices(request, model, len(request.prompt), "prompt")   # before any is encoded
        self.check_chars(request.prompt, "prompt")
        bos, vocab_size = [model.tokenizer.get_bos_token_id()], model.tokenizer.get_vocab_size()
        ids = [model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompt]
        added = [int(prompt[:1] != bos) for prompt in ids]
        ids = [bos * its_added + prompt for prompt, its_added in zip(ids, added)]
        if not all(0 <= token < vocab_size for prompt in ids for token in prompt):
            raise ApiError(400, f"the tokens of a prompt must be within 0 and {vocab_size - 1}", param="prompt")
        return await self.answer(http, request, model, ids, "prompt", added if request.echo else ())

    # ---- Tokens

    async def tokenize(self, http: HttpRequest) -> Response:
        body = await read_body(http, self.limits.max_body_bytes)
        request = TokenizeRequest.parse(body, self.limits.max_messages)
        model = self.find(request.model)
        if request.prompt is None:
            ids = self.render(model, request.messages, model.context)
        else:
            self.check_chars([request.prompt], "prompt")
            ids = request.ids_of_prompt(model.tokenizer)
        # In a thread of its own: the names of half a million tokens take a third of a second.
        return JSONResponse(await asyncio.to_thread(request.answer, model.tokenizer, ids, model.context))

    async def detokenize(self, http: HttpRequest) -> Response:
        request = DetokenizeRequest.parse(await read_body(http, self.limits.max_body_bytes))
        return JSONResponse(request.answer(self.find(request.model).tokenizer))

    async def tokenizer_info(self, http: HttpRequest) -> Response:
        """Of the first model, or of ?model=NAME."""
        model = self.find(http.query_params.get("model"))
        return JSONResponse(tokenizer_info(model.tokenizer, model.context, model.chats))

    # ---- What answers have in common

    def check_chars(self, texts: Sequence[Sequence], param: str) -> None:
        count = sum(map(len, texts))
        if count > self.limits.max_chars:
            words = f"{count:,} characters; at most {self.limits.max_chars:,} are allowed"
            raise ApiError(400, words, "string_above_max_length", param)

    def check_choices(self, asked: BaseRequest, model: ServedModel, prompts: int, param: str) -> None:
        if asked.n > self.limits.max_n:
            raise ApiError(400, f"n={asked.n} is too much; at most {self.limits.max_n} answers are allowed", param="n")
        if prompts * asked.n > model.max_choices:
            words = f"{prompts * asked.n:,} answers at once; this server takes at most {model.max_choices}"
            raise ApiError(400, words, param=param)

    async def answer(
        self, http: HttpRequest, asked: BaseRequest, model: ServedModel, prompts: list[list[int]], param: str,
        echo_from: Sequence[int] = (), make_reply: Callable[..., Reply] = Reply,
    ) -> Response:
        """Have a worker answer the prompts; return that as JSON or as a stream. A client that goes ends the work."""
        longest = max(map(len, prompts))
        if longest > model.context:
            words = (f"This model's maximum context length is {model.context} tokens. However, your {param} resulted "
                     f"in {longest} tokens. Please reduce the length of the {param}.")  # OpenAI's: clients look for it
            raise ApiError(400, words, "context_length_exceeded", param)
        tools = isinstance(asked, ChatRequest) and model.chats
        client = http.client.host if http.client else ""
        form = await asyncio.to_thread(asked.form, model.tokenizer)  # a schema of a megabyte takes a third of a second
        sampling = asked.sampling(self.limits.max_new_tokens, model.tokenizer, tools, form)
        request = Request(prompts, sampling, form, asked.n, asked.stop, self.limits.timeout_s, client, echo_from)
        reply = make_reply(asked, model.id, model.step, model.tokenizer, sum(map(len, prompts)))
        async with self.turns.setdefault(client, asyncio.Lock()) if form else contextlib.nullcontext():
            pending = model.submit(request)
            pending.watcher = asyncio.create_task(cancel_at_the_end(http, pending))
            if form:
                await pending.accepted.wait()
        chunks = self.chunks(model, pending)
        if not asked.stream:
            async for several in chunks:
                reply.add(several)
            return JSONResponse(reply.whole())
        first = await anext(chunks)  # an error before it has a status of its own
        events = reply.events(first, chunks)
        return StreamingResponse(events, headers={"X-Accel-Buffering": "no"}, media_type="text/event-stream")

    async def chunks(self, model: ServedModel, pending: Pending) -> AsyncIterator[list[Chunk]]:
        async for several in pending.chunks():
            self.metrics.tokens.labels(model.id).inc(sum(chunk.tokens for chunk in several))
            yield several
        started = pending.request.started
        if pending.first_token is not None:
            self.metrics.first_token.labels(model.id).observe(pending.first_token - started)
        self.metrics.duration.labels(model.id).observe(time.monotonic() - started)


async def cancel_at_the_end(http: HttpRequest, pending: Pending) -> None:
    """Cancel what is left of a request when its client has gone, or when the response is complete."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    pending.cancel()
