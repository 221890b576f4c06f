"""
Many requests, one engine: a thread decodes for all of them, and the event loop receives what it writes.

    event loop                                  the worker's thread
    worker.submit(request)    --- inbox --->    engine.add
                                                engine.step: one token for every choice, again and again
    async for chunks in request.chunks()  <--   every 40 ms: the text since the last chunks
    worker.cancel(request)    --- inbox --->    engine.remove

Methods run on the event loop unless they are in the thread's section.
"""
import asyncio
import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from nanochat.detokenizer import Delta, IncrementalDetokenizer, StopStrings
from nanochat.engine import Answer, Engine, FinishReason
from nanochat.errors import UserError
from nanochat.kv_cache import Prefix
from nanochat.logprobs import TokenLogprob
from nanochat.prompt_cache import PIECE
from nanochat.sampling import SamplingParams
from nanochat.serve.logprobs import HeldLogprobs
from nanochat.serve.openai_api import ApiError
from nanochat.serve.replies import Chunk
from nanochat.tokenizer import Tokenizer

FLUSH_EVERY = 0.04    # seconds: 25 chunks a second look like writing, and cost a fraction of what 400 would


@dataclass(eq=False)
class Request:
    """What a client asks for: n choices for each prompt. The rest is where it stands, as the event loop sees it."""
    prompts: list[list[int]]
    sampling: SamplingParams
    n: int = 1
    stop: Sequence[str] = ()
    seconds: float = math.inf               # after that many, its choices end with what they have
    client: str = ""                        # places and queue are shared fairly among clients
    echo_from: Sequence[int] = ()           # of each prompt, the first token that its choices begin with; (): none
    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None        # when it was written
    received: asyncio.Queue[list[Chunk] | ApiError] = field(default_factory=asyncio.Queue)
    watcher: asyncio.Task | None = None     # cancels it when its client goes

    def __post_init__(self):
        self.size = self.open = len(self.prompts) * self.n  # open: choices that have not ended

    async def chunks(self) -> AsyncIterator[list[Chunk]]:
        """What was written, until all choices have ended. Raises the ApiError that ends the request before."""
        while self.open or not self.received.empty():
            item = await self.received.get()
            if isinstance(item, ApiError):
                raise item
            yield item


@dataclass
class Choice:
    """One continuation of a prompt, as the thread sees it."""
    request: Request
    detokenizer: IncrementalDetokenizer
    stop: StopStrings
    chunk: Chunk    # the next one that is sent
    echo_from: int | None = None    # of the prompt's tokens, which come first; None: none of them, or already there
    logprobs: HeldLogprobs = field(default_factory=HeldLogprobs)

    def add(self, answer: Answer) -> None:
        """The answer has one token more, or has ended without any."""
        if len(answer.tokens) == 1 and self.chunk.index % self.request.n == 0:  # a prompt counts once in the usage
            self.chunk.cached = answer.cached
        if self.echo_from is not None:
            logprobs = answer.prompt_logprobs if answer.sampling.logprobs is not None else []
            for index in range(self.echo_from, len(answer.prompt)):
                self.show(self.read(answer.prompt[index], logprobs[index : index + 1]))
            self.echo_from = None
        if answer.tokens:
            self.chunk.tokens += 1
            for delta in self.read(answer.tokens[-1], answer.logprobs[-1:], bool(answer.finish_reason)):
                self.show(self.stop.add(delta))
        if answer.finish_reason or self.stop.found:
            self.finish("stop" if self.stop.found else answer.finish_reason)

    def read(self, token: int, logprobs: list[TokenLogprob], is_last: bool = False) -> list[Delta]:
        """The text that this token completes."""
        deltas = self.detokenizer.add(token) + (self.detokenizer.end() if is_last else [])
        is_content = self.detokenizer.type == "text" and token not in self.detokenizer.starts
        for logprob in logprobs:
            self.logprobs.add(logprob, is_content)
        self.logprobs.written += sum(len(delta.text) for delta in deltas)
        return deltas

    def show(self, deltas: list[Delta]) -> None:
        self.chunk.deltas += deltas
        self.logprobs.shown += sum(len(delta.text) for delta in deltas)
        self.chunk.logprobs += self.logprobs.release()

    def finish(self, reason: FinishReason) -> None:
        self.show(self.stop.end())
        self.chunk.logprobs += self.logprobs.release(everything=not self.stop.found)
        self.chunk.finish_reason = reason


