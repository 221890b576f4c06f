"""
The engine: any number of conversations decoded together, each with its own settings, coming and going at any step.

    engine = Engine(model, tokenizer)
    for delta in engine.stream(prompt, SamplingParams(temperature=0)):     # one answer, as it is written
        print(delta.text, end="")
    answers = engine.generate(prompts, SamplingParams(max_tokens=64))      # many, several at a time

A server calls `add` when a request comes in, `remove` when its client has gone, and `step` all the time: one token for
everyone who has a place. All from one thread.
"""
import itertools
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from nanochat.calculator import calculate
from nanochat.detokenizer import Delta, IncrementalDetokenizer
from nanochat.errors import UserError
from nanochat.gpt import GPT
from nanochat.kv_cache import CachedModel, Prefix
from nanochat.sampling import SamplingParams, draw
from nanochat.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]  # a stop token; max_tokens or the end of the context


class Event(NamedTuple):
    """One token of one request."""
    id: int
    token: int
    forced: bool                            # written by the tool, not drawn from the model
    finish_reason: FinishReason | None      # set on the last token, a stop token included
    error: Exception | None = None          # its prompt could not be read: there is no token, and the request has ended


@dataclass
class Answer:
    """What `generate` returns for each sample. A stop token that ended it is the last of its tokens."""
    prompt: list[int]                       # as the model read it: truncated, if that was asked for
    tokens: list[int] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass
class Running:
    """A request that has a row of the cache."""
    id: int
    owner: str
    sampling: SamplingParams
    left: int                               # tokens until max_tokens or the end of the context
    dice: random.Random
    token: int = -1                         # the last one, which the model has not read yet
    forced: deque[int] = field(default_factory=deque)  # what the tool has still to write
    expression: list[int] | None = None     # tokens since <|python_start|>


@dataclass
class Waiting:
    """Samples of one prompt that have no row yet. The prompt is read once, when the first of them gets one."""
    prompt: list[int]
    sampling: SamplingParams
    first_id: int                           # sample i, and draw i of its seed, has the id first_id + i
    ids: deque[int]                         # those without a row
    prefix: Prefix | None = None


