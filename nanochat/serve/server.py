"""The web server itself, uvicorn: connections with deadlines, and a shutdown that lets answers end first."""
import asyncio
import signal
import socket
from types import FrameType

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanochat.serve.worker import ServedModel

# Seconds for a client to send a request, or to read what is ready.
WAIT_SECONDS = 60
# Seconds after SIGTERM for answers to end, and then for clients to read the error that ends the others.
DRAIN_SECONDS = 5
CUT_SECONDS = 2
# Seconds between the tests whether a client that has stopped sending is still there.
PROBE_SECONDS = 1
# Each connection is an open file, and many systems allow a process 1,024 of them.
MAX_CONNECTIONS = 512


class ImpatientProtocol(H11Protocol):
    """
    A connection with deadlines for sending a request and for reading the response. There are at most MAX_CONNECTIONS:
    a new one replaces the connection that has kept the server waiting longest.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.turn_began = self.loop.time()
        self.check_deadline()
        if len(self.connections) > MAX_CONNECTIONS:
            # Never empty: this connection is waiting.
            waiting = [other for other in self.connections if other.is_clients_turn()]
            oldest = min(waiting, key=lambda other: other.turn_began)
            self.connections.discard(oldest)
            oldest.transport.abort()

    def is_clients_turn(self) -> bool:
        """Whether the client must send the rest of a request, or read."""
        return self.cycle is None or self.cycle.more_body or self.cycle.response_complete or self.flow.write_paused

    def check_deadline(self) -> None:
        """The client's turn ends when its request is complete, or everything is read; single bytes do not end it."""
        now = self.loop.time()
        if not self.is_clients_turn():
            self.turn_began = now
        elif now - self.turn_began > WAIT_SECONDS:
            self.transport.abort()
        self.timer = self.loop.call_later(WAIT_SECONDS / 20, self.check_deadline)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # A short answer may have come and gone between two checks.
        self.turn_began = self.loop.time()

    def eof_received(self) -> bool:
        """True: a client that has sent its whole request, and closes its sending side, still gets its answer."""
        waits = not self.is_clients_turn()
        if waits:
            self.cycle.keep_alive = False
            self.loop.call_later(PROBE_SECONDS, self.probe)
        return waits

    def probe(self) -> None:
        """
        TCP does not tell a closed sending side from a client that has gone, but the second write to one that has gone
        fails. Before the response HTTP/1.1 allows interim responses, which clients ignore.
        """
        waits = not self.cycle.response_started and not self.transport.is_closing()
        if waits and self.conn.their_http_version == b"1.1":
            self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
            self.loop.call_later(PROBE_SECONDS, self.probe)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.timer.cancel()


class Server(uvicorn.Server):
    """Ends with a model's last worker. After SIGTERM accepted requests get some time to end."""

    def __init__(self, app: ASGIApp, models: list[ServedModel]):
        super().__init__(uvicorn.Config(
            app,
            http=ImpatientProtocol,
            ws="none",
            backlog=128,
            access_log=False,
            server_header=False,
            headers=[
                ("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "no-referrer"),
                ("Cache-Control", "no-store")],
            # Anyone can write X-Forwarded-For, and an address has its own share of the cache and the queue.
            proxy_headers=False,
            # A client could fill the log with warnings about malformed requests.
            log_level="error",
            # Never reached, because connections are cut earlier: uvicorn would print a traceback for each.
            timeout_graceful_shutdown=DRAIN_SECONDS + 2 * CUT_SECONDS,
        ))
        self.models, self.hurries = models, False

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or any(model.dead for model in self.models)

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
            for worker in model.workers:
                worker.stop()
        await asyncio.sleep(CUT_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
