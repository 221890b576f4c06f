"""
Many requests, one engine: it decodes for all of them in a process of its own (engine_process.py), and the event loop
receives what it writes. One thread reads the pipe and one writes to it, since either may have to wait for the engine;
everything else here runs on the event loop.

    pending = model.submit(request)         to the worker that has least to do
    async for chunks in pending.chunks()    every 40 ms: the text since the last chunks
    pending.cancel()
"""
import asyncio
import contextlib
import math
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.engine import Engine
from nanochat.inference.prompt_cache import PIECE
from nanochat.serve.api_error import ApiError, unavailable
from nanochat.serve.engine_process import Batch, Chunk, Request

ENGINE = "from nanochat.serve.engine_process import main; main()"   # -m would know its classes under another name
SIGNALS = signal.SIGINT, signal.SIGTERM     # which come to all processes of a terminal or service; the web heeds them
# Seconds without a message from an engine that is not loading: each sends one a second at least, between its steps.
HUNG_AFTER = 10     # /health says so, and others get its requests; a large model's step on a CPU may take that long
DEAD_AFTER = 60     # it is ended, and its requests with it
GRACE = 10          # seconds beyond a request's own in which its engine should have ended it
MAX_HOMES = 10_000  # beginnings of conversations of which is known where they were read


class Pending:
    """A request that a worker was given, and where it stands."""

    def __init__(self, request: Request, worker: "Worker"):
        self.request, self.worker = request, worker
        self.open = request.size            # choices that have not ended
        self.writing: set[int] = set()      # those of which something has come
        self.first_token: float | None = None   # when it came
        self.accepted = asyncio.Event()     # or refused: its grammar has been compiled
        self.received: asyncio.Queue[list[Chunk] | ApiError] = asyncio.Queue()
        self.watcher: asyncio.Task | None = None    # cancels it when its client goes

    async def chunks(self) -> AsyncIterator[list[Chunk]]:
        """What was written, until all choices have ended. Raises the ApiError that ends the request before."""
        while self.open or not self.received.empty():
            item = await self.received.get()
            if isinstance(item, ApiError):
                raise item
            yield item

    def receive(self, item: list[Chunk] | ApiError) -> None:
        self.accepted.set()
        if isinstance(item, ApiError):
            self.open = 0
        elif item:
            self.first_token = self.first_token or time.monotonic()
            ended = {chunk.index for chunk in item if chunk.finish_reason}
            self.writing = (self.writing | {chunk.index for chunk in item}) - ended
            self.open -= len(ended)
        if item:
            self.received.put_nowait(item)

    def cancel(self, error: ApiError | None = None) -> None:
        """Give back the places of the choices that have not ended, if any. error: None: the client has gone."""
        if self.open:
            self.worker.outbox.put(self.request.id)
            self.worker.deliver({self.request.id: error or ApiError(499, "the client has gone")})


