"""
The chat server as a web application: the page, the parts of OpenAI's interface, health and metrics.

Limits are kept before work is done: a body that is too long is refused, not read; who finds the queue full is told so
at once; who goes away gives the place back. Nothing that anybody writes gets into a log.
"""
import contextlib
import hmac
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Depends, FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import HTMLResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from nanochat.conversation import check_conversation, render_prompt, render_text
from nanochat.errors import UserError
from nanochat.sampling import SamplingParams
from nanochat.serve.answers import Answers, Busy, ClientGone, Failed, Unavailable, Work
from nanochat.serve.metrics import Metrics
from nanochat.serve.openai_api import (
    ApiError,
    ChatReply,
    ChatRequest,
    CompletionRequest,
    Reply,
    Request,
    parse,
    to_conversation,
)
from nanochat.serve.responses import (
    SAFE,
    EventStream,
    Outermost,
    content_security_policy,
    disconnected,
    error_response,
    json_response,
    read_body,
    to_api_error,
)
from nanochat.serve.worker import ServedModel

PAGE = Path(__file__).with_name("ui.html")


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


def create_app(models: list[ServedModel], limits: Limits, api_key: str = "", cors_origins: list[str] = [], hosts: tuple[str, ...] = ()) -> FastAPI:
    """
    The application. The models' workers start and end with it. api_key "": everybody may ask. hosts: the names that it
    answers to; none: any.
    """
    by_id = {model.id: model for model in models}
    workers = [worker for model in models for worker in model.workers]
    metrics = Metrics(models)
    page = PAGE.read_text(encoding="utf-8")
    page_headers = SAFE | {"Content-Security-Policy": content_security_policy(page)}

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for worker in workers:
            worker.start()
        yield
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.thread.join(timeout=10)

    async def check_key(http: HttpRequest) -> None:
        scheme, _, key = http.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(key.strip().encode("latin-1"), api_key.encode())  # in constant time
        if api_key and not (right and scheme.lower() == "bearer"):
            raise ApiError(401, "this server asks for its key: Authorization: Bearer KEY", "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    v1 = APIRouter(prefix="/v1", dependencies=[Depends(check_key)])

    # ---- What there is

    @app.get("/")
    async def index() -> Response:
        return HTMLResponse(page, headers=page_headers)

    @app.get("/health")
    async def health() -> Response:
        """200 while every model can answer. status: ok, degraded (one of several workers is missing), loading or dead."""
        states = {model.id: [worker.state for worker in model.workers] for model in models}
        usable = all("ready" in of_model for of_model in states.values())
        present = {worker.state for worker in workers}
        status = "ok" if present == {"ready"} else "degraded" if usable else "loading" if "loading" in present else "dead"
        return json_response({"status": status, "models": states}, 200 if usable else 503)

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def find(id: str) -> ServedModel:
        if id not in by_id:
            raise ApiError(404, f"there is no model {id!r:.80}; this server has {', '.join(by_id)}", "model_not_found", "model")
        return by_id[id]

    def describe(model: ServedModel) -> dict:
        return {
            "id": model.id, "object": "model", "created": model.created, "owned_by": "nanochat", "step": model.step, "context_length": model.context,
            "max_tokens": min(limits.max_new_tokens, model.context), "temperature": limits.temperature, "top_k": limits.top_k,
            "chat": model.chats, "examples": list(model.examples),
        }

    @v1.get("")
    async def about() -> Response:
        endpoints = [f"{method} {route.path}" for route in v1.routes for method in route.methods]
        return json_response({"object": "api", "endpoints": endpoints})

    @v1.get("/models")
    async def list_models() -> Response:
        return json_response({"object": "list", "data": [describe(model) for model in models]})

    @v1.get("/models/{id}")
    async def one_model(id: str) -> Response:
        return json_response(describe(find(id)))

    # ---- Answers

    @v1.post("/chat/completions")
    async def chat(http: HttpRequest) -> Response:
        request = parse(ChatRequest, await read_body(http, limits.max_body_bytes))
        model = find(request.model)
        if len(request.messages) > limits.max_messages:
            raise ApiError(400, f"{len(request.messages):,} messages; at most {limits.max_messages:,} are allowed", "too_many_messages", "messages")
        conversation = to_conversation(request.messages)
        try:
            check_conversation(conversation, "messages")
        except UserError as error:
            raise ApiError(400, str(error), param="messages") from None
        if conversation["messages"][-1]["role"] == "assistant":
            raise ApiError(400, "the last message must be the user's", param="messages")
        contents = [message["content"] for message in conversation["messages"]]
        check_chars(sum(len(text) if isinstance(text, str) else sum(len(part["text"]) for part in text) for text in contents), "messages")
        max_tokens = request.max_completion_tokens or request.max_tokens or limits.max_new_tokens
        render = render_prompt if model.chats else render_text
        ids = render(model.tokenizer, conversation)
        return await respond(http, request, model, ChatReply, [ids], max_tokens, "messages")

    @v1.post("/completions")
    async def complete(http: HttpRequest) -> Response:
        """Goes on with a text, after <|bos|>; nothing is computed on the way. Tokens may be any, the special ones too."""
        request = parse(CompletionRequest, await read_body(http, limits.max_body_bytes))
        model, prompts = find(request.model), request.prompts()
        check_chars(sum(map(len, prompts)), "prompt")
        bos, vocab_size = [model.tokenizer.get_bos_token_id()], model.tokenizer.get_vocab_size()
        ids = [model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        ids = [prompt if prompt[:1] == bos else bos + prompt for prompt in ids]
        if not all(0 <= token < vocab_size for prompt in ids for token in prompt):
            raise ApiError(400, f"the tokens of a prompt must be within 0 and {vocab_size - 1}", param="prompt")
        return await respond(http, request, model, Reply, ids, request.max_tokens or 16, "prompt")

    def check_chars(count: int, param: str) -> None:
        if count > limits.max_chars:
            raise ApiError(400, f"{count:,} characters; at most {limits.max_chars:,} are allowed", "string_above_max_length", param)

    async def respond(
        http: HttpRequest, request: Request, model: ServedModel, shape: type[Reply], prompts: list[list[int]], max_tokens: int, param: str
    ) -> Response:
        """Have the prompts answered, and send that in the way that was asked for."""
        longest = max(map(len, prompts))
        if longest > model.context:
            words = (f"This model's maximum context length is {model.context} tokens. However, your {param} resulted in "
                     f"{longest} tokens. Please reduce the length of the {param}.")  # OpenAI's, which clients look for
            raise ApiError(400, words, "context_length_exceeded", param)
        if (request.n or 1) > limits.max_n:
            raise ApiError(400, f"n={request.n} is too many answers; at most {limits.max_n} are allowed", param="n")
        temperature = limits.temperature if request.temperature is None else request.temperature
        top_k = limits.top_k if request.top_k is None else request.top_k
        top_p = 1.0 if request.top_p is None else request.top_p
        tools = shape is ChatReply and model.chats
        sampling = SamplingParams(min(max_tokens, limits.max_new_tokens), temperature, top_k, top_p, request.seed, tools=tools)
        client = http.client.host if http.client else ""
        stop = request.stop_strings()
        work = Work(prompts, sampling, request.n or 1, stop, bool(request.stream), limits.timeout_s, client)
        if work.size > model.most:
            raise ApiError(400, f"{work.size:,} answers at once; this server takes at most {model.most}", param=param)
        answers = model.submit(work)
        answers.watch(disconnected(http.receive))
        reply = shape(model.id, model.step, sum(map(len, prompts)), request.include_usage())
        if not request.stream:
            return json_response(await whole(model, answers, reply))
        events = stream(model, answers, reply)
        return EventStream(await anext(events), events)  # what goes wrong before the first has a status of its own

    async def whole(model: ServedModel, answers: Answers, reply: Reply) -> dict:
        try:
            async for news in answers.news():
                reply.add(news)
            metrics.observe(model, answers)
            return reply.whole()
        finally:
            answers.close()

    async def stream(model: ServedModel, answers: Answers, reply: Reply) -> AsyncIterator[bytes]:
        try:
            async for news in answers.news():
                yield reply.chunks(news)
            metrics.observe(model, answers)
            yield reply.end()
        finally:
            answers.close()

    # ---- Errors, and what is around everything

    async def show(http: HttpRequest, error: Exception) -> Response:
        return error_response(to_api_error(error))

    async def show_http(http: HttpRequest, error: HTTPException) -> Response:
        place = f"{http.method} {http.url.path:.80}"
        messages = {404: f"there is no {place} here; the interface begins with /v1", 405: f"{place} is not allowed here"}
        return error_response(ApiError(error.status_code, messages.get(error.status_code, str(error.detail)), headers=error.headers))

    app.include_router(v1)
    app.add_exception_handler(HTTPException, show_http)
    for kind in (ApiError, Busy, ClientGone, Failed, Unavailable):
        app.add_exception_handler(kind, show)
    app.add_middleware(Outermost, metrics=metrics, hosts=hosts)
    if cors_origins:
        methods = ["GET", "HEAD", "POST"]
        app.add_middleware(
            CORSMiddleware, allow_origins=cors_origins, allow_methods=methods, allow_headers=["*"],
            expose_headers=["Retry-After"])
    return app
