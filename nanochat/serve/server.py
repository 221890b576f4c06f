"""The web server itself, uvicorn. Against floods put a proxy in front."""
import logging
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from nanochat.serve.served_model import ServedModel

# Seconds after SIGTERM or Ctrl-C for answers to end; then their connections are closed.
DRAIN_SECONDS = 5
# Each connection is an open file, and many systems allow a process 1,024 of them.
MAX_CONNECTIONS = 512


class Server(uvicorn.Server):
    """Ends with a model's engine."""

    def __init__(self, app: ASGIApp, models: list[ServedModel]):
        super().__init__(uvicorn.Config(
            app,
            http="h11",
            ws="none",
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=DRAIN_SECONDS,
            access_log=False,
            server_header=False,
            headers=[
                ("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "no-referrer"),
                ("Cache-Control", "no-store")],
            proxy_headers=False,
            log_level="critical",
        ))
        # Clients could fill the log: uvicorn warns of malformed requests, asyncio of each write to a lost connection.
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        self.models = models

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or any(model.state == "dead" for model in self.models)

    def handle_exit(self, number: int, frame: FrameType | None) -> None:
        """Unlike uvicorn's, it does not send the signal again at the end: the exit code is 0."""
        self.should_exit = True
