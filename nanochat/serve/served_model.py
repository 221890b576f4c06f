"""
A model that answers many requests: its engine decodes for all of them in a thread, and the event loop gets the text.

    event loop                                       the engine's thread
    pending = model.submit(request)     -- inbox -->  engine.add
                                                      engine.step: one token for every choice, again and again
    async for chunk in pending.chunks() <-- loop ---  every 40 ms: the text since the last chunks
    pending.end(error)                  -- inbox -->  engine.remove

Both share Python's lock, which torch gives away while it computes.
"""
import asyncio
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.detokenizer import Delta, IncrementalDetokenizer, StopStrings
from nanochat.inference.engine import Answer, Engine, FinishReason
from nanochat.inference.logprobs import TokenLogprob
from nanochat.inference.tools import Tools
from nanochat.runtime.console import log_error
from nanochat.runtime.devices import compute_dtype
from nanochat.runtime.distributed import compute_init
from nanochat.runtime.errors import UserError
from nanochat.serve.protocol import TIMEOUT, ApiError, Chunk, Chunks, PlacedLogprob, Request, unavailable
from nanochat.training.checkpoint import load_checkpoint

# Seconds. 25 chunks per second look like writing, at a fraction of the cost of 400.
FLUSH_EVERY = 0.04
# Tokens of prompts that are read in one step: everyone waits meanwhile.
PIECE = 128
# Seconds in one step after which /health calls an engine slow.
SLOW_AFTER = 10
# Choices that may wait.
MAX_QUEUE = 128


@dataclass
class Choice:
    """One continuation of a prompt, from tokens to text that may be shown."""
    pending: "Pending"
    detokenizer: IncrementalDetokenizer
    stop: StopStrings
    chunk: Chunk                    # the next chunk to send
    echo_from: int | None = None    # repeat the prompt's tokens from here on; None: no echo, or already done
    written: int = 0                # characters
    shown: int = 0                  # characters; the others may be the beginning of a stop string
    # Log-probabilities of tokens whose text has not been shown.
    held: deque[PlacedLogprob] = field(default_factory=deque)

    def add(self, answer: Answer) -> None:
        """Take in the answer's next token, or its end without one."""
        if self.echo_from is not None:
            self.echo(answer)
        if answer.tokens:
            self.chunk.tokens += 1
            deltas = self.read(answer.tokens[-1], answer.logprobs[-1:])
            if answer.finish_reason:
                deltas += self.detokenizer.end()
            for delta in deltas:
                self.show(self.stop.add(delta))
        if self.stop.found:
            self.finish("stop")
        elif answer.finish_reason:
            self.finish(answer.finish_reason)

    def echo(self, answer: Answer) -> None:
        logprobs = answer.prompt_logprobs if answer.sampling.logprobs is not None else []
        for index in range(self.echo_from, len(answer.prompt)):
            self.show(self.read(answer.prompt[index], logprobs[index : index + 1]))
        self.echo_from = None

    def read(self, token: int, logprobs: list[TokenLogprob]) -> list[Delta]:
        """The text that this token completes."""
        deltas = self.detokenizer.add(token)
        is_content = self.detokenizer.type == "text" and token not in self.detokenizer.starts
        self.held += [PlacedLogprob(logprob, is_content, self.written) for logprob in logprobs]
        self.written += length_of(deltas)
        return deltas

    def show(self, deltas: list[Delta]) -> None:
        """A log-probability is shown with the first character of its token."""
        self.chunk.deltas += deltas
        self.shown += length_of(deltas)
        while self.held and self.held[0].offset < self.shown:
            self.chunk.logprobs.append(self.held.popleft())

    def finish(self, reason: FinishReason) -> None:
        self.show(self.stop.end())
        # The last tokens may have no text; but what a stop string cuts off stays hidden.
        if not self.stop.found:
            self.chunk.logprobs += self.held
        self.chunk.finish_reason = reason


def length_of(deltas: list[Delta]) -> int:
    return sum(len(delta.text) for delta in deltas)


