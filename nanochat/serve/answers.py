"""
What a request asks of a model, and what comes of it, as the event loop sees it. The thread that does the work is in
nanochat.serve.worker.
"""
import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from nanochat.detokenizer import Piece
from nanochat.engine import FinishReason
from nanochat.sampling import SamplingParams

if TYPE_CHECKING:
    from nanochat.serve.worker import Worker


class Busy(Exception):
    """Too many wait already; one place becomes free about every `seconds`."""

    def __init__(self, seconds: int):
        super().__init__("too many requests are waiting")
        self.seconds = seconds


class Unavailable(Exception):
    """Nobody is there to answer: the worker has died or is ending, or the request's time was over before its turn came."""


class Failed(Exception):
    """Something went wrong inside while this request was worked on."""


class ClientGone(Exception):
    """Nobody listens any more."""


@dataclass(frozen=True)
class Work:
    """What one request asks for: n answers to each prompt."""
    prompts: list[list[int]]
    sampling: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    stream: bool = False            # else there is one piece of news of each answer, at its end
    seconds: float = math.inf       # then answers end with what they have
    client: str = ""                # who asks: places and queue are shared out among clients

    @property
    def size(self) -> int:
        return len(self.prompts) * self.n


class News(NamedTuple):
    """What was written of one answer since the last news of it."""
    index: int                      # of the answer: n to the first prompt, then those to the second
    pieces: list[Piece]
    tokens: int                     # since the last news; those that are no text count as well
    finish_reason: FinishReason | None


class Answers:
    """The answers to one request, as the event loop sees them."""

    def __init__(self, worker: "Worker", work: Work):
        self.worker, self.work = worker, work
        self.open = work.size       # answers that have not ended
        self.started = time.monotonic()
        self.first_token: float | None = None  # when it was written
        self.closed = False
        self.queue: asyncio.Queue[list[News] | Exception] = asyncio.Queue()
        self.watcher: asyncio.Task | None = None

    async def news(self) -> AsyncIterator[list[News]]:
        """Until all answers have ended. Raises Failed, Unavailable or ClientGone."""
        while True:
            item = await self.queue.get()
            if isinstance(item, Exception):
                raise item
            yield item
            if not self.open and self.queue.empty():
                return

    def watch(self, gone: Awaitable) -> None:
        """Close when `gone` is done."""
        async def wait() -> None:
            await gone
            self.close()
            self.queue.put_nowait(ClientGone())

        self.watcher = asyncio.create_task(wait())

    def put(self, news: list[News] | Exception) -> None:
        """From the worker."""
        if self.closed:
            return
        ended = self.open if isinstance(news, Exception) else sum(one.finish_reason is not None for one in news)
        self.open -= ended
        self.worker.load -= ended
        self.queue.put_nowait(news)
        if not self.open:
            self.worker.finished(self)

    def close(self) -> None:
        """Give back the places of what has not ended. To be called in any case, once or more."""
        if self.watcher and self.watcher is not asyncio.current_task():
            self.watcher.cancel()
        if not self.closed and self.open:
            self.worker.load -= self.open
            self.worker.answers.discard(self)
            self.worker.inbox.put(partial(self.worker.drop, self))
        self.closed = True
