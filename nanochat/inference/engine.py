"""
The engine decodes any number of conversations together. Each has its own settings, and may come or go at any step.

    engine = Engine(model, tokenizer)
    for delta in engine.stream(prompt, SamplingParams(temperature=0)):     # one answer, as it is written
        print(delta.text, end="")
    answers = engine.generate(prompts, SamplingParams(max_tokens=64))      # many, several at a time

This is continuous batching: requests in a batch need not begin and end together. A batch is the rows of a cache;
when an answer ends, its row goes to the next request. A request's states:

    add     -> waiting    no memory yet; owners take turns
    _admit  -> reading    it has one of max_batch places; its prompt is read a piece at a time, between others' tokens
    _read   -> running    the prompt has been read: it gets a row of the cache, and one token per step
    _free                 the answer has ended; the prompt cache keeps what was read for the next turn

A server calls `add` when a request comes in, `remove` when its client has gone, and `step` all the time, all from one
thread.
"""
import math
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.copying import Copying, Vocabulary
from nanochat.inference.detokenizer import Delta, IncrementalDetokenizer
from nanochat.inference.kv_cache import CachedModel, Prefix
from nanochat.inference.logprobs import TokenLogprob, token_logprobs
from nanochat.inference.prompt_cache import PIECE, PromptCache
from nanochat.inference.sampling import Adjustment, SamplingParams, draw
from nanochat.inference.tools import MOST_CALLS, NOTHING, Tools, is_call
from nanochat.model.gpt import GPT
from nanochat.runtime.errors import UserError
from nanochat.runtime.progress import progress
from nanochat.runtime.stopping import until_stopped

# Short prompts are read in one pass, together up to this many tokens: it takes hardly longer than one prompt.
MOST_TOGETHER = 512
# "stop": a stop token; "length": max_tokens or the end of the context.
FinishReason = Literal["stop", "length"]


