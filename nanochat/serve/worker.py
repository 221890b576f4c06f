"""
Many requests, one engine: a thread that decodes for everyone, and an event loop that hears of it.

    event loop                                      worker, one thread per model and device
    answers = model.submit(work)  --- inbox --->    engine.add
                                                    engine.step: a token for everyone, again and again
    async for news in answers.news()  <--- every 40 ms ---  what was written since
    answers.close()  --- inbox --->                 engine.remove, unless all have ended

What a method runs on is said where it is not the event loop. Nothing here knows of HTTP.
"""
import asyncio
import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from nanochat.detokenizer import Piece, Pieces, StopStrings
from nanochat.engine import Engine, Event, FinishReason
from nanochat.serve.answers import Answers, Busy, Failed, News, Unavailable, Work
from nanochat.tokenizer import Tokenizer

NEWS_EVERY = 0.04     # seconds: 25 a second look like writing, and cost a fraction of what 400 would


@dataclass
class Sample:
    """One answer, as the worker's thread sees it."""
    answers: Answers
    index: int
    pieces: Pieces
    stop: StopStrings
    new: list[Piece] = field(default_factory=list)
    tokens: int = 0                 # since the last news
    finish_reason: FinishReason | None = None

    def take(self, event: Event) -> None:
        self.tokens += 1
        pieces = self.pieces.add(event.token)
        if event.finish_reason:
            pieces += self.pieces.end()
        for piece in pieces:
            if not self.stop.found:
                self.new += self.stop.add(piece)
        self.finish_reason = "stop" if self.stop.found else event.finish_reason
        if event.finish_reason and not self.stop.found:
            self.new += self.stop.end()

    def cut(self) -> None:
        """The time is over."""
        self.new += self.stop.end()
        self.finish_reason = "length"

    def news(self) -> News:
        news = News(self.index, self.new, self.tokens, self.finish_reason)
        self.new, self.tokens = [], 0
        return news


class Worker:
    """
    An engine and the thread that drives it. `load` counts the answers that were accepted and have not ended. state:
    "loading", "ready", "stopped", or "dead" after an error that was not one request's.
    """

    def __init__(self, make_engine: Callable[[], Engine]):
        self.make_engine = make_engine
        self.engine: Engine | None = None
        self.state, self.stopping = "loading", False
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # The event loop's
        self.load = 0
        self.answers: set[Answers] = set()      # not all of which have ended
        self.seconds = 1.0                      # that an answer took of late
        self.tokens = 0                         # written so far
        # The thread's
        self.samples: dict[int, Sample] = {}    # by the engine's id
        self.flushed = 0.0
        self.thread = threading.Thread(target=self.run, daemon=True, name="worker")

    # ---- The event loop's side

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    def stop(self) -> None:
        """End what is running with an error, and the thread. May be called in a signal handler."""
        self.stopping = True
        self.inbox.put(lambda: None)

    def submit(self, work: Work) -> Answers:
        answers = Answers(self, work)
        self.load += work.size
        self.answers.add(answers)
        self.inbox.put(partial(self.add, answers))
        return answers

    def finished(self, answers: Answers) -> None:
        self.answers.discard(answers)
        self.seconds += 0.1 * (time.monotonic() - answers.started - self.seconds)

    def deliver(self, batch: list[tuple[Answers, list[News] | Exception]]) -> None:
        for answers, news in batch:
            if isinstance(news, list):
                self.tokens += sum(one.tokens for one in news)
            answers.put(news)

    def bury(self) -> None:
        """The thread has ended."""
        reason = "the server is stopping" if self.stopping else "the model's worker has died"
        for answers in list(self.answers):
            answers.put(Unavailable(reason))

    # ---- The thread's side

    def run(self) -> None:
        try:
            self.engine = self.make_engine()
            self.state = "ready"
            while not self.stopping:
                self.turn()
            self.state = "stopped"
        except BaseException as error:
            self.state = "dead"
            log_error("a worker has died", error)
        self.post(self.bury)

    def post(self, callback: Callable, *args) -> None:
        """Have the event loop call it."""
        try:
            self.loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop has ended: nobody waits for news
            pass

    def turn(self) -> None:
        """What came in, one step for everyone, and news of it when it is time."""
        engine = self.engine
        try:
            while not self.stopping:
                self.inbox.get(block=not engine.busy)()
        except queue.Empty:
            pass
        try:
            events = engine.step(max_prompts=1)  # a prompt takes as long as many tokens, and everyone waits for it
        except Exception as error:
            engine.clear()
            return self.fail({sample.answers for sample in self.samples.values()}, error)
        now, soon = time.monotonic(), False
        failed: dict[Answers, Exception] = {}
        for event in events:
            sample = self.samples[event.id]
            if event.error:
                failed[sample.answers] = event.error
                continue
            sample.take(event)
            if sample.answers.first_token is None:
                sample.answers.first_token, soon = now, True
            if sample.finish_reason and not event.finish_reason:
                engine.remove(event.id)
        for answers, error in failed.items():
            self.fail({answers}, error)
        if soon or not engine.busy or now - self.flushed >= NEWS_EVERY:
            self.flush(now)

    def add(self, answers: Answers) -> None:
        work = answers.work
        try:
            for number, prompt in enumerate(work.prompts):
                for i, id in enumerate(self.engine.add(prompt, work.sampling, work.n, owner=work.client)):
                    self.samples[id] = Sample(answers, number * work.n + i, Pieces(self.engine.tokenizer), StopStrings(work.stop))
        except Exception as error:  # what can be wrong with a request should have been found before
            self.fail({answers}, error)

    def drop(self, answers: Answers) -> None:
        for id in [id for id, sample in self.samples.items() if sample.answers is answers]:
            self.engine.remove(id)
            del self.samples[id]

    def fail(self, several: set[Answers], error: BaseException) -> None:
        """End these requests. If the model cannot even read one token any more, that ends the worker."""
        log_error("a request failed", error)
        for answers in several:
            self.drop(answers)
        self.post(self.deliver, [(answers, Failed("the model could not answer this request")) for answers in several])
        self.engine.model.prefill([self.engine.tokenizer.get_bos_token_id()])

    def flush(self, now: float) -> None:
        """Tell the event loop all there is to tell, in one call; end what has had its time."""
        self.flushed = now
        batch: dict[Answers, list[News] | Exception] = {}
        for id, sample in list(self.samples.items()):
            answers = sample.answers
            if now - answers.started > answers.work.seconds and not sample.finish_reason:
                sample.cut()
                self.engine.remove(id)
                if answers.first_token is None:
                    batch[answers] = Unavailable(f"no place became free within {answers.work.seconds:g} s")
            if sample.finish_reason:
                del self.samples[id]
            elif not (answers.work.stream and sample.tokens):
                continue
            if isinstance(news := batch.setdefault(answers, []), list):
                news.append(sample.news())
        if batch:
            self.post(self.deliver, list(batch.items()))


