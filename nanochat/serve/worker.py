"""
Many requests, one engine: the engine decodes for all of them in its own process (engine_process.py), and the event loop
receives the text.

    pending = model.submit(request)         to the least loaded worker
    async for chunk in pending.chunks()     every 40 ms: the text since the last chunk
    pending.end(error)
"""
import asyncio
import contextlib
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.engine import Engine
from nanochat.inference.tools import Tools
from nanochat.serve.protocol import TIMEOUT, ApiError, Batch, Chunk, Chunks, Request, unavailable

# With -m the process would know its classes under another name.
ENGINE = "from nanochat.serve.engine_process import main; main()"
# A terminal or service manager sends these to all processes. Only the web process reacts.
SIGNALS = signal.SIGINT, signal.SIGTERM
# Seconds beyond a request's time in which its engine must end it.
SLACK = 10
# Choices that may wait for each engine. One address may have half of them.
MAX_QUEUE = 128
# Every second an engine says that it is alive, if it waits for requests, has ended a step, or has used the processor.
# So a slow engine is not mistaken for a hanging one, which is stopped or waits for an event that never comes. After
# HUNG_AFTER seconds of silence, or of a single step, other engines get its new requests; after DEAD_AFTER seconds of
# silence it is ended, and its requests with it. STUCK_AFTER is the limit for a step that computes, and for silence
# during loading.
HUNG_AFTER = 10
DEAD_AFTER = 60
STUCK_AFTER = 600


class Pending:
    """A request that a worker has accepted, and its progress."""

    def __init__(self, request: Request, worker: "Worker"):
        self.request, self.worker = request, worker
        # Numbers of the choices that have not ended, and of the choices that have begun.
        self.open = set(range(request.size))
        self.begun: set[int] = set()
        self.deadline = request.started + TIMEOUT + SLACK
        self.received: asyncio.Queue[list[Chunk] | ApiError] = asyncio.Queue()
        # Set when the engine has compiled the grammar, if there is one.
        self.compiled = asyncio.Event()
        if request.grammar is None:
            self.compiled.set()
        # The task that cancels this request when its client disconnects. The event loop itself keeps no reference.
        self.watcher: asyncio.Task | None = None

    async def chunks(self) -> Chunks:
        """All chunks until all choices have ended. Raises the ApiError that ends the request early."""
        while self.open or not self.received.empty():
            item = await self.received.get()
            if isinstance(item, ApiError):
                raise item
            for chunk in item:
                yield chunk

    def receive(self, item: list[Chunk] | ApiError) -> None:
        self.compiled.set()
        self.received.put_nowait(item)
        if isinstance(item, ApiError):
            self.open.clear()
            return
        self.begun |= {chunk.index for chunk in item}
        self.open -= {chunk.index for chunk in item if chunk.finish_reason}

    def end(self, error: ApiError) -> None:
        """Free the places of choices that have not ended, if any."""
        if self.open:
            self.worker.send(self.request.id)
            self.worker.deliver({self.request.id: error})


