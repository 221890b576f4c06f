"""Checks around every request: who may ask, how long the body is; and errors in OpenAI's shape."""
import hmac
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from nanochat.runtime.console import log_error
from nanochat.serve.protocol import NOT_HERE, ApiError

MAX_BODY_BYTES = 2**20
LOOPBACK = "127.0.0.1", "localhost", "::1"
# Paths that need no key.
OPEN_PATHS = "/", "/health"


async def read_body(http: HttpRequest) -> bytes:
    """The body; hardly more than MAX_BODY_BYTES are ever in memory. ApiError if it is too long or not JSON."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Browsers let any page post other types to any address without a preflight request.
    if kind != "application/json":
        raise ApiError(415, "the body must be JSON: Content-Type: application/json")
    body = bytearray()
    try:
        async for part in http.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                # The connection stays open: a client that is cut off while it sends would lose the answer.
                raise ApiError(413, f"the body is longer than {MAX_BODY_BYTES:,} bytes")
    except ClientDisconnect:
        raise ApiError(400, "the body ended early") from None
    return bytes(body)


async def show_error(http: HttpRequest, error: HTTPException) -> Response:
    """ApiErrors, and what the router does not find."""
    if not isinstance(error, ApiError):
        paths = ", ".join(route.path for route in http.app.routes)
        words = f"{http.method} {http.scope['path']:.80} {NOT_HERE}; this one has {paths}"
        error = ApiError(error.status_code, words, headers=error.headers)
    return error.response()


async def show_failure(http: HttpRequest, error: Exception) -> Response:
    """An unforeseen error. The log says where it happened, without users' words."""
    log_error("a request failed", error)
    return ApiError(500, "something went wrong inside the server").response()


class Gate:
    """Around everything: only clients who may ask get in."""

    def __init__(self, app: ASGIApp, api_key: str, hosts: Sequence[str]):
        """hosts: names that the server answers to, besides those of this machine; none: any name."""
        self.app, self.api_key = app, api_key
        self.hosts = [*map(str.lower, hosts), *LOOPBACK] if hosts else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http":
            try:
                self.check(scope["path"], Headers(scope=scope))
            except ApiError as error:
                app = error.response()
        await app(scope, receive, send)

    def check(self, path: str, headers: Headers) -> None:
        """ApiError for a wrong key or host, or a body with two lengths."""
        # Without a port and an IPv6 address's brackets.
        host = re.sub(r":\d+$", "", headers.get("host", "").lower()).strip("[]")
        # A web page may point its own name at 127.0.0.1 (DNS rebinding), but then the browser sends that name.
        # Load balancers, which ask for /health in HTTP/1.0, need not send a name.
        if self.hosts and "host" in headers and host not in self.hosts:
            words = f"this server answers to {', '.join(self.hosts)} only; --allowed_hosts={host:.80} adds a name"
            raise ApiError(421, words)
        # A proxy may believe the other length, and take the rest of the body for another client's request.
        if "transfer-encoding" in headers and "content-length" in headers:
            words = "a request has Content-Length or Transfer-Encoding, not both"
            raise ApiError(400, words, headers={"Connection": "close"})
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Takes the same time for every wrong key.
        is_right = scheme.lower() == "bearer" and hmac.compare_digest(key.encode("latin-1"), self.api_key.encode())
        if self.api_key and path not in OPEN_PATHS and not is_right:
            words = "this server asks for its key: Authorization: Bearer KEY"
            raise ApiError(401, words, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
