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
from typing import Literal

import torch

from nanochat.calculator import calculate
from nanochat.detokenizer import Delta, IncrementalDetokenizer
from nanochat.errors import UserError
from nanochat.gpt import GPT
from nanochat.kv_cache import CachedModel, Prefix
from nanochat.sampling import SamplingParams, draw
from nanochat.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]  # a stop token; max_tokens or the end of the context


@dataclass(eq=False)
class Answer:
    """One continuation of a prompt: `add` returns it, `step` extends it. A stop token that ends it is its last one."""
    prompt: list[int]                       # as the model reads it: truncated, if that was asked for
    sampling: SamplingParams
    owner: str
    limit: int                              # of its tokens: max_tokens, or the end of the context
    dice: random.Random
    tokens: list[int] = field(default_factory=list)  # the model has not read the last one yet
    forced: list[bool] = field(default_factory=list)  # for each token: written by the tool, not drawn from the model
    finish_reason: FinishReason | None = None
    error: Exception | None = None          # instead of any token: why the prompt could not be read
    output: deque[int] = field(default_factory=deque)  # what the tool has still to write
    expression: list[int] | None = None     # tokens since <|python_start|>


@dataclass
class Waiting:
    """Answers to one prompt that have no row yet. The prompt is read once, when the first of them gets one."""
    answers: deque[Answer]
    prefix: Prefix | None = None


