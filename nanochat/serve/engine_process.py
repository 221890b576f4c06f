"""
An engine in a process of its own: it shares Python's lock neither with the web nor with another GPU's engine.

    web process (worker.py)                     this process
    how to make the engine    --- socket -->    the engine
    a request                 --- socket -->    engine.add
                                                engine.step: one token for every choice, again and again
    chunks                    <-- socket ---    every 40 ms: the text since the last chunks
    how long a step takes     <-- socket ---    every second
    the id of a request       --- socket -->    engine.remove

It ends with the socket, so that it never outlives the web process, and after an error that is not one request's.
"""
import contextlib
import os
import pickle
import queue
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from nanochat.inference.detokenizer import Delta, IncrementalDetokenizer, StopStrings
from nanochat.inference.engine import Answer, Engine, FinishReason
from nanochat.inference.kv_cache import Prefix
from nanochat.inference.logprobs import TokenLogprob
from nanochat.inference.prompt_cache import PIECE
from nanochat.inference.sampling import Grammar
from nanochat.inference.tools import open_tools
from nanochat.runtime.console import log_error
from nanochat.runtime.devices import compute_dtype
from nanochat.runtime.distributed import compute_init
from nanochat.runtime.errors import UserError
from nanochat.serve.protocol import TIMEOUT, ApiError, Batch, Chunk, PlacedLogprob, Request, unavailable
from nanochat.serve.structured import compile_grammar
from nanochat.training.checkpoint import load_checkpoint

FLUSH_EVERY = 0.04    # seconds: 25 chunks a second look like writing, and cost a fraction of what 400 would
BEAT_EVERY = 1.0      # seconds between messages that say that the engine is alive (worker.py)
WORK = 0.01           # seconds of the processor since the last one that count as work
COMPILERS = 2         # grammars that are compiled at once, of which one address has one
PROMPT_CACHE_BYTES = 2**29


@dataclass
class Choice:
    """One continuation of a prompt, from tokens to text that may be shown."""
    request: Request
    detokenizer: IncrementalDetokenizer
    stop: StopStrings
    chunk: Chunk                    # the next one that is sent
    echo_from: int | None = None    # the prompt's tokens from here on come first; None: no echo, or it has been shown
    written: int = 0                # characters
    shown: int = 0                  # characters; the others may be the beginning of a stop string
    held: deque[PlacedLogprob] = field(default_factory=deque)   # of tokens whose text has not been shown

    def add(self, answer: Answer) -> None:
        """The answer has one more token, or has ended without any."""
        if len(answer.tokens) == 1 and self.chunk.index % self.request.n == 0:  # a prompt counts once in the usage
            self.chunk.cached = answer.cached
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
        if not self.stop.found:     # the last tokens may have no text
            self.chunk.logprobs += self.held
        self.chunk.finish_reason = reason


def length_of(deltas: list[Delta]) -> int:
    return sum(len(delta.text) for delta in deltas)