class Worker:
    """An engine and its thread. state: "loading", "ready", or "dead" after an error that was not one request's."""

    def __init__(self, make_engine: Callable[[], Engine]):
        self.make_engine = make_engine
        self.state, self.stopping = "loading", False
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # what the thread is to do
        # The event loop's
        self.requests: set[Request] = set()     # which have not ended
        self.seconds = 1.0                      # that a request took of late
        # The thread's
        self.engine: Engine | None = None
        self.choices: dict[Answer, Choice] = {}  # by the engine's answer
        self.flushed = 0.0
        self.thread = threading.Thread(target=self.run, daemon=True, name="worker")

    @property
    def load(self) -> int:
        """Choices that were accepted and have not ended."""
        return sum(request.open for request in self.requests)

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    def stop(self) -> None:
        """End what is running with an error, and the thread."""
        self.stopping = True
        self.inbox.put(lambda: None)

    def submit(self, request: Request) -> None:
        self.requests.add(request)
        self.inbox.put(partial(self.add, request))

    def cancel(self, request: Request) -> None:
        """Give back the places of the choices that have not ended, if any."""
        if request in self.requests:
            self.inbox.put(partial(self.drop, request))
            self.deliver({request: ApiError(499, "the client has gone")})

    def deliver(self, batch: dict[Request, list[Chunk] | ApiError]) -> None:
        for request, item in batch.items():
            if request not in self.requests:  # cancelled while this was on its way
                continue
            request.received.put_nowait(item)
            ended = request.open if isinstance(item, ApiError) else sum(bool(chunk.finish_reason) for chunk in item)
            request.open -= ended
            if not request.open:
                self.requests.discard(request)
                self.seconds += 0.1 * (time.monotonic() - request.started - self.seconds)

    def end_all(self) -> None:
        """The thread has ended."""
        error = unavailable("the server is stopping" if self.stopping else "the model's worker has died")
        self.deliver(dict.fromkeys(self.requests, error))

    # ---- The thread's side

    def run(self) -> None:
        try:
            self.engine = self.make_engine()
            self.state = "ready"
            while not self.stopping:
                self.step()
        except BaseException as error:
            self.state = "dead"
            own = f": {error}" * isinstance(error, UserError)  # of the engine's settings: no user has asked yet
            log_error(f"a worker has died{own}", error)
        self.post(self.end_all)

    def post(self, callback: Callable, *args) -> None:
        """Have the event loop call it."""
        try:
            self.loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop has ended: nobody waits for an answer
            pass

    def step(self) -> None:
        """What the inbox holds, a token for every choice, and the chunks when it is time."""
        engine = self.engine
        try:
            while not self.stopping:
                self.inbox.get(block=not engine.busy)()
        except queue.Empty:
            pass
        try:
            advanced = engine.step(PIECE)  # of prompts: everyone waits while they are read
        except Exception as error:
            engine.clear()
            return self.fail({choice.request for choice in self.choices.values()}, error)
        now, flush = time.monotonic(), False
        failed: dict[Request, Exception] = {}
        for answer in advanced:
            choice = self.choices[answer]
            if answer.error:
                failed[choice.request] = answer.error
                continue
            choice.add(answer)
            if choice.request.first_token is None:
                choice.request.first_token, flush = now, True
            if choice.chunk.finish_reason and not answer.finish_reason:
                engine.remove(answer)
        for request, error in failed.items():
            self.fail({request}, error)
        if flush or not engine.busy or now - self.flushed >= FLUSH_EVERY:
            self.flush(now)

    def add(self, request: Request) -> None:
        try:
            for number, prompt in enumerate(request.prompts):
                answers = self.engine.add(prompt, request.sampling, request.n, owner=request.client)
                echo_from = request.echo_from[number] if request.echo_from else None
                for index, answer in enumerate(answers, number * request.n):
                    detokenizer, stop = IncrementalDetokenizer(self.engine.tokenizer), StopStrings(request.stop)
                    self.choices[answer] = Choice(request, detokenizer, stop, Chunk(index), echo_from)
        except Exception as error:  # what can be wrong with a request should have been found before
            self.fail({request}, error)

    def drop(self, request: Request) -> None:
        for answer in [answer for answer, choice in self.choices.items() if choice.request is request]:
            self.engine.remove(answer)
            del self.choices[answer]

    def fail(self, requests: set[Request], error: Exception) -> None:
        """End these requests. If the model cannot even read one token any more, that ends the worker."""
        told = ApiError(400, str(error))
        if not isinstance(error, UserError):
            log_error("a request failed", error)
            told = ApiError(500, "the model could not answer this request", "internal_error")
        for request in requests:
            self.drop(request)
        self.post(self.deliver, dict.fromkeys(requests, told))
        self.engine.model.extend(Prefix(), [self.engine.tokenizer.get_bos_token_id()])

    def flush(self, now: float) -> None:
        """Send all that is new to the event loop, in one call; end the requests whose time is over."""
        self.flushed = now
        batch: dict[Request, list[Chunk] | ApiError] = {}
        for answer, choice in list(self.choices.items()):
            request, chunk = choice.request, choice.chunk
            if now - request.started > request.seconds and not chunk.finish_reason:
                choice.finish("length")
                self.engine.remove(answer)
                if request.first_token is None:
                    batch[request] = unavailable(f"no place became free within {request.seconds:g} s")
            if chunk.finish_reason:
                del self.choices[answer]
            if chunk.tokens or chunk.finish_reason:
                choice.chunk = Chunk(chunk.index)
                chunks = batch.setdefault(request, [])
                if isinstance(chunks, list):
                    chunks.append(chunk)
        if batch:
            self.post(self.deliver, batch)


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

    @property
    def dead(self) -> bool:
        return all(worker.state == "dead" for worker in self.workers)

    def submit(self, request: Request) -> Worker:
        """
        Give the request to the worker that has least to do. ApiError when that has too much (429) or none is there
        (503). Choices of one client may wait only while there is room for as many more: so others find room.
        """
        alive = [worker for worker in self.workers if worker.state != "dead" and not worker.stopping]
        if not alive:
            raise unavailable("the model's worker has died")
        worker = min(alive, key=lambda worker: worker.load)
        room = self.max_batch + self.max_queue - worker.load - request.size
        own = sum(other.open for other in worker.requests if other.client == request.client) + request.size
        if own - self.max_batch > room or room < 0:
            wait = str(min(max(math.ceil(worker.seconds / self.max_batch), 1), 60))  # one place becomes free, about
            message = f"too many requests are waiting; try again in {wait} s"
            raise ApiError(429, message, "rate_limit_exceeded", headers={"Retry-After": wait})
        worker.submit(request)
        return worker

    @property
    def max_choices(self) -> int:
        """That one request may ask for."""
        return self.max_batch + self.max_queue // 2

    @property
    def running(self) -> int:
        return sum(len(worker.engine.running) for worker in self.workers if worker.engine)

    @property
    def waiting(self) -> int:
        return max(0, sum(worker.load for worker in self.workers) - self.running)


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, "unavailable", headers={"Retry-After": "5"})


def log_error(what: str, error: BaseException) -> None:
    """On stderr: where an error came from, without its message, which may quote what somebody wrote."""
    trace = "".join(traceback.format_tb(error.__traceback__))
    print(f"{what}: {type(error).__name__}\n{trace}", file=sys.stderr, end="", flush=True)