class Worker:
    """
    An engine's process. state: "loading", "ready", "hung" while it says nothing, or "dead" after it has ended by itself
    or was ended because it said nothing for too long.
    """

    def __init__(self, make_engine: Callable[[], Engine]):
        self.make_engine = make_engine  # is called there, so it can be pickled
        self.state, self.stopping = "loading", False
        self.process: subprocess.Popen | None = None
        self.pending: dict[int, Pending] = {}   # what has not ended, by id
        self.outbox: queue.SimpleQueue[Request | int | None] = queue.SimpleQueue()  # for the engine; None: no more
        self.silence = 0                        # seconds since its last message
        self.seconds = 1.0                      # that a request took of late
        self.thread = threading.Thread(target=self.read, daemon=True, name="worker")

    @property
    def load(self) -> int:
        """Choices that were accepted and have not ended."""
        return sum(pending.open for pending in self.pending.values())

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.process, self.connection = self.launch()
        self.thread.start()
        threading.Thread(target=self.write, daemon=True, name="to the worker").start()
        self.watcher = self.loop.create_task(self.watch())

    def launch(self) -> tuple[subprocess.Popen, Connection]:
        """The engine's process, and this end of the pipe to it."""
        ours, theirs = socket.socketpair()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)   # what is blocked now is blocked there from the beginning
        try:
            command = [sys.executable, "-c", ENGINE, str(theirs.fileno())]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            theirs.close()
        connection = Connection(ours.detach())
        connection.send(self.make_engine)
        return process, connection

    def stop(self) -> None:
        """End what is running with an error, and the process."""
        self.stopping = True
        if self.process:
            self.process.kill()

    def submit(self, request: Request) -> Pending:
        pending = self.pending[request.id] = Pending(request, self)
        self.outbox.put(request)
        return pending

    def write(self) -> None:
        """A thread: the pipe may be full, and its engine stopped."""
        with contextlib.suppress(OSError):  # the process has ended: `read` sees that, too
            while (message := self.outbox.get()) is not None:
                self.connection.send(message)

    def read(self) -> None:
        """A thread."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self.post(self.hear, self.connection.recv())
        self.outbox.put(None)
        self.process.wait()
        self.post(self.end_all)

    def hear(self, batch: Batch) -> None:
        """A message, empty or not, tells that the engine is there."""
        if self.state != "dead":
            self.state, self.silence = "ready", 0
        self.deliver(batch)

    async def watch(self) -> None:
        """
        End what the engine should have ended. Silence is counted in looks: while this process itself is stopped, as by
        Ctrl-Z, nothing adds up.
        """
        while self.state != "dead" and not self.stopping:
            await asyncio.sleep(1)
            for pending in list(self.pending.values()):
                request = pending.request
                if time.monotonic() - request.started > request.seconds + GRACE:
                    pending.cancel(unavailable(f"no answer within {request.seconds:g} s"))
            if self.state == "loading":
                continue
            self.silence += 1
            if self.silence >= HUNG_AFTER:
                self.state = "hung"
            if self.silence >= DEAD_AFTER:
                self.end_all(f"said nothing for {DEAD_AFTER} s and was ended")
                self.process.kill()

    def post(self, callback: Callable, *args) -> None:
        """Have the event loop call it."""
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits for an answer
            self.loop.call_soon_threadsafe(callback, *args)

    def deliver(self, batch: Batch) -> None:
        for id, item in batch.items():
            pending = self.pending.get(id)
            if pending is None:  # cancelled while this was on its way
                continue
            pending.receive(item)
            if not pending.open:
                del self.pending[id]
                self.seconds += 0.1 * (time.monotonic() - pending.request.started - self.seconds)

    def end_all(self, why: str = "") -> None:
        """The process has ended, or is given up: why."""
        error = unavailable("the server is stopping" if self.stopping else "the model's worker has died")
        self.deliver(dict.fromkeys(self.pending, error))
        if self.stopping or self.state == "dead":
            return
        self.state = "dead"
        code = self.process.returncode
        if code is not None and code < 0:   # else it has said why
            why = f"was ended by {signal.Signals(-code).name}"
        if why:
            print(f"a worker has died: process {self.process.pid} {why}", file=sys.stderr, flush=True)


@dataclass
class ServedModel:
    """A model that may be asked, on one device or on several."""
    id: str
    tokenizer: Tokenizer
    context: int                    # tokens
    step: int                       # of its checkpoint
    created: int                    # when that was, in seconds since 1970
    max_batch: int                  # choices written at once on each device
    max_queue: int                  # choices that may wait on each device
    workers: list[Worker]
    chats: bool = True              # else it is a base model: messages are a text that it continues
    examples: Sequence[str] = ()    # questions to suggest
    homes: dict[int, Worker] = field(default_factory=dict)  # who has read a beginning, by its hash; the latest last

    @property
    def dead(self) -> bool:
        return all(worker.state == "dead" for worker in self.workers)

    def submit(self, request: Request) -> Pending:
        """
        Give the request to the worker that has least to do. ApiError when that has too much (429) or none is there
        (503). Choices of one client may wait only while there is room for as many more: so others find room.
        """
        worker = self.choose(request)
        room = self.max_batch + self.max_queue - worker.load - request.size
        own = sum(other.open for other in worker.pending.values() if other.request.client == request.client)
        if own + request.size - self.max_batch > room or room < 0:
            wait = str(min(max(math.ceil(worker.seconds / self.max_batch), 1), 60))  # one place becomes free, about
            message = f"too many requests are waiting; try again in {wait} s"
            raise ApiError(429, message, "rate_limit_exceeded", headers={"Retry-After": wait})
        return worker.submit(request)

    def choose(self, request: Request) -> Worker:
        """The one whose prompt cache has the beginning, while a place is free there; else the one with least to do."""
        alive = [worker for worker in self.workers if worker.state != "dead" and not worker.stopping]
        if not alive:
            raise unavailable("the model's worker has died")
        beginning = hash((request.client, *request.prompts[0][:PIECE]))
        worker = self.homes.pop(beginning, None)
        usable = [worker for worker in alive if worker.state != "hung"] or alive
        if worker not in usable or worker.load >= self.max_batch:
            worker = min(usable, key=lambda worker: worker.load)
        if len(request.prompts[0]) >= PIECE and len(alive) > 1:
            self.homes[beginning] = worker
            if len(self.homes) > MAX_HOMES:
                del self.homes[next(iter(self.homes))]
        return worker

    @property
    def max_choices(self) -> int:
        """That one request may ask for."""
        return self.max_batch + self.max_queue // 2

    @property
    def running(self) -> int:
        return sum(len(pending.writing) for worker in self.workers for pending in worker.pending.values())

    @property
    def waiting(self) -> int:
        return sum(worker.load for worker in self.workers) - self.running
