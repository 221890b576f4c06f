"""
An engine in its own process: it shares Python's lock neither with the web server nor with another GPU's engine.

    web process (worker.py)                     this process
    how to make the engine    --- socket -->    the engine
    a request                 --- socket -->    engine.add
                                                engine.step: one token for every choice, again and again
    chunks                    <-- socket ---    every 40 ms: the text since the last chunks
    duration of the step      <-- socket ---    every second
    the id of a request       --- socket -->    engine.remove

The process ends when its socket closes, so it never outlives the web process. It also ends after an error that no
single request has caused.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from nanochat.inference.detokenizer import Delta, IncrementalDetokenizer, StopStrings
from nanochat.inference.engine import Answer, Engine, FinishReason
from nanochat.inference.logprobs import TokenLogprob
from nanochat.inference.sampling import Grammar, SamplingParams
from nanochat.inference.tools import open_tools
from nanochat.runtime.console import log_error
from nanochat.runtime.devices import compute_dtype
from nanochat.runtime.distributed import compute_init
from nanochat.runtime.errors import UserError
from nanochat.serve.protocol import TIMEOUT, ApiError, Batch, Chunk, PlacedLogprob, Request
from nanochat.serve.structured import compile_grammar
from nanochat.training.checkpoint import load_checkpoint

# Seconds. 25 chunks per second look like writing, at a fraction of the cost of 400.
FLUSH_EVERY = 0.04
# Seconds between messages that tell worker.py that the engine is alive.
BEAT_EVERY = 1.0
# Seconds of processor time between two beats that count as work.
WORK = 0.01
# Tokens of prompts that are read in one step: everyone waits meanwhile.
PIECE = 128
# Grammars that are compiled at once: one more than app.py allows an address, so others need not wait.
COMPILERS = 3


@dataclass
class Choice:
    """One continuation of a prompt, from tokens to text that may be shown."""
    request: Request
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


class EngineProcess:
    """The process: `run` in one thread, `listen` and `beat` in two others, and threads that compile grammars."""

    def __init__(self, web: socket.socket):
        self.file = web.makefile("rwb")
        self.writing = threading.Lock()
        # Calls that other threads leave for `run`.
        self.inbox = queue.SimpleQueue()
        self.choices: dict[Answer, Choice] = {}
        # Ids of requests that wait for their grammar.
        self.compiling: set[int] = set()
        self.compilers = ThreadPoolExecutor(COMPILERS)
        self.flushed = 0.0
        # 0: the engine is loading. None: it waits for requests.
        self.step_began: float | None = 0.0

    def run(self) -> None:
        try:
            make_engine = pickle.load(self.file)
            for work in (self.listen, self.beat):
                threading.Thread(target=work, daemon=True).start()
            self.engine = make_engine()
            # An empty batch says that the engine is ready.
            self.send({})
            while True:
                self.step()
        except UserError as error:
            # The engine's settings are wrong. No client's words are in this error, so it is shown.
            print(f"a worker has died: {error}", file=sys.stderr, flush=True)
        except Exception as error:
            log_error("a worker has died", error)
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
        Say that the engine is alive, and how long its step has taken so far. An engine that has work but does nothing
        is silent.
        """
        last_began: float | None = None
        last_used = 0.0
        while True:
            began = self.step_began
            used = time.process_time()
            if began is None or began != last_began or used - last_used >= WORK:
                last_began, last_used = began, used
                self.send(time.monotonic() - began if began else 0.0)
            time.sleep(BEAT_EVERY)

    def end(self, code: int) -> None:
        """Exit, even in the middle of a step: nothing needs saving."""
        os._exit(code)

    def send(self, message: Batch | float) -> None:
        """The length comes first, because the reader cannot wait in the middle of a pickle."""
        data = pickle.dumps(message)
        # If the web process is gone, `listen` ends this process.
        with self.writing, contextlib.suppress(OSError):
            self.file.write(len(data).to_bytes(4) + data)
            self.file.flush()

    # ---- The engine's thread

    def step(self) -> None:
        """Handle messages, write a token for every choice, and send chunks when it is time."""
        engine = self.engine
        with contextlib.suppress(queue.Empty):
            while True:
                if not engine.busy:
                    self.step_began = None
                act = self.inbox.get(block=not engine.busy)
                self.step_began = time.monotonic()
                act()
        self.step_began = time.monotonic()
        try:
            advanced = engine.step(PIECE)
        except Exception as error:
            engine.clear()
            for request in {choice.request for choice in self.choices.values()}:
                self.fail(request, error)
            # If the model can no longer read even one token, the process ends.
            engine.add([engine.tokenizer.get_bos_token_id()], SamplingParams(1))
            engine.step()
            return
        now = time.monotonic()
        is_due = now - self.flushed >= FLUSH_EVERY
        for answer in advanced:
            choice = self.choices.get(answer)
            # None: another answer to the same request has failed.
            if choice is None:
                continue
            if answer.error:
                self.fail(choice.request, answer.error)
                continue
            choice.add(answer)
            # The first token is sent at once.
            if len(answer.tokens) == 1:
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
            self.compilers.submit(self.compile, request)

    def compile(self, request: Request) -> None:
        """Runs in a compiler's thread, so tokens do not wait for grammars."""
        try:
            act = partial(self.add, request, compile_grammar(request.grammar, self.engine.tokenizer))
        except Exception as error:
            act = partial(self.fail, request, error)
        self.inbox.put(act)

    def add(self, request: Request, grammar: Grammar | None = None) -> None:
        if grammar:
            # The client may have disconnected meanwhile.
            if request.id not in self.compiling:
                return
            self.compiling.remove(request.id)
            self.send({request.id: []})
        sampling = replace(request.sampling, grammar=grammar)
        try:
            for number, prompt in enumerate(request.prompts):
                answers = self.engine.add(prompt, sampling, request.n)
                echo_from = request.echo_from[number] if request.echo_from else None
                for index, answer in enumerate(answers, number * request.n):
                    detokenizer = IncrementalDetokenizer(self.engine.tokenizer)
                    stop = StopStrings(request.stop)
                    self.choices[answer] = Choice(request, detokenizer, stop, Chunk(index), echo_from)
        except Exception as error:
            # The web process should have refused this request.
            self.fail(request, error)

    def drop(self, id: int) -> None:
        self.compiling.discard(id)
        for answer in [answer for answer, choice in self.choices.items() if choice.request.id == id]:
            self.engine.remove(answer)
            del self.choices[answer]

    def fail(self, request: Request, error: Exception) -> None:
        """End this request."""
        self.drop(request.id)
        if isinstance(error, UserError):
            self.send({request.id: ApiError(400, str(error))})
            return
        log_error("a request failed", error)
        self.send({request.id: ApiError(500, "the model could not answer this request")})

    def flush(self, now: float) -> None:
        """Send all new text, and end requests whose time is up. worker.py ends requests that have not begun."""
        self.flushed = now
        batch: Batch = {}
        begun = {choice.request.id for answer, choice in self.choices.items() if answer.tokens}
        for answer, choice in list(self.choices.items()):
            request, chunk = choice.request, choice.chunk
            if now - request.started > TIMEOUT and request.id in begun and not chunk.finish_reason:
                choice.finish("length")
                self.engine.remove(answer)
            if chunk.finish_reason:
                del self.choices[answer]
            if chunk.tokens or chunk.finish_reason:
                choice.chunk = Chunk(chunk.index)
                batch.setdefault(request.id, []).append(chunk)
        if batch:
            self.send(batch)


def load_engine(
    checkpoint: Path, device_type: str, dtype: str, max_batch: int, library: str | None, copying: bool,
    workers: int, number: int,
) -> Engine:
    """The engine of worker `number`. The workers take the GPUs in turn, or share the cores."""
    os.environ["LOCAL_RANK"] = str(number % max(1, torch.cuda.device_count()))
    *_, device = compute_init(device_type)
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    model, tokenizer, _ = load_checkpoint(checkpoint, device)
    model = model.eval().to(compute_dtype(dtype, device))
    return Engine(model, tokenizer, max_batch, tools=open_tools(library, copying))


def main() -> None:
    """The process; its argument is the socket's file descriptor."""
    EngineProcess(socket.socket(fileno=int(sys.argv[1]))).run()
