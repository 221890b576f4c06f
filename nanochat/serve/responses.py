"""Reading what a client sends, and the forms of what it gets."""
import asyncio
import base64
import contextlib
import hashlib
import re
import resource
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanochat.serve.answers import Busy, ClientGone, Failed, Unavailable
from nanochat.serve.metrics import Metrics
from nanochat.serve.openai_api import ApiError, dumps, event
from nanochat.serve.worker import log_error

BODY_SECONDS = 30   # within which the body of a request must have come
WAIT_SECONDS = 60   # and each request as a whole; and within which a client must have read what is ready for it
MAX_CONNECTIONS = min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)  # each is an open file
SAFE = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}


async def read_body(http: HttpRequest, limit: int) -> bytes:
    """The body, of which never much more than the limit is in memory. ApiError where it is too long, too slow or not JSON."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # any page in a browser may post other kinds to any address, without asking first
        raise ApiError(415, "the body must be JSON: Content-Type: application/json", "unsupported_media_type")
    too_long = ApiError(413, f"the body is longer than {limit:,} bytes", "request_too_large", headers={"Connection": "close"})
    length = http.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in http.stream():
                body += part
                if len(body) > limit:
                    raise too_long
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_SECONDS} s", headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ApiError(400, "the body ended early") from None
    return bytes(body)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, the first of which are there. Who makes them watches the connection: leaner than StreamingResponse."""
    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncIterator[bytes]):
        super().__init__(headers=SAFE | {"X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.first, self.rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_body(body: bytes) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self.rest) as rest:
            try:
                await send_body(self.first)
                async for body in rest:
                    await send_body(body)
            except ClientGone:
                pass
            except (Failed, Unavailable) as error:  # the official client raises APIError when it meets this event
                await send_body(event(to_api_error(error).body()))
        await send({"type": "http.response.body", "body": b""})


def json_response(data: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(data), status, SAFE | (headers or {}), "application/json")


def to_api_error(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case Busy():
            return ApiError(429, f"{error}; try again in {error.seconds} s", "rate_limit_exceeded", headers={"Retry-After": str(error.seconds)})
        case Unavailable():
            return ApiError(503, str(error), "unavailable", headers={"Retry-After": "5"})
        case Failed():
            return ApiError(500, str(error), "internal_error")
        case ClientGone():
            return ApiError(499, "the client has gone")  # for the metrics: nobody reads it
    return ApiError(500, "something went wrong inside the server", "internal_error")


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers)


def content_security_policy(page: str) -> str:
    """Of a page in one file: its own inline scripts and styles run, by their hash, and nothing else; it talks to this server only."""
    def hashes(tag: str) -> str:
        contents = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", page, re.DOTALL | re.IGNORECASE)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in contents) or "'none'"

    return (f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; img-src data:; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")


class Impatient(H11Protocol):
    """
    A connection whose client must not keep the server waiting: for a request, the first or a later one, or with
    reading what it was sent. There are at most MAX_CONNECTIONS, or they would use up the process's files: a new one
    replaces the one that has kept the server waiting longest, of those from the address with the most connections.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.deadline = self.loop.call_later(WAIT_SECONDS, transport.abort)
        if len(self.connections) > MAX_CONNECTIONS:
            counts = Counter(other.address() for other in self.connections)
            slow = [other for other in self.connections if other.is_slow()]  # this one, too
            last = max(slow, key=lambda other: (counts[other.address()], -other.deadline.when()))
            self.connections.discard(last)
            last.transport.abort()

    def address(self) -> str:
        return self.client[0] if self.client else ""

    def is_slow(self) -> bool:
        """Whether it is the client's turn: to send a request to its end, or to read."""
        return self.cycle is None or self.cycle.more_body or self.cycle.response_complete or self.flow.write_paused

    def look(self) -> None:
        """When it becomes the client's turn, its time begins. Single bytes, sent or read, do not prolong it."""
        if not self.is_slow():
            self.deadline.cancel()
        elif self.deadline.cancelled():
            self.deadline = self.loop.call_later(WAIT_SECONDS, self.transport.abort)

    def handle_events(self) -> None:
        super().handle_events()
        self.look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.look()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.look()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.deadline.cancel()


class Outermost:
    """
    Around everything: counts responses, and answers what went wrong unforeseen, of which the log has no words of users.
    hosts: names that the server answers to; none: any. (A page on the web may point a name of its own at 127.0.0.1.)
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, hosts: tuple[str, ...] = ()):
        self.app, self.metrics, self.hosts = app, metrics, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started = False

        async def count(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                path = getattr(scope.get("route"), "path", "other")
                self.metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        try:
            host = re.sub(r":\d+$", "", dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower())
            if self.hosts and host not in self.hosts:
                raise ApiError(421, f"this server answers to {', '.join(self.hosts)} only; --allowed_hosts={host:.80} adds a name", "wrong_host")
            if scope["method"] == "HEAD":  # as GET; uvicorn leaves out the body, since its own scope still says HEAD
                scope = scope | {"method": "GET"}
            await self.app(scope, receive, count)
        except ApiError as error:
            await error_response(error)(scope, receive, count)
        except Exception as error:
            log_error("a request failed", error)
            if not started:
                await error_response(to_api_error(error))(scope, receive, count)
