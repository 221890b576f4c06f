"""The web server itself, uvicorn: connections with deadlines, and an end that lets answers end first."""
import asyncio
import signal
import socket
from types import FrameType

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanochat.serve.worker import ServedModel

WAIT_SECONDS = 60   # for a whole request, and for a client to read what is ready for it
DRAIN_SECONDS = 5   # after SIGTERM, for the answers that are not complete
CUT_SECONDS = 2     # then, for clients to read the error that ends theirs
MAX_CONNECTIONS = 512   # each is an open file, of which a process may often have 1,024


class ImpatientProtocol(H11Protocol):
    """
    A connection with deadlines: for a request, the first or a later one, and for reading what was sent. There are at
    most MAX_CONNECTIONS, or they would use up the process's files: a new one replaces the connection that has kept the
    server waiting longest.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.turn_began = self.loop.time()
        self.check_deadline()
        if len(self.connections) > MAX_CONNECTIONS:
            waiting = [other for other in self.connections if other.is_clients_turn()]  # this one, too
            oldest = min(waiting, key=lambda other: other.turn_began)
            self.connections.discard(oldest)
            oldest.transport.abort()

    def is_clients_turn(self) -> bool:
        """To send a request to its end, or to read."""
        return self.cycle is None or self.cycle.more_body or self.cycle.response_complete or self.flow.write_paused

    def check_deadline(self) -> None:
        """The client's turn ends with its request, or when it has read. Single bytes, sent or read, do not end it."""
        now = self.loop.time()
        if not self.is_clients_turn():
            self.turn_began = now
        elif now - self.turn_began > WAIT_SECONDS:
            self.transport.abort()
        self.timer = self.loop.call_later(WAIT_SECONDS / 20, self.check_deadline)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.turn_began = self.loop.time()  # a short answer may have come between two checks

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.timer.cancel()


class Server(uvicorn.Server):
    """Ends with a model's last worker. After SIGTERM it lets accepted requests end for a while."""

    def __init__(self, app: ASGIApp, models: list[ServedModel]):
        super().__init__(uvicorn.Config(
            app,
            http=ImpatientProtocol,
            ws="none",
            backlog=128,
            access_log=False,
            server_header=False,
            proxy_headers=False,    # anyone can write X-Forwarded-For; cache and queue go by the connection's address
            log_level="error",      # warnings are of malformed requests, as many as a client likes
            # Not reached: connections are cut before. uvicorn would cancel what answers them, with a traceback each.
            timeout_graceful_shutdown=DRAIN_SECONDS + 2 * CUT_SECONDS,
        ))
        self.models, self.hurries = models, False

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or any(model.dead for model in self.models)

    def handle_exit(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM gives accepted requests DRAIN_SECONDS; Ctrl-C, or a second signal, ends them with an error."""
        self.hurries = number == signal.SIGINT or self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self.end_answers())
        await super().shutdown(sockets)  # accepts no connection, and waits for the last response to be read
        ending.cancel()

    async def end_answers(self) -> None:
        """Those being written, and those that wait; then the connections of clients that do not read."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + DRAIN_SECONDS
        while clock() < deadline and not self.hurries:
            await asyncio.sleep(0.05)
        for model in self.models:
            for worker in model.workers:
                worker.stop()
        await asyncio.sleep(CUT_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
