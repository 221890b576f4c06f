"""
The engine decodes any number of conversations together. Each has its own settings, and may come or go at any step.

    engine = Engine(model, tokenizer)
    for delta in engine.stream(prompt, SamplingParams(temperature=0)):     # one answer, as it is written
        print(delta.text, end="")
    answers = engine.generate(prompts, SamplingParams(max_tokens=64))      # many, several at a time

This is continuous batching: requests in a batch need not begin and end together. A batch is the rows of a cache, and an
answer has one row from its start to its end:

    add     -> waiting    until one of max_batch rows is free; first come, first served
    step    -> running    every row reads its next tokens in one pass: of a prompt a piece, else the token just written;
                          whoever has read all gets a token

A server calls `add` when a request comes in, `remove` when its client has gone, and `step` all the time, all from one
thread.
"""
import copy
import random
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from nanochat.data.sentences import sentence_ends
from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.copying import Copying, Vocabulary
from nanochat.inference.detokenizer import Delta, IncrementalDetokenizer
from nanochat.inference.kv_cache import CachedModel, Row
from nanochat.inference.logprobs import TokenLogprob, token_logprobs
from nanochat.inference.sampling import Sampler, SamplingParams, draw
from nanochat.inference.tools import MOST_CALLS, NOTHING, TOOL_CALL, Plan, Tools
from nanochat.model.gpt import GPT
from nanochat.runtime.errors import UserError
from nanochat.runtime.progress import progress
from nanochat.runtime.stopping import until_stopped

# Tokens of prompts that are read in one step: several short prompts take hardly longer than one.
MOST_READ = 512
# A result may fill 1 / RESULT_SHARE of the context, as the question comes before it.
RESULT_SHARE = 3
# So many tokens that repeat at most PERIOD of them end an answer if they have digits and no Latin letter, unless they
# are copied: "2.5.55.55.55…", "10/ 10/ 10/ …".
ENDLESS, PERIOD = 16, 4
DIGITS = re.compile(r"[^a-z]*\d[^a-z]*", re.IGNORECASE)
# "stop": a stop token; "length": max_tokens or the end of the context, or a quotation that had no room.
FinishReason = Literal["stop", "length"]


@dataclass(eq=False)
class Answer:
    """One continuation of a prompt: `add` returns it, `step` extends it. A stop token that ends it is part of it."""
    prompt: list[int]                       # as the model reads it, perhaps truncated
    sampling: SamplingParams
    limit: int                              # maximum number of tokens: max_tokens, or what the context leaves
    rng: random.Random
    sampler: Sampler
    plan: Plan                              # what was decided about it before it began
    # The model has not read the last token yet.
    tokens: list[int] = field(default_factory=list)
    # For each token: whether it was queued, not drawn. RL does not reinforce what a tool wrote.
    forced: list[bool] = field(default_factory=list)
    # For each token, if sampling.logprobs is set.
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    queued: deque[int] = field(default_factory=deque)  # tokens still to be written that the model does not choose
    is_cut: bool = False                    # what it quotes had no room
    expression: list[int] | None = None     # tokens since <|python_start|>
    calls: int = 0                          # limited; arithmetic does not count