def default_stop(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end an answer unless a request says otherwise."""
    return tokenizer.encode_special("<|assistant_end|>"), tokenizer.encode_special("<|bos|>")


@dataclass(eq=False)
class Reading:
    """How far a prompt has been read; shared by all answers to it."""
    prefix: Prefix = Prefix()
    cached: int = 0                         # tokens that came from the prompt cache
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one for each token read, if sampling wants them


@dataclass(eq=False)
class Answer:
    """One continuation of a prompt: `add` returns it, `step` extends it. A stop token that ends it is part of it."""
    prompt: list[int]                       # as the model reads it, perhaps truncated
    sampling: SamplingParams
    owner: str
    limit: int                              # maximum number of tokens: max_tokens, or what the context leaves
    rng: random.Random
    adjustment: Adjustment | None           # changes to its logits, if there are any
    reading: Reading | None                 # None once it has a row
    # The model has not read the last token yet.
    tokens: list[int] = field(default_factory=list)
    # For each token: whether the tool wrote it. RL does not reinforce the tool's tokens.
    forced: list[bool] = field(default_factory=list)
    # For each token, if sampling.logprobs is set; likewise for the prompt's.
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None          # why it ended early: its prompt could not be read, or its grammar failed
    cached: int = 0                         # tokens of the prompt that the prompt cache had
    output: deque[int] = field(default_factory=deque)  # the tool's tokens still to be written
    expression: list[int] | None = None     # tokens since <|python_start|>
    calls: int = 0                          # limited; arithmetic does not count

    @property
    def unread(self) -> int:
        """Tokens of the prompt that are still to be read."""
        return len(self.prompt) - self.reading.prefix.length


class Engine:
    """
    Decodes up to max_batch sequences at once; others wait until one ends.

    Some weights are copied: after a training step, make a new engine (milliseconds for a small model).
    prompt_cache_bytes: size of the prompt cache. max_per_owner: most places that one owner can have, so newcomers
    find one; None: all. tools: what the model can call.
    """

    def __init__(
        self, model: GPT, tokenizer: Tokenizer, max_batch: int = 16, prompt_cache_bytes: int = 0,
        max_per_owner: int | None = None, tools: Tools = Tools(),
    ):
        assert tokenizer.get_vocab_size() == model.config.vocab_size, "this tokenizer belongs to another model"
        self.model = CachedModel(model, max_batch)
        self.tokenizer = tokenizer
        self.max_batch = max_batch
        self.tools = tools
        self.max_per_owner = max_per_owner or max_batch
        self.context = model.config.sequence_len
        self.prompt_cache = PromptCache(prompt_cache_bytes, model.config.document_token)
        self.default_stop = default_stop(tokenizer)
        special = tokenizer.encode_special
        self.python_start, self.python_end = special("<|python_start|>"), special("<|python_end|>")
        self.output_start, self.output_end = special("<|output_start|>"), special("<|output_end|>")
        self.vocabulary = Vocabulary(tokenizer) if tools.copying else None
        # Whether the next piece comes from the oldest prompt or the shortest.
        self.oldest_next = True
        self.clear()

    # ---- Requests

    def add(
        self, prompt: Sequence[int], sampling: SamplingParams = SamplingParams(), num_samples: int = 1,
        truncate: bool = False, owner: str = "",
    ) -> list[Answer]:
        """
        Queue a prompt; step() writes num_samples continuations. UserError if the model cannot read the prompt.

        Sample i depends on sampling.seed and i, not on what else is decoded. The owner with the fewest places gets the
        next free place.
        """
        prompt = self.fit(prompt, sampling, truncate)
        # The last token is written, not read: an answer may end one token beyond the context.
        limit = min(sampling.max_tokens, self.context + 1 - len(prompt))
        reading = Reading()
        answers = []
        for i in range(num_samples):
            rng = random.Random(None if sampling.seed is None else f"{sampling.seed} {i}")
            copying = None
            if self.vocabulary and sampling.tools:
                copying = Copying(self.vocabulary, prompt, self.stop_tokens(sampling))
            adjustment = Adjustment(sampling, copying) if copying or sampling.adds or sampling.grammar else None
            answers.append(Answer(prompt, sampling, owner, limit, rng, adjustment, reading))
        self.waiting.setdefault(owner, deque()).extend(answers)
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

    def stop_tokens(self, sampling: SamplingParams) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return self.default_stop if sampling.stop is None else sampling.stop

    def remove(self, answer: Answer) -> None:
        """End an answer now. Nothing happens if it has ended already."""
        waiting = self.waiting.get(answer.owner, deque())
        if answer in self.running:
            self._free(self.running.index(answer))
        elif answer in self.reading:
            self.reading.remove(answer)
        elif answer in waiting:
            waiting.remove(answer)
            if not waiting:
                del self.waiting[answer.owner]
        answer.reading = None

    @property
    def busy(self) -> bool:
        """Whether anything is running or waiting."""
        return bool(self.running or self.reading or self.waiting)

    def clear(self) -> None:
        """End every answer now."""
        self.running: list[Answer] = []     # in the order of the cache's rows
        self.reading: list[Answer] = []     # the oldest first
        self.waiting: dict[str, deque[Answer]] = {}     # by owner; the owner who got a place last comes last
        self.model.clear()

    # ---- One token for everyone

    @torch.inference_mode()
    def step(self, max_prompt_tokens: float = math.inf) -> list[Answer]:
        """
        One more token for each running answer, and the first one for those whose prompt has been read; returns these
        answers. Finished answers are dropped. A bad prompt sets answer.error; if step() itself raises, call clear().

        max_prompt_tokens: read at most this many prompt tokens, because running answers wait meanwhile.
        """
        assert max_prompt_tokens >= PIECE, "some prompts would never be read"
        logits = []
        if self.running:
            logits.append(self.model.decode([answer.tokens[-1] for answer in self.running]))    # (rows, V)
        self._admit()
        hidden, failed = self._read(max_prompt_tokens)
        if hidden:
            logits.append(self.model.logits(torch.cat(hidden)))     # (new rows, V)
        if not logits:
            return failed
        advanced = list(self.running)
        self._extend(advanced, torch.cat(logits))
        for row in reversed(range(len(advanced))):
            if advanced[row].finish_reason or advanced[row].error:
                self._free(row)
        return advanced + failed

    def _admit(self) -> None:
        """Give each free place to the owner with the fewest places, for the owner's longest waiting answer."""
        while self.waiting and len(self.running) + len(self.reading) < self.max_batch:
            places = Counter(answer.owner for answer in self.running + self.reading)
            # Ties go to the owner who got a place longest ago: `waiting` is in that order.
            owner = min(self.waiting, key=lambda owner: places[owner])
            if places[owner] >= self.max_per_owner:
                break
            answers = self.waiting.pop(owner)
            self.reading.append(answers.popleft())
            if answers:
                self.waiting[owner] = answers   # goes behind the other owners
            self._look_up(self.reading[-1])

    def _read(self, budget: float) -> tuple[list[Tensor], list[Answer]]:
        """
        Read at most `budget` prompt tokens; an answer whose prompt is complete gets a row. Returns the head's input
        after each of these prompts, (1, C), and the failed answers.
        """
        hidden: list[Tensor] = []
        failed: list[Answer] = []
        while self.reading:
            # Short prompts overtake long ones. Every second piece is the oldest prompt's, so none waits for ever.
            answer = min(self.reading, key=lambda answer: answer.unread)
            if self.oldest_next and answer.unread:
                answer = self.reading[0]
            # Another prompt with the same beginning may have been read since.
            self._look_up(answer)
            if min(answer.unread, PIECE) > budget:
                break
            try:
                if answer.unread:
                    self.oldest_next = not self.oldest_next
                    budget -= self._read_pieces(answer, budget)
                if answer.unread:
                    continue
                self.model.insert(answer.reading.prefix)
            except Exception as error:
                # E.g. out of memory; the other rows are unaffected.
                waiting = self.waiting.get(answer.owner, ())
                sharing = [other for other in (*self.reading, *waiting) if other.reading is answer.reading]
                for other in sharing:
                    self.remove(other)
                    other.error = error
                failed += sharing
                continue
            reading = answer.reading
            hidden.append(reading.prefix.hidden[-1:])
            answer.cached, answer.prompt_logprobs, answer.reading = reading.cached, reading.logprobs, None
            self.reading.remove(answer)
            self.running.append(answer)
        return hidden, failed

    def _read_pieces(self, answer: Answer, budget: float) -> int:
        """Read a prompt's next piece and, in the same pass, others' short pieces; returns the number of tokens."""
        together = self._short_prompts(answer, budget)
        parts = []
        for other in together:
            prefix = other.reading.prefix
            parts.append((prefix, other.prompt[prefix.length : prefix.length + PIECE]))
        try:
            prefixes = self.model.extend(parts)
        except Exception:
            if len(parts) == 1:
                raise
            # Retry the first prompt alone; the others are retried later, so the bad one is found.
            parts = parts[:1]
            prefixes = self.model.extend(parts)
        for other, prefix, (_, tokens) in zip(together, prefixes, parts):
            self._after_piece(other, prefix, len(tokens))
        return sum(len(tokens) for _, tokens in parts)

    def _short_prompts(self, answer: Answer, budget: float) -> list[Answer]:
        """
        The answer, and others whose last, short pieces are read with it. Whole pieces are read alone: the prompt cache
        keeps them, and reading several prompts together changes the last digits.
        """
        together = {answer.reading: answer}
        left = min(budget, MOST_TOGETHER) - answer.unread
        if answer.unread < PIECE:
            for other in (*self.reading, *self.waiting.get(answer.owner, ())):
                if other.reading not in together and 0 < other.unread <= min(left, PIECE - 1):
                    together[other.reading] = other
                    left -= other.unread
        return list(together.values())

    def _after_piece(self, answer: Answer, prefix: Prefix, count: int) -> None:
        """Keep a prefix whose last `count` tokens have just been read, and their log-probabilities."""
        reading, prompt = answer.reading, answer.prompt
        reading.prefix = prefix
        self.prompt_cache.keep(prompt[: prefix.length], answer.owner, lambda start, _: prefix.pieces[start // PIECE])
        top = answer.sampling.prompt_logprobs
        if top is None:
            return
        # Nothing predicts the first token.
        reading.logprobs = reading.logprobs or [TokenLogprob(prompt[0], None, [])]
        # The prompt's last token has no target, because the answer follows it.
        targets = prompt[prefix.length - count + 1 : prefix.length + 1]
        logits = self.model.logits(prefix.hidden[: len(targets)])
        reading.logprobs += token_logprobs(logits, targets, top, self.model.config.softcap)

    def _look_up(self, answer: Answer) -> None:
        """Take what the prompt cache has of the prompt, unless log-probabilities are needed: the cache has none."""
        reading = answer.reading
        if answer.sampling.prompt_logprobs is None:
            before = reading.prefix.length
            reading.prefix = self.prompt_cache.look_up(reading.prefix, answer.prompt, answer.owner)
            reading.cached += reading.prefix.length - before

    def _extend(self, answers: list[Answer], logits: Tensor) -> None:
        """The next token of each answer, after these logits, (answers, V)."""
        softcap = self.model.config.softcap
        # A sample draws only for its own tokens, not for the tool's.
        uniforms = [0.0 if answer.output else answer.rng.getrandbits(24) / 2**24 for answer in answers]
        samplings = [answer.sampling for answer in answers]
        drawn = draw(logits, samplings, uniforms, softcap, [answer.adjustment for answer in answers])
        wanted: dict[int, list[int]] = {}  # rows, by the number of probable tokens they want
        for row, (answer, token) in enumerate(zip(answers, drawn)):
            self._advance(answer, token)
            count = answer.sampling.logprobs
            if count is not None and answer.tokens:
                wanted.setdefault(count, []).append(row)
        for count, rows in wanted.items():
            found = token_logprobs(logits[rows], [answers[row].tokens[-1] for row in rows], count, softcap)
            for row, logprob in zip(rows, found):
                answers[row].logprobs.append(logprob)

    def _advance(self, answer: Answer, drawn: int) -> None:
        """Append the answer's next token, if it may have one: the tool's next token, or else the drawn one."""
        if answer.limit == 0:
            answer.finish_reason = "length"
            return
        forced = bool(answer.output)
        token = answer.output.popleft() if forced else drawn
        answer.tokens.append(token)
        answer.forced.append(forced)
        if answer.adjustment:
            answer.adjustment.add(token)
        if not forced and answer.sampling.tools:
            self._use_tool(answer, token)
        if token in self.stop_tokens(answer.sampling) and not forced and not answer.output:
            answer.finish_reason = "stop"
        elif len(answer.tokens) == answer.limit:
            answer.finish_reason = "length"
        elif answer.sampling.grammar:
            try:
                answer.adjustment.grammar.advance(token)
            except UserError as error:
                answer.error = error

    def _use_tool(self, answer: Answer, token: int) -> None:
        """
        Collect an expression; at its end queue the result. Without a result the model goes on. If a library has
        nothing but a wider call finds something, that call and its result follow.
        """
        if token == self.python_start:
            answer.expression = []
        elif token == self.python_end and answer.expression is not None:
            expression = self.tokenizer.decode(answer.expression)
            result = self._call(answer, expression)
            copying = answer.adjustment and answer.adjustment.copying
            if result == NOTHING and copying and answer.calls < MOST_CALLS:
                wider = self.tools.wider(expression, copying.questions())
                if wider:
                    answer.output.extend([self.python_start, *self.tokenizer.encode(wider), self.python_end])
                    self._call(answer, wider)
            answer.expression = None
        elif answer.expression is not None:
            answer.expression.append(token)

    def _call(self, answer: Answer, expression: str) -> str | None:
        """Queue an expression's result and return it; None if it has none."""
        result = self.tools.result(expression, self.tokenizer, answer.calls, self.context)
        answer.calls += is_call(expression)
        if result is not None:
            answer.output.extend([self.output_start, *self.tokenizer.encode(result), self.output_end])
        return result

    def _free(self, row: int) -> None:
        """Drop the answer in a row. The prompt cache keeps a copy; the last row moves here, as in `CachedModel`."""
        answer = self.running[row]
        # The model has not read the last token.
        tokens = (answer.prompt + answer.tokens)[: self.model.rows[row].length]
        self.prompt_cache.keep(tokens, answer.owner, partial(self.model.piece, row))
        self.model.remove(row)
        self.running[row] = self.running[-1]
        self.running.pop()

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
        """The answers of each step, until all have ended or one has an error, which is raised."""
        while self.busy:
            advanced = self.step()
            for answer in advanced:
                if answer.error:
                    raise answer.error
            yield advanced