class Worker:
    """
    An engine's process. state: "loading", "ready", "stopping" after `stop`, or "dead" if it ended on its own or was
    ended after a long silence.
    """

    def __init__(self, make_engine: Callable[[], Engine]):
        # Called in the other process, so it must be picklable.
        self.make_engine = make_engine
        self.state = "loading"
        self.pending: dict[int, Pending] = {}   # open requests by id
        self.silence = 0                        # seconds since the last message
        self.step_age = 0.0                     # seconds that the current step had taken at that message

    @property
    def load(self) -> int:
        """Choices that were accepted and have not ended."""
        return sum(len(pending.open) for pending in self.pending.values())

    @property
    def alive(self) -> bool:
        return self.state in ("loading", "ready")

    @property
    def condition(self) -> str:
        """The state; "slow" is a ready worker that is silent or in a long step."""
        is_slow = max(self.silence, self.step_age) >= HUNG_AFTER
        return "slow" if self.state == "ready" and is_slow else self.state

    async def start(self) -> None:
        self.process, web = self.launch()
        self.reader, self.writer = await asyncio.open_connection(sock=web)
        self.send(self.make_engine)
        self.reading = asyncio.create_task(self.read())
        self.watching = asyncio.create_task(self.watch())

    def launch(self) -> tuple[subprocess.Popen, socket.socket]:
        """The engine's process, and our end of the socket to it."""
        ours, theirs = socket.socketpair()
        # A new process inherits the blocked signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            command = [sys.executable, "-c", ENGINE, str(theirs.fileno())]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            theirs.close()
        return process, ours

    def stop(self) -> None:
        """Kill the process. Its requests end now, with an error, because the process may take a while to end."""
        if self.alive:
            self.state = "stopping"
        self.end_all("")
        self.process.kill()

    def send(self, message: Any) -> None:
        """If the engine does not read, the message waits in the event loop's memory."""
        self.writer.write(pickle.dumps(message))

    async def read(self) -> None:
        # The stream ends with the process.
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                size = int.from_bytes(await self.reader.readexactly(4))
                message = pickle.loads(await self.reader.readexactly(size))
                self.silence = 0
                if isinstance(message, float):
                    self.step_age = message
                    continue
                if self.state == "loading":
                    self.state = "ready"
                self.deliver(message)
        code = await asyncio.to_thread(self.process.wait)
        # A negative code is a signal's number. Otherwise the process has printed the reason.
        self.end_all(f"ended with code {code}")

    async def watch(self) -> None:
        """
        End a silent engine, and requests that it has not ended in time. Silence is counted in iterations of this loop:
        while this process itself is stopped, as by Ctrl-Z, no silence is counted.
        """
        while self.alive:
            await asyncio.sleep(1)
            for pending in list(self.pending.values()):
                if time.monotonic() > pending.deadline:
                    pending.end(unavailable(f"no answer within {TIMEOUT:g} s"))
            self.silence += 1
            patience = STUCK_AFTER if self.state == "loading" else DEAD_AFTER
            if self.silence >= patience:
                self.end_all(f"said nothing for {patience} s and was ended")
            elif self.step_age >= STUCK_AFTER:
                self.end_all(f"was {STUCK_AFTER} s in one step and was ended")
        self.process.kill()

    def deliver(self, batch: Batch) -> None:
        for id, item in batch.items():
            pending = self.pending.get(id)
            # None: the request was cancelled while the message was on its way.
            if pending is None:
                continue
            pending.receive(item)
            if not pending.open:
                del self.pending[id]

    def end_all(self, reason: str) -> None:
        """End all requests: the process has ended, or we give it up."""
        if self.alive:
            self.state = "dead"
            print(f"a worker has died: process {self.process.pid} {reason}", file=sys.stderr, flush=True)
        self.deliver(dict.fromkeys(self.pending, self.gone()))

    def gone(self) -> ApiError:
        return unavailable("the server is stopping" if self.state == "stopping" else "the model's worker has died")


@dataclass
class ServedModel:
    """A model that answers requests, on one device or on several."""
    id: str
    tokenizer: Tokenizer
    context: int                    # tokens
    max_batch: int                  # choices of one address that each device writes at once
    workers: list[Worker]
    tools: Tools = Tools()          # the same as the engines', to say where a passage comes from
    chats: bool = True              # False: a base model, which continues the messages as one text
    examples: Sequence[str] = ()    # questions to suggest

    async def start(self) -> None:
        for worker in self.workers:
            await worker.start()

    @property
    def dead(self) -> bool:
        return all(worker.state == "dead" for worker in self.workers)

    def submit(self, request: Request) -> Pending:
        """Give the request to a worker. ApiError if the worker has too much to do (429) or none is alive (503)."""
        worker = self.choose()
        room = self.max_batch + MAX_QUEUE - worker.load - request.size
        own = sum(len(other.open) for other in worker.pending.values() if other.request.client == request.client)
        # A client's choices may wait only while there is room for as many more, so others can still come.
        if room < max(0, own + request.size - self.max_batch):
            headers = {"Retry-After": "2"}
            raise ApiError(429, "too many requests are waiting; try again", "rate_limit_exceeded", headers=headers)
        pending = worker.pending[request.id] = Pending(request, worker)
        worker.send(request)
        return pending

    def choose(self) -> Worker:
        """The least loaded worker that is alive, if possible one that is ready."""
        alive = [worker for worker in self.workers if worker.alive]
        if not alive:
            raise self.workers[0].gone()
        usable = [worker for worker in alive if worker.condition == "ready"] or alive
        return min(usable, key=lambda worker: worker.load)

    @property
    def max_choices(self) -> int:
        """The most choices of one request."""
        return self.max_batch + MAX_QUEUE // 2

    @property
    def running(self) -> int:
        return sum(len(one.open & one.begun) for worker in self.workers for one in worker.pending.values())

    @property
    def waiting(self) -> int:
        return sum(worker.load for worker in self.workers) - self.running