class Pending:
    """An accepted request and its progress, in the event loop."""

    def __init__(self, request: Request, model: "ServedModel"):
        self.request, self.model = request, model
        self.open = set(range(request.size))    # numbers of the choices that have not ended
        self.begun: set[int] = set()            # and of those that have begun
        self.received: asyncio.Queue[list[Chunk] | ApiError] = asyncio.Queue()
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
        if not self.open:  # it was cancelled while the text was on its way
            return
        self.received.put_nowait(item)
        if isinstance(item, ApiError):
            self.open.clear()
        else:
            self.begun |= {chunk.index for chunk in item}
            self.open -= {chunk.index for chunk in item if chunk.finish_reason}
        if not self.open:
            self.model.pending.discard(self)

    def end(self, error: ApiError) -> None:
        """Free the places of choices that have not ended, if any."""
        if self.open:
            self.model.inbox.put(partial(self.model.drop, self))
            self.receive(error)


class ServedModel:
    """
    A model, and the engine that `make_engine` makes in its thread. state: "loading", "ready", "stopping" after `stop`,
    or "dead" after an error that no single request has caused.

    context: tokens. max_batch: the most choices of one request; the engine writes twice as many at once, so a request
    never takes all places. tools: the engine's, to say where a passage comes from. chats: False for a base model, which
    continues the messages as one text. examples: questions to suggest.
    """

    def __init__(self, id: str, make_engine: Callable[[], Engine], tokenizer: Tokenizer, context: int, max_batch: int,
                 tools: Tools = Tools(), chats: bool = True, examples: Sequence[str] = ()):
        self.id, self.make_engine, self.tokenizer, self.context = id, make_engine, tokenizer, context
        self.max_batch, self.tools, self.chats, self.examples = max_batch, tools, chats, examples
        self.state = "loading"
        self.pending: set[Pending] = set()          # of the event loop
        self.choices: dict[Answer, Choice] = {}     # of the engine's thread
        # Calls that the event loop leaves for the thread.
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.flushed = 0.0
        self.step_began: float | None = None        # None: the engine waits for requests
        self.thread = threading.Thread(target=self.run, daemon=True)

    # ---- In the event loop

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    def stop(self) -> None:
        """End all requests, and the thread after its current step."""
        if self.state != "dead":
            self.state = "stopping"
        self.inbox.put(lambda: None)
        self.end_all()

    def submit(self, request: Request) -> Pending:
        """ApiError if too much is waiting (429), or if the engine has ended (503)."""
        if self.state not in ("loading", "ready"):
            raise self.gone()
        if self.running + self.waiting + request.size > 2 * self.max_batch + MAX_QUEUE:
            headers = {"Retry-After": "2"}
            raise ApiError(429, "too many requests are waiting; try again", "rate_limit_exceeded", headers=headers)
        pending = Pending(request, self)
        self.pending.add(pending)
        self.inbox.put(partial(self.add, pending))
        return pending

    @property
    def condition(self) -> str:
        """The state; "slow" is a ready engine in a long step."""
        began = self.step_began
        is_slow = self.state == "ready" and began is not None and time.monotonic() - began >= SLOW_AFTER
        return "slow" if is_slow else self.state

    @property
    def running(self) -> int:
        return sum(len(one.open & one.begun) for one in self.pending)

    @property
    def waiting(self) -> int:
        return sum(len(one.open - one.begun) for one in self.pending)

    def gone(self) -> ApiError:
        return unavailable("the server is stopping" if self.state == "stopping" else "the model's engine has failed")

    def end_all(self) -> None:
        for pending in list(self.pending):
            pending.receive(self.gone())

    # ---- In the engine's thread

    def run(self) -> None:
        try:
            self.engine = self.make_engine()
            if self.state == "loading":
                self.state = "ready"
            while self.state == "ready":
                self.step()
        except Exception as error:
            self.state = "dead"
            # A UserError is about the engine's settings. No client's words are in it, so it is shown.
            if isinstance(error, UserError):
                print(f"{self.id}: {error}", file=sys.stderr, flush=True)
            else:
                log_error(f"the engine of {self.id} has failed", error)
            self.loop.call_soon_threadsafe(self.end_all)

    def step(self) -> None:
        """Take requests, write a token for every choice, and send chunks when it is time."""
        engine = self.engine
        while self.state == "ready" and not (engine.busy and self.inbox.empty()):
            self.step_began = None
            act = self.inbox.get()
            self.step_began = time.monotonic()
            act()
        if self.state != "ready":
            return
        self.step_began = time.monotonic()
        try:
            advanced = engine.step(PIECE)
        except Exception as error:
            engine.clear()
            for pending in {choice.pending for choice in self.choices.values()}:
                self.fail(pending, error)
            return
        now = time.monotonic()
        is_due = now - self.flushed >= FLUSH_EVERY
        for answer in advanced:
            choice = self.choices.get(answer)
            # None: another answer to the same request has failed.
            if choice is None:
                continue
            if answer.error:
                self.fail(choice.pending, answer.error)
                continue
            choice.add(answer)
            # The first token is sent at once.
            if len(answer.tokens) == 1:
                is_due = True
            if choice.chunk.finish_reason and not answer.finish_reason:
                engine.remove(answer)
        if is_due or not engine.busy:
            self.flush(now)

    def add(self, pending: Pending) -> None:
        request = pending.request
        try:
            for number, prompt in enumerate(request.prompts):
                answers = self.engine.add(prompt, request.sampling, request.n)
                echo_from = request.echo_from[number] if request.echo_from else None
                for index, answer in enumerate(answers, number * request.n):
                    detokenizer = IncrementalDetokenizer(self.tokenizer)
                    stop = StopStrings(request.stop)
                    self.choices[answer] = Choice(pending, detokenizer, stop, Chunk(index), echo_from)
        except Exception as error:
            # The web's part should have refused this request.
            self.fail(pending, error)

    def drop(self, pending: Pending) -> None:
        for answer in [answer for answer, choice in self.choices.items() if choice.pending is pending]:
            self.engine.remove(answer)
            del self.choices[answer]

    def fail(self, pending: Pending, error: Exception) -> None:
        """End this request. If the device is lost, the engine ends, too."""
        self.drop(pending)
        if isinstance(error, UserError):
            self.send({pending: ApiError(400, str(error))})
            return
        log_error("a request failed", error)
        self.send({pending: ApiError(500, "the model could not answer this request")})
        # Raises after an error that a GPU does not recover from.
        self.engine.model.model.lm_head.weight[0, 0].item()

    def flush(self, now: float) -> None:
        """Send all new text, and end requests whose time is up."""
        self.flushed = now
        begun = {choice.pending for answer, choice in self.choices.items() if answer.tokens}
        batch: dict[Pending, list[Chunk] | ApiError] = {}
        late = set()
        for answer, choice in list(self.choices.items()):
            pending, chunk = choice.pending, choice.chunk
            if now - pending.request.started > TIMEOUT and not chunk.finish_reason:
                if pending in begun:
                    choice.finish("length")
                    self.engine.remove(answer)
                else:
                    late.add(pending)
            if chunk.finish_reason:
                del self.choices[answer]
            if chunk.tokens or chunk.finish_reason:
                choice.chunk = Chunk(chunk.index)
                batch.setdefault(pending, []).append(chunk)
        for pending in late:
            self.drop(pending)
            batch[pending] = unavailable(f"no answer within {TIMEOUT:g} s")
        if batch:
            self.send(batch)

    def send(self, batch: dict[Pending, list[Chunk] | ApiError]) -> None:
        def deliver() -> None:
            for pending, item in batch.items():
                pending.receive(item)

        self.loop.call_soon_threadsafe(deliver)


def load_engine(checkpoint: Path, device_type: str, dtype: str, max_batch: int, tools: Tools) -> Engine:
    """The engine of a `ServedModel`."""
    *_, device = compute_init(device_type)
    model, tokenizer, _ = load_checkpoint(checkpoint, device)
    model = model.eval().to(compute_dtype(dtype, device))
    return Engine(model, tokenizer, 2 * max_batch, tools=tools)
