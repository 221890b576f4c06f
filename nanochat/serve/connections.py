"""Connections whose clients must not keep the server waiting."""
import asyncio
import resource
from collections import Counter

from uvicorn.protocols.http.h11_impl import H11Protocol

WAIT_SECONDS = 60   # for a whole request, and for a client to read what is ready for it
MAX_CONNECTIONS = min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)  # each is an open file


class ImpatientProtocol(H11Protocol):
    """
    A connection with deadlines: for a request, the first or a later one, and for reading what was sent. There are at
    most MAX_CONNECTIONS, or they would use up the process's files: a new one replaces the one that has kept the server
    waiting longest, of those from the address with the most connections.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.deadline = self.loop.call_later(WAIT_SECONDS, transport.abort)
        if len(self.connections) > MAX_CONNECTIONS:
            counts = Counter(other.address() for other in self.connections)
            waiting = [other for other in self.connections if other.is_clients_turn()]  # this one, too
            oldest = max(waiting, key=lambda other: (counts[other.address()], -other.deadline.when()))
            self.connections.discard(oldest)
            oldest.transport.abort()

    def address(self) -> str:
        return self.client[0] if self.client else ""

    def is_clients_turn(self) -> bool:
        """To send a request to its end, or to read."""
        return self.cycle is None or self.cycle.more_body or self.cycle.response_complete or self.flow.write_paused

    def update_deadline(self) -> None:
        """When it becomes the client's turn, its time begins. Single bytes, sent or read, do not prolong it."""
        if not self.is_clients_turn():
            self.deadline.cancel()
        elif self.deadline.cancelled():
            self.deadline = self.loop.call_later(WAIT_SECONDS, self.transport.abort)

    # Whatever may change whose turn it is

    def handle_events(self) -> None:
        super().handle_events()
        self.update_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.update_deadline()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.update_deadline()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.update_deadline()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.deadline.cancel()
