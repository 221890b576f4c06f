"""
An engine in a process of its own: it shares Python's lock neither with the web nor with another GPU's engine.

    web process (worker.py)                     this process
    how to make the engine    --- pipe --->     the engine
    a request                 --- pipe --->     engine.add
                                                engine.step: one token for every choice, again and again
    chunks                    <-- pipe ----     every 40 ms: the text since the last chunks, or nothing
    the id of a request       --- pipe --->     engine.remove

It ends with the pipe, so that it never outlives the web process, and after an error that is not one request's.
"""
import contextlib
import itertools
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import torch

from nanochat.inference.detokenizer import Delta, IncrementalDetokenizer, StopStrings
from nanochat.inference.engine import Answer, Engine, FinishReason
from nanochat.inference.kv_cache import Prefix
from nanochat.inference.logprobs import TokenLogprob
from nanochat.inference.prompt_cache import PIECE
from nanochat.inference.sampling import Grammar, SamplingParams
from nanochat.runtime.compiling import set_compile
from nanochat.runtime.console import log_error
from nanochat.runtime.devices import compute_dtype
from nanochat.runtime.distributed import compute_init
from nanochat.runtime.errors import UserError
from nanochat.serve.api_error import ApiError, unavailable
from nanochat.serve.grammars import compile_grammar
from nanochat.serve.logprobs import HeldLogprobs, PlacedLogprob
from nanochat.training.checkpoint import load_checkpoint

FLUSH_EVERY = 0.04    # seconds: 25 chunks a second look like writing, and cost a fraction of what 400 would
BEAT_EVERY = 1.0      # seconds between messages without chunks while there is nothing to do: the engine is alive


@dataclass(eq=False)
class Request:
    """What a client asks for: n choices for each prompt."""
    prompts: list[list[int]]
    sampling: SamplingParams
    form: str | None = None                 # a grammar's expression for the choices
    n: int = 1
    stop: Sequence[str] = ()
    seconds: float = math.inf               # after that many, its choices end with what they have
    client: str = ""                        # places and queue are shared fairly among clients
    echo_from: Sequence[int] = ()           # of each prompt, the first token that its choices begin with; (): none
    started: float = field(default_factory=time.monotonic)  # the system's clock: the same in every process
    id: int = field(default_factory=itertools.count().__next__)
    begun: bool = False                     # a token was written; only the engine's process knows

    @property
    def size(self) -> int:
        """Choices in all."""
        return len(self.prompts) * self.n


@dataclass
class Chunk:
    """What was written of one choice since its last chunk."""
    index: int                      # of the choice: n to the first prompt, then those to the second
    deltas: list[Delta] = field(default_factory=list)
    logprobs: list[PlacedLogprob] = field(default_factory=list)
    tokens: int = 0                 # those without text count as well
    cached: int = 0                 # tokens of its prompt that were not read again
    finish_reason: FinishReason | Literal["tool_calls"] | None = None


# By the request's id. No chunks: its grammar has been compiled.
Batch = dict[int, list[Chunk] | ApiError]


@dataclass
class Choice:
    """One continuation of a prompt."""
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


