"""What is around every request: who may ask, bodies with limits, errors in OpenAI's shape, headers."""
import asyncio
import hmac
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from nanochat.runtime.console import log_error
from nanochat.serve.api_error import ApiError
from nanochat.serve.metrics import Metrics

BODY_SECONDS = 30   # within which the body of a request must have come
OPEN_PATHS = "/", "/health", "/metrics", "/openapi.json"    # everybody may read them
SAFE = (b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"), (b"cache-control", b"no-store")


async def read_body(http: HttpRequest, limit: int) -> bytes:
    """The body, hardly more than the limit of which is ever in memory. ApiError: it is too long, slow or not JSON."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # any page in a browser may post other kinds to any address, without asking first
        raise ApiError(415, "the body must be JSON: Content-Type: application/json", "unsupported_media_type")
    length, body = http.headers.get("content-length", ""), bytearray()
    # The connection stays open: uvicorn drops what still comes, and a client that is cut off would lose the answer.
    too_long = ApiError(413, f"the body is longer than {limit:,} bytes", "request_too_large")
    if length.isdecimal() and int(length) > limit:
        raise too_long
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in http.stream():
                body += part
                if len(body) > limit:
                    raise too_long
    except TimeoutError:
        late = f"the body did not come within {BODY_SECONDS} s"
        raise ApiError(408, late, headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ApiError(400, "the body ended early") from None
    return bytes(body)


async def show_error(http: HttpRequest, error: HTTPException) -> Response:
    if not isinstance(error, ApiError):  # the router's
        place = f"{http.method} {http.scope['path']:.80}"
        words = {404: f"there is no {place} here; the interface begins with /v1", 405: f"{place} is not allowed here"}
        error = ApiError(error.status_code, words.get(error.status_code, error.detail), headers=error.headers)
    return JSONResponse(error.body(), error.status_code, error.headers)


class Gate:
    """
    Around everything: only those who may ask get in, responses are counted, and an unforeseen error is answered; the
    log says where it happened, without words of users. paths: endpoint → path, the label of the counter.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: dict, api_key: str, hosts: Sequence[str]):
        self.app, self.metrics, self.paths, self.api_key, self.hosts = app, metrics, paths, api_key, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started = False

        async def send_counted(message: AsgiMessage) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                path = self.paths.get(scope.get("endpoint"), "other")
                self.metrics.responses.labels(path, str(message["status"])).inc()
                message["headers"] = [*message["headers"], *SAFE]
            await send(message)

        http = HttpRequest(scope, receive)
        try:
            self.check(scope["path"], http.headers)
            await self.app(scope, receive, send_counted)
        except Exception as error:
            if not isinstance(error, ApiError):
                log_error("a request failed", error)
                error = ApiError(500, "something went wrong inside the server", "internal_error")
            if not started:
                response = await show_error(http, error)
                await response(scope, receive, send_counted)

    def check(self, path: str, headers: Headers) -> None:
        """
        ApiError for a wrong key or host. (A page on the web may point a name of its own at 127.0.0.1. A browser always
        names the host; load balancers, which ask for /health in HTTP/1.0, need not.)
        """
        host = re.sub(r":\d+$", "", headers.get("host", "").lower())
        if self.hosts and "host" in headers and host not in self.hosts:
            names = ", ".join(self.hosts)
            words = f"this server answers to {names} only; --allowed_hosts={host:.80} adds a name"
            raise ApiError(421, words, "wrong_host")
        scheme, _, key = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(key.strip().encode("latin-1"), self.api_key.encode())  # in constant time
        if self.api_key and path not in OPEN_PATHS and not (same and scheme.lower() == "bearer"):
            words = "this server asks for its key: Authorization: Bearer KEY"
            raise ApiError(401, words, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