class Engine:
    """
    Decodes up to max_batch sequences at once; others wait until one ends.

    Part of the weights are copied: after a training step, make a new one (milliseconds for a small model).
    quantize: the matrices and the head become int8, and the model gives up its own.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, max_batch: int = 16, quantize: Literal["", "int8"] = ""):
        assert max_batch >= 1
        assert tokenizer.get_vocab_size() == model.config.vocab_size, "a model and another one's tokenizer"
        self.model, self.tokenizer, self.max_batch = CachedModel(model, max_batch, quantize), tokenizer, max_batch
        self.context = model.config.sequence_len
        special = tokenizer.encode_special
        self.default_stop = special("<|assistant_end|>"), special("<|bos|>")
        self.python_start, self.python_end = special("<|python_start|>"), special("<|python_end|>")
        self.output_start, self.output_end = special("<|output_start|>"), special("<|output_end|>")
        self.running: list[Answer] = []     # in the order of the cache's rows
        self.waiting: dict[str, deque[Waiting]] = {}    # by owner; the one who got a row last comes last

    # ---- Requests

    def add(
        self, prompt: Sequence[int], sampling: SamplingParams = SamplingParams(), num_samples: int = 1,
        truncate: bool = False, owner: str = "",
    ) -> list[Answer]:
        """
        Queue a prompt, of which step() then writes num_samples continuations. UserError for a prompt that the model
        cannot read.

        Sample i is the i-th draw of sampling.seed: the same whatever else the engine is doing, and no two are alike.
        Among several owners, the one with the fewest rows gets the next row that is free.
        """
        assert num_samples >= 1
        prompt = self.fit(prompt, sampling, truncate)
        # The last token is written, not read: an answer may end one token beyond the context.
        limit = min(sampling.max_tokens, self.context + 1 - len(prompt))
        seeds = [None if sampling.seed is None else f"{sampling.seed} {i}" for i in range(num_samples)]
        answers = [Answer(prompt, sampling, owner, limit, random.Random(seed)) for seed in seeds]
        self.waiting.setdefault(owner, deque()).append(Waiting(deque(answers)))
        return answers

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

    def remove(self, answer: Answer) -> None:
        """End an answer now. Nothing happens if it has ended already."""
        if answer in self.running:
            return self._free(self.running.index(answer))
        for group in itertools.chain(*self.waiting.values()):
            if answer in group.answers:
                group.answers.remove(answer)
        left = {owner: deque(group for group in groups if group.answers) for owner, groups in self.waiting.items()}
        self.waiting = {owner: groups for owner, groups in left.items() if groups}

    @property
    def busy(self) -> bool:
        """Whether anything is running or waiting."""
        return bool(self.running or self.waiting)

    # ---- One token for everyone

    def step(self, max_prompts: int | None = None) -> list[Answer]:
        """
        One more token for each running answer and for those that get a place now; returns these answers. Those that
        end leave. What goes wrong with one prompt is the error of its own answers; after an exception only `clear`
        helps.

        max_prompts: at most so many prompts are read, for which all who are running have to wait; None: any number.
        """
        failed: list[Answer] = []
        logits = [self.model.decode([answer.tokens[-1] for answer in self.running])] if self.running else []
        logits += self._admit(failed, max_prompts)
        if not logits:
            return failed
        uniforms = [0.0 if answer.output else answer.dice.getrandbits(24) / 2**24 for answer in self.running]
        samplings = [answer.sampling for answer in self.running]
        drawn = draw(torch.cat(logits), samplings, uniforms, self.model.config.softcap)
        advanced = list(self.running)
        for answer, token in zip(advanced, drawn):
            self._advance(answer, token)
        for row in reversed(range(len(advanced))):
            if advanced[row].finish_reason:
                self._free(row)
        return advanced + failed

    def _admit(self, failed: list[Answer], max_prompts: int | None) -> list[torch.Tensor]:
        """Give free rows to those who have waited longest; returns the logits after their prompts, (1, V) each."""
        logits, read = [], 0
        while self.waiting and len(self.running) < self.max_batch:
            rows = Counter(answer.owner for answer in self.running)
            # Among equals the one whose prompt is read: each that waits takes memory.
            owner = min(self.waiting, key=lambda owner: (rows[owner], self.waiting[owner][0].prefix is None))
            group = self.waiting[owner][0]
            if group.prefix is None:
                if read == max_prompts:
                    break
                read += 1
            try:
                group.prefix = group.prefix or self.model.prefill(group.answers[0].prompt)
                self.model.insert(group.prefix)
            except Exception as error:  # for want of memory, perhaps: the others' rows are as they were
                for answer in group.answers:
                    answer.error = error
                failed += group.answers
                group.answers.clear()
            else:
                logits.append(group.prefix.logits)
                self.running.append(group.answers.popleft())
            groups = self.waiting.pop(owner)
            if not group.answers:
                groups.popleft()
            if groups:
                self.waiting[owner] = groups
        return logits

    def _advance(self, answer: Answer, drawn: int) -> None:
        """The answer's next token: what the tool has to say, or else what was drawn."""
        forced = bool(answer.output)
        token = answer.output.popleft() if forced else drawn
        answer.tokens.append(token)
        answer.forced.append(forced)
        if not forced and answer.sampling.tools:
            self._use_tool(answer, token)
        stop = self.default_stop if answer.sampling.stop is None else answer.sampling.stop
        if token in stop and not forced:
            answer.finish_reason = "stop"
        elif len(answer.tokens) == answer.limit:
            answer.finish_reason = "length"

    def _use_tool(self, answer: Answer, token: int) -> None:
        """Collect an expression; at its end the result comes next. What cannot be computed is left to the model."""
        if token == self.python_start:
            answer.expression = []
        elif token == self.python_end and answer.expression is not None:
            result = calculate(self.tokenizer.decode(answer.expression))
            if result is not None:
                answer.output.extend([self.output_start, *self.tokenizer.encode(result), self.output_end])
            answer.expression = None
        elif answer.expression is not None:
            answer.expression.append(token)

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
        sampling: one for all prompts, or one for each.
        """
        assert not self.busy, "an engine that serves requests is driven by step() alone"
        samplings = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        answers = []
        try:
            for prompt, its_sampling in zip(prompts, samplings, strict=True):
                answers += self.add(prompt, its_sampling, num_samples, truncate)
            for _ in self._until_done():
                pass
        finally:
            self.clear()
        return answers

    def stream(self, prompt: Sequence[int], sampling: SamplingParams = SamplingParams()) -> Iterator[Delta]:
        """One answer as its text is written. Leaving the loop early ends it."""
        assert not self.busy, "an engine that serves requests is driven by step() alone"
        self.add(prompt, sampling)
        detokenizer = IncrementalDetokenizer(self.tokenizer)
        try:
            for answer in self._until_done():
                yield from detokenizer.add(answer.tokens[-1])
            yield from detokenizer.end()
        finally:
            self.clear()

    def _until_done(self) -> Iterator[Answer]:
        """Each answer with each of its tokens, until all have ended or one has an error, which is raised."""
        while self.busy:
            for answer in self.step():
                if answer.error:
                    raise answer.error
                yield answer

    def clear(self) -> None:
        """End every answer now."""
        self.running, self.waiting = [], {}
        self.model.clear()