class EngineProcess:
    """What the process does: `run` in one thread, `listen` in another, grammars in a third."""

    def __init__(self, connection: Connection, make_engine: Callable[[], Engine]):
        self.connection, self.make_engine = connection, make_engine
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # what `run` is to do
        self.choices: dict[Answer, Choice] = {}  # by the engine's answer
        self.compiling: set[int] = set()    # requests whose grammar is not there yet
        self.compiler = ThreadPoolExecutor(1, "grammars")   # a grammar waits for another one, tokens for none
        self.flushed = 0.0

    def run(self) -> None:
        threading.Thread(target=self.listen, daemon=True, name="listen").start()
        try:
            self.engine = self.make_engine()
            self.send({})   # it is there
            while True:
                self.step()
        except Exception as error:
            own = f": {error}" * isinstance(error, UserError)  # of the engine's settings: no user's words
            log_error(f"a worker has died{own}", error)
            self.end(1)

    def listen(self) -> None:
        try:
            while True:
                message = self.connection.recv()
                self.inbox.put(partial(self.accept if isinstance(message, Request) else self.drop, message))
        except (EOFError, OSError):
            self.end(0)

    def end(self, code: int) -> None:
        """Even in the midst of a step: there is nothing to save."""
        os._exit(code)

    def send(self, batch: Batch) -> None:
        with contextlib.suppress(OSError):  # the web process is gone: `listen` sees that, too
            self.connection.send(batch)

    # ---- The engine's thread

    def step(self) -> None:
        """What the inbox holds, a token for every choice, and the chunks when it is time."""
        engine = self.engine
        try:
            while True:
                self.inbox.get(block=not engine.busy, timeout=BEAT_EVERY)()
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
            if not choice.request.begun:
                choice.request.begun = flush = True
            if choice.chunk.finish_reason and not answer.finish_reason:
                engine.remove(answer)
        for request, error in failed.items():
            self.fail({request}, error)
        if flush or not engine.busy or now - self.flushed >= FLUSH_EVERY:
            self.flush(now)

    def accept(self, request: Request) -> None:
        if request.form is None:
            self.add(request)
        else:
            self.compiling.add(request.id)
            self.compiler.submit(self.compile, request)

    def compile(self, request: Request) -> None:
        """In the grammars' thread."""
        try:
            grammar = compile_grammar(request.form, self.engine.tokenizer)
        except Exception as error:
            self.inbox.put(partial(self.fail, {request}, error))
        else:
            self.inbox.put(partial(self.add, request, grammar))

    def add(self, request: Request, grammar: Grammar | None = None) -> None:
        if grammar:
            if request.id not in self.compiling:  # dropped meanwhile
                return
            self.compiling.remove(request.id)
            self.send({request.id: []})
        if time.monotonic() - request.started > request.seconds:  # it came while a step took long
            self.send({request.id: no_place(request)})
            return
        sampling = replace(request.sampling, grammar=grammar)
        try:
            for number, prompt in enumerate(request.prompts):
                answers = self.engine.add(prompt, sampling, request.n, owner=request.client)
                echo_from = request.echo_from[number] if request.echo_from else None
                for index, answer in enumerate(answers, number * request.n):
                    detokenizer, stop = IncrementalDetokenizer(self.engine.tokenizer), StopStrings(request.stop)
                    self.choices[answer] = Choice(request, detokenizer, stop, Chunk(index), echo_from)
        except Exception as error:  # what can be wrong with a request should have been found before
            self.fail({request}, error)

    def drop(self, id: int) -> None:
        self.compiling.discard(id)
        for answer in [answer for answer, choice in self.choices.items() if choice.request.id == id]:
            self.engine.remove(answer)
            del self.choices[answer]

    def fail(self, requests: set[Request], error: Exception) -> None:
        """End these requests. If the model cannot even read one token any more, that ends the process."""
        told = ApiError(400, str(error))
        if not isinstance(error, UserError):
            log_error("a request failed", error)
            told = ApiError(500, "the model could not answer this request", "internal_error")
        for request in requests:
            self.drop(request.id)
        self.send({request.id: told for request in requests})
        if not isinstance(error, UserError):
            self.engine.model.extend(Prefix(), [self.engine.tokenizer.get_bos_token_id()])

    def flush(self, now: float) -> None:
        """Send all that is new, at once; end the requests whose time is over."""
        self.flushed = now
        batch: Batch = {}
        for answer, choice in list(self.choices.items()):
            request, chunk = choice.request, choice.chunk
            if now - request.started > request.seconds and not chunk.finish_reason:
                choice.finish("length")
                self.engine.remove(answer)
                if not request.begun:
                    batch[request.id] = no_place(request)
            if chunk.finish_reason:
                del self.choices[answer]
            if chunk.tokens or chunk.finish_reason:
                choice.chunk = Chunk(chunk.index)
                chunks = batch.setdefault(request.id, [])
                if isinstance(chunks, list):
                    chunks.append(chunk)
        self.send(batch)    # an empty one, too: it tells that the engine is alive


def no_place(request: Request) -> ApiError:
    return unavailable(f"no place became free within {request.seconds:g} s")


def load_engine(
    checkpoint: Path, device_type: str, dtype: str, compile: bool, max_batch: int,
    prompt_cache_bytes: int, workers: int, number: int,
) -> Engine:
    """The engine of worker `number` of so many, which take the GPUs in turn or share the cores."""
    os.environ["LOCAL_RANK"] = str(number % max(1, torch.cuda.device_count()))
    *_, device = compute_init(device_type)
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    compile = set_compile(compile, device.type)
    model, tokenizer, _ = load_checkpoint(checkpoint, device)
    model = model.eval().to(compute_dtype(dtype, device))
    # One place more than an address may have: a newcomer need not wait for the end of another's answer.
    return Engine(model, tokenizer, max_batch + 1, prompt_cache_bytes, max_batch, compile)


def main() -> None:
    """The process; its argument is the pipe's file descriptor."""
    connection = Connection(int(sys.argv[1]))
    EngineProcess(connection, connection.recv()).run()