class Engine:
    """
    Decodes up to max_batch sequences at once; others wait until one ends.

    Part of the weights are copied: after a training step, make a new one (milliseconds for a small model).
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, max_batch: int = 16):
        if max_batch < 1:
            raise UserError(f"max_batch={max_batch} must be at least 1")
        assert tokenizer.get_vocab_size() == model.config.vocab_size, "a model and another one's tokenizer"
        self.model, self.tokenizer, self.max_batch = CachedModel(model, max_batch), tokenizer, max_batch
        self.context = model.config.sequence_len
        special = tokenizer.encode_special
        self.default_stop = special("<|assistant_end|>"), special("<|bos|>")
        self.python_start, self.python_end = special("<|python_start|>"), special("<|python_end|>")
        self.output_start, self.output_end = special("<|output_start|>"), special("<|output_end|>")
        self.running: list[Running] = []    # in the order of the cache's rows
        self.waiting: dict[str, deque[Waiting]] = {}    # by owner; the one who got a row last comes last
        self.next_id = 0

    # ---- Requests

    def add(
        self, prompt: Sequence[int], sampling: SamplingParams = SamplingParams(), num_samples: int = 1, owner: str = "",
    ) -> list[int]:
        """
        Queue a prompt, of which step() then writes num_samples continuations; returns the id of each. UserError for a
        prompt that the model cannot read.

        Sample i is the i-th draw of sampling.seed: the same whatever else the engine is doing, and no two are alike.
        Among several owners, the one with the fewest rows gets the next row that is free.
        """
        assert num_samples >= 1
        prompt = self.fit(prompt, sampling)
        ids = list(range(self.next_id, self.next_id + num_samples))
        self.waiting.setdefault(owner, deque()).append(Waiting(prompt, sampling, self.next_id, deque(ids)))
        self.next_id += num_samples
        return ids

    def fit(self, prompt: Sequence[int], sampling: SamplingParams, truncate: bool = False) -> list[int]:
        """
        The prompt, if the model can read it; else UserError. With truncate, one that is longer than the context loses
        what follows its first token (<|bos|>), so much that max_tokens, or half of the context, become free.
        """
        prompt, vocab_size = list(prompt), self.model.config.vocab_size
        if not prompt:
            raise UserError("an empty prompt; expected at least <|bos|>")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            tokens = f"tokens from {min(prompt)} to {max(prompt)}"
            raise UserError(f"the prompt has {tokens}; this model knows 0 to {vocab_size - 1}")
        if len(prompt) <= self.context:
            return prompt
        if not truncate:
            sizes = f"the prompt has {len(prompt)} tokens, the model's context only {self.context}"
            raise UserError(f"{sizes}; shorten or truncate it")
        kept = self.context - min(sampling.max_tokens, self.context // 2)
        return prompt[:1] + prompt[len(prompt) - kept + 1 :]

    def remove(self, id: int) -> None:
        """End a request now, without a further event. Nothing happens if it has ended already."""
        for row, request in enumerate(self.running):
            if request.id == id:
                self._free(row)
                return
        for group in itertools.chain(*self.waiting.values()):
            if id in group.ids:
                group.ids.remove(id)
        left = {owner: deque(group for group in groups if group.ids) for owner, groups in self.waiting.items()}
        self.waiting = {owner: groups for owner, groups in left.items() if groups}

    @property
    def busy(self) -> bool:
        """Whether anything is running or waiting."""
        return bool(self.running or self.waiting)

    # ---- One token for everyone

    def step(self, max_prompts: int | None = None) -> list[Event]:
        """
        One more token for each running request and for those that get a place now. Ended requests leave. What goes
        wrong with one prompt is the error of its own events; after an exception only `clear` helps.

        max_prompts: at most so many prompts are read, for which all who are running have to wait; None: any number.
        """
        failed: list[Event] = []
        logits = [self.model.decode([request.token for request in self.running])] if self.running else []
        logits += self._admit(failed, max_prompts)
        if not logits:
            return failed
        uniforms = [0.0 if request.forced else request.dice.getrandbits(24) / 2**24 for request in self.running]
        samplings = [request.sampling for request in self.running]
        drawn = draw(torch.cat(logits), samplings, uniforms, self.model.config.softcap)
        events = [self._advance(request, token) for request, token in zip(self.running, drawn)]
        for row in reversed(range(len(events))):
            if events[row].finish_reason:
                self._free(row)
        return events + failed

    def _admit(self, failed: list[Event], max_prompts: int | None) -> list[torch.Tensor]:
        """Give free rows to those who have waited longest; returns the logits after their prompts, (1, V) each."""
        logits, read = [], 0
        while self.waiting and len(self.running) < self.max_batch:
            rows = Counter(request.owner for request in self.running)
            # Among equals the one whose prompt is read: each that waits takes memory.
            owner = min(self.waiting, key=lambda owner: (rows[owner], self.waiting[owner][0].prefix is None))
            group = self.waiting[owner][0]
            if group.prefix is None:
                if read == max_prompts:
                    break
                read += 1
            try:
                group.prefix = group.prefix or self.model.prefill(group.prompt)
                self.model.insert(group.prefix)
            except Exception as error:  # for want of memory, perhaps: the others' rows are as they were
                failed += [Event(id, -1, False, None, error) for id in group.ids]
                group.ids.clear()
            else:
                logits.append(group.prefix.logits)
                # The last token is written, not read: an answer may end one token beyond the context.
                left = min(group.sampling.max_tokens, self.context + 1 - len(group.prompt))
                seed, id = group.sampling.seed, group.ids.popleft()
                dice = random.Random(None if seed is None else f"{seed} {id - group.first_id}")
                self.running.append(Running(id, owner, group.sampling, left, dice))
            groups = self.waiting.pop(owner)
            if not group.ids:
                groups.popleft()
            if groups:
                self.waiting[owner] = groups
        return logits

    def _advance(self, request: Running, drawn: int) -> Event:
        """The request's next token: what the tool has to say, or else what was drawn."""
        forced = bool(request.forced)
        request.token = token = request.forced.popleft() if forced else drawn
        request.left -= 1
        if not forced and request.sampling.tools:
            self._use_tool(request, token)
        stop = self.default_stop if request.sampling.stop is None else request.sampling.stop
        ended = "stop" if token in stop and not forced else "length" if request.left == 0 else None
        return Event(request.id, token, forced, ended)

    def _use_tool(self, request: Running, token: int) -> None:
        """Collect an expression; at its end the result comes next. What cannot be computed is left to the model."""
        if token == self.python_start:
            request.expression = []
        elif token == self.python_end and request.expression is not None:
            result = calculate(self.tokenizer.decode(request.expression))
            if result is not None:
                request.forced.extend([self.output_start, *self.tokenizer.encode(result), self.output_end])
            request.expression = None
        elif request.expression is not None:
            request.expression.append(token)

    def _free(self, row: int) -> None:
        """Empty a row; as in the cache, the last one moves into its place."""
        self.model.remove(row)
        self.running[row] = self.running[-1]
        self.running.pop()

    # ---- Whole answers

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        num_samples: int = 1, truncate: bool = False,
    ) -> list[Answer]:
        """
        num_samples answers to each prompt, those to one prompt next to each other. More than max_batch take turns.
        sampling: one for all prompts, or one for each; sample i of a prompt is the i-th draw of its seed.
        """
        assert not self.busy, "an engine that serves requests is driven by step() alone"
        samplings = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        answers: dict[int, Answer] = {}
        try:
            for prompt, its_sampling in zip(prompts, samplings, strict=True):
                prompt = self.fit(prompt, its_sampling, truncate)
                answers |= {id: Answer(prompt) for id in self.add(prompt, its_sampling, num_samples)}
            for event in self._until_done():
                answer = answers[event.id]
                answer.tokens.append(event.token)
                answer.forced.append(event.forced)
                answer.finish_reason = event.finish_reason
        finally:
            self.clear()
        return list(answers.values())

    def stream(self, prompt: Sequence[int], sampling: SamplingParams = SamplingParams()) -> Iterator[Delta]:
        """One answer as its text is written. Stopping early ends the request."""
        assert not self.busy, "an engine that serves requests is driven by step() alone"
        self.add(prompt, sampling)
        detokenizer = IncrementalDetokenizer(self.tokenizer)
        try:
            for event in self._until_done():
                yield from detokenizer.add(event.token)
            yield from detokenizer.end()
        finally:
            self.clear()

    def _until_done(self) -> Iterator[Event]:
        """Every event until nobody is left, or the first error."""
        while self.busy:
            for event in self.step():
                if event.error:
                    raise event.error
                yield event

    def clear(self) -> None:
        """End every request, without a further event."""
        self.running, self.waiting = [], {}
        self.model.clear()