class Engine:
    """
    Decodes up to max_batch sequences at once; others wait until one ends.

    Some weights are copied: after a training step, make a new engine (milliseconds for a small model).
    capacity: most tokens of a prompt and its answer, for which memory is set aside; None: the model's context.
    tools: what the model can call.
    """

    def __init__(
        self, model: GPT, tokenizer: Tokenizer, max_batch: int = 16, capacity: int | None = None,
        tools: Tools = Tools(),
    ):
        assert tokenizer.get_vocab_size() == model.config.vocab_size, "this tokenizer belongs to another model"
        self.context = model.config.sequence_len
        self.model = CachedModel(model, max_batch, min(capacity or self.context, self.context))
        self.tokenizer = tokenizer
        self.max_batch = max_batch
        self.tools = tools
        special = tokenizer.encode_special
        self.python_start, self.python_end = special("<|python_start|>"), special("<|python_end|>")
        self.assistant_start, self.assistant_end = special("<|assistant_start|>"), special("<|assistant_end|>")
        self.output_start, self.output_end = special("<|output_start|>"), special("<|output_end|>")
        self.stop = {self.assistant_end, special("<|bos|>")}     # tokens that end an answer
        # None: nothing is planned, and nothing copied.
        self.vocabulary = Vocabulary(tokenizer) if tools.copying else None
        self.clear()

    # ---- Requests

    def add(
        self, prompt: Sequence[int], sampling: SamplingParams = SamplingParams(), num_samples: int = 1,
        truncate: bool = False,
    ) -> list[Answer]:
        """
        Queue a prompt; step() writes num_samples continuations. UserError if the model cannot read the prompt. The plan
        may search the library: meanwhile no other answer goes on.

        Sample i depends on sampling.seed and i, not on what else is decoded.
        """
        prompt = self.fit(prompt, sampling, truncate)
        # The last token is written, not read: an answer may end one token beyond the context.
        limit = min(sampling.max_tokens, self.context + 1 - len(prompt))
        plan, copying = Plan(), None
        if self.vocabulary and sampling.tools:
            questions = self.vocabulary.questions(prompt)
            # An answer that has begun goes on as it likes.
            if prompt[-1] == self.assistant_start:
                plan = self.tools.plan(questions)
            copying = Copying(self.vocabulary, questions, self.stop, plan, self.tools.is_own)
        answers = []
        for i in range(num_samples):
            rng = random.Random(None if sampling.seed is None else f"{sampling.seed} {i}")
            # All answers to a prompt begin alike; then each copies for itself. Small talk calls no tool.
            sampler = Sampler(sampling, copy.copy(copying), self.python_start if plan.is_small_talk else -1)
            answer = Answer(prompt, sampling, limit, rng, sampler, plan)
            if plan.call:
                self._queue_call(answer, plan.call)
            answers.append(answer)
        self.waiting.extend(answers)
        return answers

    def fit(self, prompt: Sequence[int], sampling: SamplingParams, truncate: bool = False) -> list[int]:
        """
        The prompt, if the model can read it; else UserError. With truncate, a prompt longer than the context keeps its
        first token (<|bos|>) and its end: max_tokens positions, at most half of the context, become free.
        """
        prompt = list(prompt)
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
            row = self.running.index(answer)
            # The last row moves here, as in `CachedModel`.
            self.model.remove(row)
            self.running[row] = self.running[-1]
            self.running.pop()
        elif answer in self.waiting:
            self.waiting.remove(answer)

    @property
    def busy(self) -> bool:
        """Whether anything is running or waiting."""
        return bool(self.running or self.waiting)

    def clear(self) -> None:
        """End every answer now."""
        self.running: list[Answer] = []     # in the order of the cache's rows
        self.waiting: deque[Answer] = deque()
        self.model.rows.clear()

    # ---- One token for everyone

    @torch.inference_mode()
    def step(self, most_read: int = MOST_READ) -> list[Answer]:
        """
        One more token for each running answer whose prompt has been read; returns these answers. Finished answers are
        dropped. If step() raises, call clear().

        most_read: about how many tokens of prompts are read, because running answers wait meanwhile.
        """
        while self.waiting and len(self.running) < self.max_batch:
            self.running.append(self.waiting.popleft())
            self.model.rows.append(Row())
        if not self.running:
            return []
        parts = self._next_tokens(most_read)
        hidden = self.model.read(parts)     # (N, C)
        advanced, ends = [], []
        end = 0
        for answer, row, part in zip(self.running, self.model.rows, parts):
            end += len(part)
            if row.length >= len(answer.prompt):
                advanced.append(answer)
                ends.append(end - 1)
        if advanced:
            self._extend(advanced, self.model.logits(hidden[ends]))
        for answer in advanced:
            if answer.finish_reason:
                self.remove(answer)
        return advanced

    def _next_tokens(self, most_read: int) -> list[list[int]]:
        """
        What each row reads in this step, at least one token: what the model has not read of a prompt, the shortest
        first, up to most_read tokens in all; else the token just written. One row reads a prompt for all samples of it,
        and the others copy that.
        """
        parts = [answer.tokens[-1:] for answer in self.running]
        unread = [len(answer.prompt) - row.length for answer, row in zip(self.running, self.model.rows)]
        readers: dict[int, int] = {}    # rows, by the prompt's id
        for row in sorted(range(len(parts)), key=unread.__getitem__):
            answer, length = self.running[row], self.model.rows[row].length
            prompt = answer.prompt
            reader = readers.setdefault(id(prompt), row)
            if unread[row] <= 0:
                continue
            count = min(max(most_read, 1), unread[row])
            if unread[row] > 1 and reader != row:
                if unread[reader] <= 1:
                    self.model.copy(reader, row, prompt[:-1])
                    length = len(prompt) - 1
                count = 1
            parts[row] = prompt[length : length + count]
            most_read -= count
        return parts

    def _extend(self, answers: list[Answer], logits: Tensor) -> None:
        """The next token of each answer, after these logits, (answers, V)."""
        softcap = self.model.config.softcap
        # A sample draws only for its own tokens, not for the tool's.
        uniforms = [0.0 if answer.queued else answer.rng.getrandbits(24) / 2**24 for answer in answers]
        drawn = draw(logits, [answer.sampler for answer in answers], uniforms, softcap)
        wanted = defaultdict(list)  # rows, by the number of probable tokens they want
        for row, (answer, token) in enumerate(zip(answers, drawn)):
            self._advance(answer, token)
            count = answer.sampling.logprobs
            if count is not None:
                wanted[count].append(row)
        for count, rows in wanted.items():
            found = token_logprobs(logits[rows], [answers[row].tokens[-1] for row in rows], count, softcap)
            for row, logprob in zip(rows, found):
                answers[row].logprobs.append(logprob)

    def _advance(self, answer: Answer, drawn: int) -> None:
        """Append the answer's next token: the next one queued, or else the drawn one."""
        if not answer.queued and answer.plan.lost:
            self._end_well(answer, drawn)
        forced = bool(answer.queued)
        token = answer.queued.popleft() if forced else drawn
        answer.tokens.append(token)
        answer.forced.append(forced)
        if not forced and answer.sampling.tools:
            self._use_tool(answer, token)
        if token in self.stop:
            answer.finish_reason = "length" if answer.is_cut else "stop"
        elif len(answer.tokens) == answer.limit:
            answer.finish_reason = "length"
        elif answer.sampler.copying:
            answer.sampler.copying.add(token)

    def _end_well(self, answer: Answer, drawn: int) -> None:
        """Before an answer ends without a word, queue a sentence; digits that repeat themselves end an answer, too."""
        latest = [*answer.tokens[1 - ENDLESS :], drawn]
        repeats = len(latest) == ENDLESS and any(latest[n:] == latest[:-n] for n in range(1, PERIOD + 1))
        copying = answer.sampler.copying
        is_copied = copying and copying.copy
        is_endless = repeats and not is_copied and DIGITS.fullmatch(self.tokenizer.decode(latest))
        if not is_endless and drawn not in self.stop:
            return
        if answer.expression is not None:
            answer.queued.append(self.python_end)
        *_, last = *answer.prompt, *answer.tokens, *answer.queued
        if self.vocabulary.is_special(last):    # not a word since the call, or at all
            answer.queued.extend(self.tokenizer.encode(answer.plan.lost))
        answer.queued.append(drawn if drawn in self.stop else self.assistant_end)
        answer.expression = None

    def _use_tool(self, answer: Answer, token: int) -> None:
        """
        Collect an expression; at its end queue the result. Without a result the model goes on. If the call finds
        nothing, but the user's own question does, that call and its result follow.
        """
        if token == self.python_start:
            answer.expression = []
        elif token == self.python_end and answer.expression is not None:
            expression = self.tokenizer.decode(answer.expression)
            answer.expression = None
            result = self._queue_result(answer, expression)
            if result == NOTHING and self.vocabulary and answer.calls < MOST_CALLS:
                asked, is_found = self.tools.asked(self.vocabulary.questions(answer.prompt))
                if is_found:
                    self._queue_call(answer, f'search("{asked}")')
        elif answer.expression is not None:
            answer.expression.append(token)

    def _queue_call(self, answer: Answer, expression: str) -> None:
        """A call that the model does not make, and its result."""
        answer.queued.extend([self.python_start, *self.tokenizer.encode(expression), self.python_end])
        self._queue_result(answer, expression)

    def _queue_result(self, answer: Answer, expression: str) -> str | None:
        """Queue an expression's result and return it; None if it has none."""
        # The answer quotes it, perhaps in smaller tokens.
        room = min(self.context // RESULT_SHARE, (answer.limit - len(answer.tokens)) * 2 // 5)
        result = self.tools.result(expression, self.tokenizer, answer.calls, room)
        answer.calls += bool(TOOL_CALL.fullmatch(expression))
        if result is not None:
            answer.queued.extend([self.output_start, *self.tokenizer.encode(result), self.output_end])
            passage = self.tools.find(expression)
            answer.is_cut |= passage is not None and passage.text.startswith(result) and (
                len(result) not in sentence_ends(passage.text))
        return result

    # ---- Whole answers

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        num_samples: int = 1, truncate: bool = False,
    ) -> list[Answer]:
        """
        num_samples answers to each prompt, in the order of the prompts. If there are more than max_batch, they take
        turns. sampling: one for all prompts, or one for each.
        """
        assert not self.busy, "an engine that serves requests is driven by step() alone"
        samplings = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        answers = []
        try:
            for prompt, params in zip(prompts, samplings, strict=True):
                answers += self.add(prompt, params, num_samples, truncate)
            with progress(None, "answering", "answers", len(answers)) as bar:
                for advanced in until_stopped(self._until_done(), every=16):
                    bar.update(sum(answer.finish_reason is not None for answer in advanced))
        finally:
            self.clear()
        return answers

    def stream(self, prompt: Sequence[int], sampling: SamplingParams = SamplingParams()) -> Iterator[Delta]:
        """One answer as its text is written. Leaving the loop early ends it."""
        assert not self.busy, "an engine that serves requests is driven by step() alone"
        self.add(prompt, sampling)
        detokenizer = IncrementalDetokenizer(self.tokenizer)
        try:
            for advanced in self._until_done():
                for answer in advanced:
                    yield from detokenizer.add(answer.tokens[-1])
            yield from detokenizer.end()
        finally:
            self.clear()

    def _until_done(self) -> Iterator[list[Answer]]:
        """The answers of each step, until all have ended."""
        while self.busy:
            yield self.step()
