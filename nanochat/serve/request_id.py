"""A name for every request, by which its client can speak of it."""
import re
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class RequestId:
    """x-request-id on every response: the client's own, if it sent a plain one, or else a new one."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        sent = Headers(scope=scope).get("x-request-id", "")
        own = sent if re.fullmatch(r"[\w.:-]{1,128}", sent, re.ASCII) else f"req_{uuid.uuid4().hex}"

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", own.encode())]
            await send(message)

        await self.app(scope, receive, send_named)
