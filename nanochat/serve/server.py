"""The web server itself, uvicorn, with a shutdown that lets answers end first. Against floods put a proxy in front."""
import asyncio
import logging
import signal
import socket
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from nanochat.serve.served_model import ServedModel

# Seconds after SIGTERM for answers to end, and then for clients to read the error that ends the others.
DRAIN_SECONDS = 5
CUT_SECONDS = 2
# Each connection is an open file, and many systems allow a process 1,024 of them.
MAX_CONNECTIONS = 512


class Server(uvicorn.Server):
    """Ends with a model's engine. After SIGTERM accepted requests get some time to end."""

    def __init__(self, app: ASGIApp, models: list[ServedModel]):
        super().__init__(uvicorn.Config(
            app,
            http="h11",
            ws="none",
            limit_concurrency=MAX_CONNECTIONS,
            access_log=False,
            server_header=False,
            headers=[
                ("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "no-referrer"),
                ("Cache-Control", "no-store")],
            proxy_headers=False,
            log_level="error",
        ))
        # Clients could fill the log: uvicorn warns of malformed requests, asyncio of each write to a lost connection.
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        self.models, self.hurries = models, False

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or any(model.state == "dead" for model in self.models)

    def handle_exit(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM gives accepted requests DRAIN_SECONDS. Ctrl-C or a second signal ends them with an error now."""
        self.hurries = number == signal.SIGINT or self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self.end_answers())
        # Accepts no new connection, and waits until the last response is read.
        await super().shutdown(sockets)
        ending.cancel()

    async def end_answers(self) -> None:
        """End all answers, running and waiting; then cut the connections of clients that do not read."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + DRAIN_SECONDS
        while clock() < deadline and not self.hurries:
            await asyncio.sleep(0.05)
        for model in self.models:
            model.stop()
        await asyncio.sleep(CUT_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