class EngineProcess:
    """What the process does: `run` in one thread, `listen` and `beat` in others, grammars are compiled in two more."""

    def __init__(self, web: socket.socket):
        self.file = web.makefile("rwb")
        self.writing = threading.Lock()
        self.inbox = queue.SimpleQueue()    # functions that `run` has to call
        self.choices: dict[Answer, Choice] = {}  # by the engine's answer
        self.compiling: set[int] = set()    # requests that wait for their grammar
        self.forms: dict[str, deque[Request]] = {}  # of these, those that no compiler has, by client
        self.served: set[str] = set()       # clients that a grammar is compiled for
        self.compilers = ThreadPoolExecutor(COMPILERS)
        self.flushed = 0.0
        self.waits = False                  # for requests: there is nothing to do
        self.step_began: float | None = None    # None: none has

    def run(self) -> None:
        try:
            make_engine = pickle.load(self.file)
            for work in (self.listen, self.beat):
                threading.Thread(target=work, daemon=True).start()
            self.engine = make_engine()
            self.send({})   # it is there
            while True:
                self.step()
        except Exception as error:
            reason = "a worker has died"
            if isinstance(error, UserError):    # it is about the engine's settings, and has no words of a client
                reason += f": {error}"
            log_error(reason, error)
            self.end(1)

    def listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = pickle.load(self.file)
                handle = self.accept if isinstance(message, Request) else self.drop
                self.inbox.put(partial(handle, message))
        self.end(0)

    def beat(self) -> None:
        """
        Say that the engine is alive, and how long its step takes so far; nothing if it does nothing, although it has
        something to do.
        """
        before: float | None = None
        worked = 0.0
        with contextlib.suppress(OSError):
            while True:
                waits, began, used = self.waits, self.step_began, time.process_time()   # in this order, see `step`
                if waits or began != before or used - worked >= WORK:
                    before, worked = began, used
                    self.write(time.monotonic() - began if began and not waits else 0.0)
                time.sleep(BEAT_EVERY)

    def end(self, code: int) -> None:
        """Even in the middle of a step: there is nothing to save."""
        os._exit(code)

    def send(self, batch: Batch) -> None:
        with contextlib.suppress(OSError):  # the web process is gone: `listen` sees that, too
            self.write(batch)

    def write(self, message: Batch | float) -> None:
        """Its length comes first: the reader cannot wait in the middle of a pickle."""
        data = pickle.dumps(message)
        with self.writing:
            self.file.write(len(data).to_bytes(4) + data)
            self.file.flush()

    # ---- The engine's thread

    def step(self) -> None:
        """Take messages from the inbox, write a token for every choice, and send chunks when it is time."""
        engine = self.engine
        with contextlib.suppress(queue.Empty):
            while True:
                self.waits = not engine.busy
                act = self.inbox.get(block=self.waits)
                self.step_began = time.monotonic()
                self.waits = False  # only now, or `beat` would take an hour of waiting for a step
                act()
        self.step_began = time.monotonic()
        try:
            advanced = engine.step(PIECE)  # at most a piece of a prompt: everyone waits while it is read
        except Exception as error:
            engine.clear()
            for request in {choice.request for choice in self.choices.values()}:
                self.fail(request, error)
            return
        now = time.monotonic()
        is_due = now - self.flushed >= FLUSH_EVERY
        for answer in advanced:
            choice = self.choices.get(answer)
            if choice is None:  # another answer to the same request has failed
                continue
            if answer.error:
                self.fail(choice.request, answer.error)
                continue
            choice.add(answer)
            if len(answer.tokens) == 1:     # the first token is sent at once
                is_due = True
            if choice.chunk.finish_reason and not answer.finish_reason:
                engine.remove(answer)
        if is_due or not engine.busy:
            self.flush(now)

    def accept(self, request: Request) -> None:
        if request.grammar is None:
            self.add(request)
        else:
            self.compiling.add(request.id)
            self.forms.setdefault(request.client, deque()).append(request)
            self.compile_next()

    def compile_next(self) -> None:
        """Free compilers go to clients who have none; they take turns."""
        clients = [client for client in self.forms if client not in self.served]
        for client in clients[: COMPILERS - len(self.served)]:
            waiting = self.forms.pop(client)
            self.served.add(client)
            self.compilers.submit(self.compile, waiting.popleft())
            if waiting:
                self.forms[client] = waiting    # behind the other clients

    def compile(self, request: Request) -> None:
        """In a compiler's thread: tokens wait for no grammar, grammars for each other."""
        done = partial(self.drop, request.id)   # its client has gone meanwhile
        try:
            if request.id in self.compiling:
                done = partial(self.add, request, compile_grammar(request.grammar, self.engine.tokenizer))
        except Exception as error:
            done = partial(self.fail, request, error)
        self.inbox.put(partial(self.compiled, request.client, done))

    def compiled(self, client: str, done: Callable[[], None]) -> None:
        self.served.remove(client)
        self.compile_next()
        done()

    def add(self, request: Request, grammar: Grammar | None = None) -> None:
        if grammar:
            if request.id not in self.compiling:  # its client has gone meanwhile
                return
            self.compiling.remove(request.id)
        sampling = replace(request.sampling, grammar=grammar)
        try:
            for number, prompt in enumerate(request.prompts):
                answers = self.engine.add(prompt, sampling, request.n, owner=request.client)
                echo_from = request.echo_from[number] if request.echo_from else None
                for index, answer in enumerate(answers, number * request.n):
                    detokenizer = IncrementalDetokenizer(self.engine.tokenizer)
                    stop = StopStrings(request.stop)
                    self.choices[answer] = Choice(request, detokenizer, stop, Chunk(index), echo_from)
        except Exception as error:  # a wrong request should have been refused before
            self.fail(request, error)

    def drop(self, id: int) -> None:
        self.compiling.discard(id)
        for answer in [answer for answer, choice in self.choices.items() if choice.request.id == id]:
            self.engine.remove(answer)
            del self.choices[answer]

    def fail(self, request: Request, error: Exception) -> None:
        """End this request. If the model cannot even read one token any more, that ends the process."""
        self.drop(request.id)
        if isinstance(error, UserError):
            self.send({request.id: ApiError(400, str(error))})
            return
        log_error("a request failed", error)
        self.send({request.id: ApiError(500, "the model could not answer this request")})
        self.engine.model.extend([(Prefix(), [self.engine.tokenizer.get_bos_token_id()])])

    def flush(self, now: float) -> None:
        """Send everything that is new; end the requests whose time is over, also those that wait for a place."""
        self.flushed = now
        batch: Batch = {}
        begun = {choice.request.id for answer, choice in self.choices.items() if answer.tokens}
        for answer, choice in list(self.choices.items()):
            request, chunk = choice.request, choice.chunk
            if now - request.started > TIMEOUT and not chunk.finish_reason:
                choice.finish("length")
                self.engine.remove(answer)
                if request.id not in begun:
                    batch[request.id] = unavailable(f"no place became free within {TIMEOUT:g} s")
            if chunk.finish_reason:
                del self.choices[answer]
            if chunk.tokens or chunk.finish_reason:
                choice.chunk = Chunk(chunk.index)
                chunks = batch.setdefault(request.id, [])
                if isinstance(chunks, list):
                    chunks.append(chunk)
        if batch:
            self.send(batch)


def load_engine(
    checkpoint: Path, device_type: str, dtype: str, max_batch: int, library: str | None, workers: int,
    number: int,
) -> Engine:
    """The engine of worker `number`; the workers take the GPUs in turn or share the cores."""
    os.environ["LOCAL_RANK"] = str(number % max(1, torch.cuda.device_count()))
    *_, device = compute_init(device_type)
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    model, tokenizer, _ = load_checkpoint(checkpoint, device)
    model = model.eval().to(compute_dtype(dtype, device))
    # One place more than an address may have: a newcomer need not wait for the end of another's answer.
    return Engine(model, tokenizer, max_batch + 1, PROMPT_CACHE_BYTES, max_batch, open_tools(library))


def main() -> None:
    """The process; its argument is the socket's file descriptor."""
    EngineProcess(socket.socket(fileno=int(sys.argv[1]))).run()