@dataclass
class ServedModel:
    """A model that may be asked, on one device or on several."""
    id: str
    tokenizer: Tokenizer
    context: int                    # tokens
    step: int                       # of its checkpoint
    created: int                    # when that was, in seconds since 1970
    max_batch: int                  # answers written at once on each device
    max_queue: int                  # answers that may wait on each device
    workers: list[Worker]
    chats: bool = True              # else it is a base model: messages are a text that it continues
    examples: Sequence[str] = ()    # questions to suggest

    @property
    def dead(self) -> bool:
        return all(worker.state == "dead" for worker in self.workers)

    def submit(self, work: Work) -> Answers:
        """
        Give work to the worker that has least to do. Busy when that has too much, Unavailable when there is none.
        One client's answers may wait there only while there is room for as many more: so others find room.
        """
        alive = [worker for worker in self.workers if worker.state in ("loading", "ready")]
        if not alive:
            raise Unavailable("the model's worker has died")
        worker = min(alive, key=lambda worker: worker.load)
        room = self.max_batch + self.max_queue - worker.load - work.size
        own = sum(answers.open for answers in worker.answers if answers.work.client == work.client) + work.size
        if own - self.max_batch > room or room < 0:
            raise Busy(min(max(math.ceil(worker.seconds / self.max_batch), 1), 60))
        return worker.submit(work)

    @property
    def most(self) -> int:
        """Answers that one request may ask for."""
        return self.max_batch + self.max_queue // 2

    @property
    def running(self) -> int:
        return sum(len(worker.engine.running) for worker in self.workers if worker.engine)

    @property
    def waiting(self) -> int:
        return max(0, sum(worker.load for worker in self.workers) - self.running)


def log_error(what: str, error: BaseException) -> None:
    """On stderr: where an error came from, without its message, which may quote what somebody wrote."""
    trace = "".join(traceback.format_tb(error.__traceback__))
    print(f"{what}: {type(error).__name__}\n{trace}", file=sys.stderr, end="", flush=True)
