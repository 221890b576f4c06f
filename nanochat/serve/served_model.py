"""
A model that answers many requests: its engine decodes for all of them in a thread, and the event loop gets the tokens.

    event loop                                       the engine's thread
    model.submit(request)                -- inbox -->  engine.add: its plan may search the library, and all wait
                                                       engine.step: one token for every choice, again and again
    async for chunk in request.chunks()  <-- loop ---  every 40 ms: the tokens since the last chunks
    request.end(error)                   -- inbox -->  engine.remove

Both share Python's lock, which torch gives away while it computes.
"""
import asyncio
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from nanochat.inference.engine import Answer, Engine
from nanochat.runtime.console import log_error
from nanochat.serve.protocol import ApiError, Chunk, Request

# Seconds. 25 chunks per second look like writing, at a fraction of the cost of 400.
FLUSH_EVERY = 0.04
# Tokens of prompts that are read in one step: everyone waits meanwhile.
PIECE = 128


@dataclass
class Place:
    """Which choice of which request an answer is, and how many of its tokens have been sent."""
    request: Request
    index: int
    sent: int = 0


class ServedModel:
    """
    A model, and the thread of its engine. state: "ready", "stopped" after `stop`, or "dead" after an error that no
    single request has caused.

    A request has at most half of the engine's places, so it never takes them all. chats: False for a base model, which
    continues the messages as one text. examples: questions to suggest.
    """

    def __init__(self, id: str, engine: Engine, chats: bool = True, examples: Sequence[str] = ()):
        self.id, self.engine, self.chats, self.examples = id, engine, chats, examples
        self.tokenizer, self.tools, self.context = engine.tokenizer, engine.tools, engine.context
        self.max_batch = engine.max_batch // 2
        self.state = "ready"
        self.requests: set[Request] = set()         # of the event loop
        self.answers: dict[Answer, Place] = {}      # of the engine's thread
        # Calls that the event loop leaves for the thread.
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.flushed = 0.0
        self.thread = threading.Thread(target=self.run, daemon=True)

    # ---- In the event loop

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    def stop(self) -> None:
        """End all requests, and the thread after its current step."""
        if self.state == "ready":
            self.state = "stopped"
        self.inbox.put(lambda: None)
        self.end_all()

    def submit(self, request: Request) -> None:
        if self.state != "ready":
            raise self.gone()
        self.requests = {one for one in self.requests if one.open} | {request}
        request.drop = lambda indices: self.inbox.put(partial(self.drop, request, indices))
        self.inbox.put(partial(self.add, request))

    @property
    def running(self) -> int:
        return len(self.engine.running)

    @property
    def waiting(self) -> int:
        return max(0, sum(len(request.open) for request in self.requests) - self.running)

    def gone(self) -> ApiError:
        return ApiError(503, f"the model's engine is {self.state}", headers={"Retry-After": "5"})

    def end_all(self) -> None:
        for request in self.requests:
            request.end(self.gone())

    # ---- In the engine's thread

    def run(self) -> None:
        try:
            while self.state == "ready":
                self.step()
        except Exception as error:
            self.state = "dead"
            log_error(f"the engine of {self.id} has failed", error)
            self.loop.call_soon_threadsafe(self.end_all)

    def step(self) -> None:
        """Take requests, write a token for every choice, and send chunks when it is time."""
        engine = self.engine
        while not engine.busy or not self.inbox.empty():
            self.inbox.get()()
            if self.state != "ready":
                return
        try:
            engine.step(PIECE)
        except Exception as error:
            engine.clear()
            for request in {place.request for place in self.answers.values()}:
                self.fail(request, error)
            return
        now = time.monotonic()
        if not engine.busy or now - self.flushed >= FLUSH_EVERY:
            self.flushed = now
            self.flush()

    def add(self, request: Request) -> None:
        try:
            for number, prompt in enumerate(request.prompts):
                answers = self.engine.add(prompt, request.sampling, request.n)
                for index, answer in enumerate(answers, number * request.n):
                    self.answers[answer] = Place(request, index)
        except Exception as error:
            # The web's part should have refused this request.
            self.fail(request, error)

    def drop(self, request: Request, indices: Collection[int]) -> None:
        for answer, place in list(self.answers.items()):
            if place.request is request and place.index in indices:
                self.engine.remove(answer)
                del self.answers[answer]

    def fail(self, request: Request, error: Exception) -> None:
        """End this request. If the device is lost, the engine ends, too."""
        self.drop(request, range(request.size))
        log_error("a request failed", error)
        self.send([(request, ApiError(500, "the model could not answer this request"))])
        # Raises after an error that a GPU does not recover from.
        self.engine.model.model.lm_head.weight[0, 0].item()

    def flush(self) -> None:
        """Send all new tokens. In one call: the event loop wakes once."""
        news: list[tuple[Request, Chunk | ApiError]] = []
        for answer, place in list(self.answers.items()):
            sent = place.sent
            if len(answer.tokens) == sent and not answer.finish_reason:
                continue
            chunk = Chunk(place.index, answer.tokens[sent:], answer.logprobs[sent:], answer.finish_reason)
            news.append((place.request, chunk))
            place.sent = len(answer.tokens)
            if answer.finish_reason:
                del self.answers[answer]
        self.send(news)

    def send(self, news: list[tuple[Request, Chunk | ApiError]]) -> None:
        def deliver() -> None:
            for request, item in news:
                request.received.put_nowait(item)

        self.loop.call_soon_threadsafe(deliver)
