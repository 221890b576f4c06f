"""
Many requests, one engine: it decodes for all of them in a process of its own (engine_process.py), and the event loop
receives what it writes.

    pending = model.submit(request)         to the worker that has least to do
    async for chunks in pending.chunks()    every 40 ms: the text since the last chunks
    pending.cancel()
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
from nanochat.inference.prompt_cache import PIECE
from nanochat.inference.tools import Tools
from nanochat.serve.protocol import TIMEOUT, ApiError, Batch, Chunk, Chunks, Request, unavailable

ENGINE = "from nanochat.serve.engine_process import main; main()"   # -m would know its classes under another name
SIGNALS = signal.SIGINT, signal.SIGTERM     # they come to all processes of a terminal or service; the web heeds them
SLACK = 10          # seconds beyond a request's time that its engine has to end it
MAX_QUEUE = 128     # choices that may wait for each engine, half of them one address's
# An engine says each second that it is alive if it waits for requests, has ended a step or used the processor since. So
# one that is slow is told from one that hangs: that one is stopped, or waits for what never comes. Seconds of silence:
HUNG_AFTER = 10     # others get its requests, also while a single step takes that long
DEAD_AFTER = 60     # it is ended, and its requests with it
STUCK_AFTER = 600   # likewise for a step that takes so long, though it computes, and for silence while it loads


class Pending:
    """A request that a worker was given, and where it stands."""

    def __init__(self, request: Request, worker: "Worker"):
        self.request, self.worker = request, worker
        self.open = request.size            # choices that have not ended
        self.writing: set[int] = set()      # choices that have begun and not ended
        self.deadline = request.started + TIMEOUT + SLACK
        self.received: asyncio.Queue[list[Chunk] | ApiError] = asyncio.Queue()
        self.watcher: asyncio.Task | None = None    # cancels it when its client goes

    async def chunks(self) -> Chunks:
        """What was written, until all choices have ended. Raises the ApiError that ends the request before."""
        while self.open or not self.received.empty():
            item = await self.received.get()
            if isinstance(item, ApiError):
                raise item
            yield item

    def receive(self, item: list[Chunk] | ApiError) -> None:
        self.received.put_nowait(item)
        if isinstance(item, ApiError):
            self.open = 0
            return
        ended = {chunk.index for chunk in item if chunk.finish_reason}
        self.writing = (self.writing | {chunk.index for chunk in item}) - ended
        self.open -= len(ended)

    def cancel(self) -> None:
        """The client has gone."""
        self.end(ApiError(499, "the client has gone"))

    def end(self, error: ApiError) -> None:
        """Give back the places of the choices that have not ended, if any."""
        if self.open:
            self.worker.send(self.request.id)
            self.worker.deliver({self.request.id: error})


class Worker:
    """
    An engine's process. state: "loading", "ready", "stopping" after `stop`, or "dead" after it has ended by itself or
    was ended because it said nothing for too long.
    """

    def __init__(self, make_engine: Callable[[], Engine]):
        self.make_engine = make_engine  # is called there, so it can be pickled
        self.state = "loading"
        self.pending: dict[int, Pending] = {}   # what has not ended, by id
        self.silence = 0                        # seconds since its last message
        self.step_age = 0.0                     # seconds that its step took so far, when it sent that

    @property
    def load(self) -> int:
        """Choices that were accepted and have not ended."""
        return sum(pending.open for pending in self.pending.values())

    @property
    def alive(self) -> bool:
        return self.state in ("loading", "ready")

    @property
    def condition(self) -> str:
        """Its state; a ready one may be "slow", in the middle of a long step, or "silent", which soon ends it."""
        if self.state == "ready" and max(self.silence, self.step_age) >= HUNG_AFTER:
            return "silent" if self.silence >= HUNG_AFTER else "slow"
        return self.state

    async def start(self) -> None:
        self.process, web = self.launch()
        self.reader, self.writer = await asyncio.open_connection(sock=web)
        self.send(self.make_engine)
        self.reading = asyncio.create_task(self.read())
        self.watching = asyncio.create_task(self.watch())

    def launch(self) -> tuple[subprocess.Popen, socket.socket]:
        """The engine's process, and our end of the socket to it."""
        ours, theirs = socket.socketpair()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)   # a process is born with the signals that are blocked now
        try:
            command = [sys.executable, "-c", ENGINE, str(theirs.fileno())]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            theirs.close()
        return process, ours

    def stop(self) -> None:
        """End the process, and with an error what is running: now, the process may take a while to go."""
        if self.alive:
            self.state = "stopping"
        self.end_all("")
        self.process.kill()

    def send(self, message: Any) -> None:
        """It waits in the event loop while the engine reads nothing."""
        self.writer.write(pickle.dumps(message))

    async def read(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):     # it has ended
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
        self.end_all(f"ended with code {code}")     # below 0: by a signal; else it has said why

    async def watch(self) -> None:
        """
        End an engine that is silent, and requests that it has not ended in time. Silence is counted in turns of this
        loop: while this process itself is stopped, as by Ctrl-Z, nothing adds up.
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
            if pending is None:  # cancelled while this was on its way
                continue
            pending.receive(item)
            if not pending.open:
                del self.pending[id]

    def end_all(self, reason: str) -> None:
        """The process has ended, or is given up."""
        if self.alive:
            self.state = "dead"
            print(f"a worker has died: process {self.process.pid} {reason}", file=sys.stderr, flush=True)
        self.deliver(dict.fromkeys(self.pending, self.gone()))

    def gone(self) -> ApiError:
        return unavailable("the server is stopping" if self.state == "stopping" else "the model's worker has died")


@dataclass
class ServedModel:
    """A model that may be asked, on one device or on several."""
    id: str
    tokenizer: Tokenizer
    context: int                    # tokens
    max_batch: int                  # choices of one address written at once on each device
    workers: list[Worker]
    tools: Tools = Tools()          # the same as the engines', to say where a passage comes from
    chats: bool = True              # else it is a base model: messages are a text that it continues
    examples: Sequence[str] = ()    # questions to suggest

    @property
    def dead(self) -> bool:
        return all(worker.state == "dead" for worker in self.workers)

    def submit(self, request: Request) -> Pending:
        """
        Give the request to a worker. ApiError when that has too much to do (429) or none is there (503). Choices of one
        client may wait only while there is room for as many more: so others find room.
        """
        worker = self.choose(request)
        room = self.max_batch + MAX_QUEUE - worker.load - request.size
        own = sum(other.open for other in worker.pending.values() if other.request.client == request.client)
        if own + request.size - self.max_batch > room or room < 0:
            headers = {"Retry-After": "2"}
            raise ApiError(429, "too many requests are waiting; try again", "rate_limit_exceeded", headers=headers)
        pending = worker.pending[request.id] = Pending(request, worker)
        worker.send(request)
        return pending

    def choose(self, request: Request) -> Worker:
        """
        The worker that reads all prompts with this beginning, so that its prompt cache has it, while a place is free
        there; else the worker with least to do.
        """
        alive = [worker for worker in self.workers if worker.alive]
        if not alive:
            raise self.workers[0].gone()
        usable = [worker for worker in alive if worker.condition == "ready"] or alive
        prompt = request.prompts[0]
        home = self.workers[hash((request.client, *prompt[:PIECE])) % len(self.workers)]
        if len(prompt) >= PIECE and home in usable and home.load < self.max_batch:
            return home
        return min(usable, key=lambda worker: worker.load)

    @property
    def max_choices(self) -> int:
        """Most choices of one request."""
        return self.max_batch + MAX_QUEUE // 2

    @property
    def running(self) -> int:
        return sum(len(pending.writing) for worker in self.workers for pending in worker.pending.values())

    @property
    def waiting(self) -> int:
        return sum(worker.load for worker in self.workers) - self.running
