"""
The engine: any number of conversations decoded together, each with its own settings, coming and going at any step.

    engine = Engine(model, tokenizer)
    for delta in engine.stream(prompt, SamplingParams(temperature=0)):     # one answer, as it is written
        print(delta.text, end="")
    answers = engine.generate(prompts, SamplingParams(max_tokens=64))      # many, several at a time

A server calls `add` when a request comes in, `remove` when its client has gone, and `step` all the time: one token for
everyone who is running, and a piece of the prompts of those who come. All from one thread.
"""
import math
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from nanochat.data.tokenizer import Tokenizer
from nanochat.inference.calculator import calculate
from nanochat.inference.detokenizer import Delta, IncrementalDetokenizer
from nanochat.inference.kv_cache import CachedModel, Prefix
from nanochat.inference.logprobs import TokenLogprob, token_logprobs
from nanochat.inference.prompt_cache import PIECE, PromptCache
from nanochat.inference.sampling import Grammar, History, SamplingParams, draw
from nanochat.model.gpt import GPT
from nanochat.runtime.errors import UserError
from nanochat.runtime.progress import progress
from nanochat.runtime.stopping import until_stopped

MOST_TOGETHER = 512  # tokens of several short prompts that are read in one pass
FinishReason = Literal["stop", "length"]  # a stop token; max_tokens or the end of the context


def default_stop(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end an answer where a request does not say otherwise."""
    return tokenizer.encode_special("<|assistant_end|>"), tokenizer.encode_special("<|bos|>")


@dataclass(eq=False)
class Reading:
    """A prompt as far as it has been read, once for all answers to it."""
    prefix: Prefix = Prefix()
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of the prompt's tokens so far, if they are asked for


@dataclass(eq=False)
class Answer:
    """One continuation of a prompt: `add` returns it, `step` extends it. A stop token that ends it is its last one."""
    prompt: list[int]                       # as the model reads it: truncated, if that was asked for
    sampling: SamplingParams
    owner: str
    limit: int                              # of its tokens: max_tokens, or the end of the context
    dice: random.Random
    grammar: Grammar | None                 # where it stands in sampling.grammar
    tokens: list[int] = field(default_factory=list)  # the model has not read the last one yet
    forced: list[bool] = field(default_factory=list)  # for each token: written by the tool, not drawn from the model
    logprobs: list[TokenLogprob] = field(default_factory=list)  # for each token, if sampling.logprobs asks for them
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # for each token of the prompt, likewise
    finish_reason: FinishReason | None = None
    error: Exception | None = None          # instead of more: the prompt could not be read, or the grammar is too hard
    cached: int = 0                         # tokens of the prompt that the prompt cache had
    reading: Reading | None = None          # until it has a row
    output: deque[int] = field(default_factory=deque)  # what the tool has still to write
    expression: list[int] | None = None     # tokens since <|python_start|>

    @property
    def unread(self) -> int:
        """Tokens of the prompt that are still to be read."""
        return len(self.prompt) - self.reading.prefix.length


class Engine:
    """
    Decodes up to max_batch sequences at once; others wait until one ends.

    Part of the weights are copied: after a training step, make a new one (milliseconds for a small model).
    prompt_cache_bytes: how much is kept of the keys and values of prompts and answers, for prompts that begin alike.
    max_per_owner: of the places, so that a newcomer finds one; None: all. compile: the decoding step, which takes a
    while.
    """

    def __init__(
        self, model: GPT, tokenizer: Tokenizer, max_batch: int = 16, prompt_cache_bytes: int = 0,
        max_per_owner: int | None = None, compile: bool = False,
    ):
        assert max_batch >= 1
        assert tokenizer.get_vocab_size() == model.config.vocab_size, "a model and another one's tokenizer"
        self.model, self.tokenizer = CachedModel(model, max_batch, compile), tokenizer
        self.max_batch = max_batch
        self.context, self.prompt_cache = model.config.sequence_len, PromptCache(self.model, prompt_cache_bytes)
        self.max_per_owner = max_per_owner or max_batch
        special = tokenizer.encode_special
        self.default_stop = default_stop(tokenizer)
        self.python_start, self.python_end = special("<|python_start|>"), special("<|python_end|>")
        self.output_start, self.output_end = special("<|output_start|>"), special("<|output_end|>")
        self.running: list[Answer] = []     # in the order of the cache's rows
        self.reading: list[Answer] = []     # each has a place, and gets a row when its prompt has been read
        self.waiting: dict[str, deque[Answer]] = {}     # by owner; the one who got a place last comes last
        self.oldest_next = True             # whose piece is read next: the oldest prompt's, or the shortest one's

    # ---- Requests

    def add(
        self, prompt: Sequence[int], sampling: SamplingParams = SamplingParams(), num_samples: int = 1,
        truncate: bool = False, owner: str = "",
    ) -> list[Answer]:
        """
        Queue a prompt, of which step() then writes num_samples continuations. UserError for a prompt that the model
        cannot read.

        Sample i is the i-th draw of sampling.seed: the same whatever else the engine is doing, and no two are alike.
        Among several owners, the one with the fewest places gets the next one that is free.
        """
        assert num_samples >= 1
        prompt = self.fit(prompt, sampling, truncate)
        # The last token is written, not read: an answer may end one token beyond the context.
        limit = min(sampling.max_tokens, self.context + 1 - len(prompt))
        seeds = [None if sampling.seed is None else f"{sampling.seed} {i}" for i in range(num_samples)]
        grammars = [sampling.grammar and sampling.grammar.start() for _ in seeds]
        reading = Reading()
        answers = [
            Answer(prompt, sampling, owner, limit, random.Random(seed), grammar, reading=reading)
            for seed, grammar in zip(seeds, grammars)]
        self.waiting.setdefault(owner, deque()).extend(answers)
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
            self._free(self.running.index(answer))
        elif answer in self.reading:
            self.reading.remove(answer)
        elif answer in (answers := self.waiting.get(answer.owner, ())):
            answers.remove(answer)
            if not answers:
                del self.waiting[answer.owner]
        answer.reading = None

    @property
    def busy(self) -> bool:
        """Whether anything is running or waiting."""
        return bool(self.running or self.reading or self.waiting)

    # ---- One token for everyone

    def step(self, max_prompt_tokens: float = math.inf, ahead: bool = False) -> list[Answer]:
        """
        One more token for each running answer and for those that get a row now; returns these answers. Those that
        end leave. What goes wrong with one prompt is the error of its own answers; after an exception only `clear`
        helps.

        max_prompt_tokens: at most so many tokens of prompts are read, for which all who are running have to wait.
        ahead: with a short prompt those of waiting answers are read, where owners need not take turns.
        """
        assert max_prompt_tokens >= PIECE, "some prompts would never be read"
        failed: list[Answer] = []
        logits = [self.model.decode([answer.tokens[-1] for answer in self.running])] if self.running else []
        self._admit()
        logits += self._read(failed, max_prompt_tokens, ahead)
        if not logits:
            return failed
        advanced = list(self.running)
        self._extend(advanced, torch.cat(logits))
        for row in reversed(range(len(advanced))):
            if advanced[row].finish_reason or advanced[row].error:
                self._free(row)
        return advanced + failed

    def _extend(self, answers: list[Answer], logits: torch.Tensor) -> None:
        """The next token of each answer, after these logits, (answers, V)."""
        softcap = self.model.config.softcap
        uniforms = [0.0 if answer.output else answer.dice.getrandbits(24) / 2**24 for answer in answers]
        histories = [
            History(answer.prompt, answer.tokens, answer.grammar and answer.grammar.allowed) for answer in answers]
        drawn = draw(logits, [answer.sampling for answer in answers], uniforms, softcap, histories)
        for answer, token in zip(answers, drawn):
            self._advance(answer, token)
        asked = [row for row, answer in enumerate(answers) if answer.sampling.logprobs is not None and answer.tokens]
        if asked:
            tokens = [answers[row].tokens[-1] for row in asked]
            counts = [answers[row].sampling.logprobs for row in asked]
            for row, logprob in zip(asked, token_logprobs(logits[asked], tokens, counts, softcap)):
                answers[row].logprobs.append(logprob)

    def _admit(self) -> None:
        """Give free places to those who have waited longest, of the owners who have fewest."""
        while self.waiting and len(self.running) + len(self.reading) < self.max_batch:
            places = Counter(answer.owner for answer in self.running + self.reading)
            # Among equals the one whose prompt is read: each that waits takes memory.
            owner = min(self.waiting, key=lambda o: (places[o], not self.waiting[o][0].reading.prefix.length))
            if places[owner] >= self.max_per_owner:
                break
            answers = self.waiting.pop(owner)
            self.reading.append(answers.popleft())
            if answers:
                self.waiting[owner] = answers
            self._look_up(self.reading[-1])

    def _read(self, failed: list[Answer], budget: float, ahead: bool) -> list[torch.Tensor]:
        """
        Read so many tokens of prompts, a piece at a time; answers whose prompt is complete get a row. Returns the
        logits after these prompts, (1, V) each.
        """
        logits = []
        while self.reading:
            # A short prompt passes the long ones; but every second piece is of the oldest: none waits for ever.
            answer = min(self.reading, key=lambda answer: answer.unread)
            if self.oldest_next and answer.unread:
                answer = self.reading[0]
            self._look_up(answer)  # another one with the same beginning may have been read
            if (length := min(answer.unread, PIECE)) > budget:
                break
            try:
                if length:
                    self.oldest_next = not self.oldest_next
                    together = self._read_together(answer, budget, ahead)
                    if not together:
                        self._read_piece(answer)
                    budget -= together or length
                if answer.unread:
                    continue
                self.model.insert(answer.reading.prefix)
            except Exception as error:  # for want of memory, perhaps: the others' rows are as they were
                waiting = *self.reading, *self.waiting.get(answer.owner, ())
                sharing = [other for other in waiting if other.reading is answer.reading]
                for other in sharing:
                    self.remove(other)
                    other.error = error
                failed += sharing
            else:
                logits.append(answer.reading.prefix.logits)
                self.reading.remove(answer)
                self.running.append(answer)
                answer.cached, answer.prompt_logprobs = answer.reading.prefix.cached, answer.reading.logprobs
                answer.reading = None
        return logits

    def _read_together(self, answer: Answer, budget: float, ahead: bool) -> int:
        """
        Read an answer's whole short prompt and those of others in one pass, which takes hardly longer. Returns how many
        tokens; 0 if there is none to go with it, or one of them could not be read.
        """
        together, left = {}, min(budget, MOST_TOGETHER)
        for other in (answer, *self.reading, *(self.waiting.get(answer.owner, ()) if ahead else ())):
            whole = not other.reading.prefix.length and len(other.prompt) < PIECE  # nor is anything of it cached
            if whole and other.sampling.prompt_logprobs is None and other.reading not in together:
                if (left := left - len(other.prompt)) < 0:
                    break
                together[other.reading] = other.prompt
            elif not together:
                return 0
        if len(together) == 1:
            return 0
        try:
            prefixes = self.model.extend_all([(Prefix(), prompt) for prompt in together.values()])
        except Exception:  # whose fault it is will be seen when each is read alone
            return 0
        for reading, prefix in zip(together, prefixes):
            reading.prefix = prefix
        return sum(map(len, together.values()))

    def _read_piece(self, answer: Answer) -> None:
        """The next piece of an answer's prompt, and the log-probabilities of its tokens where they are asked for."""
        reading, count, prompt = answer.reading, answer.sampling.prompt_logprobs, answer.prompt
        start = reading.prefix.length
        reading.prefix = self.prompt_cache.read(reading.prefix, prompt, answer.owner, every=count is not None)
        if count is None:
            return
        if start == 0:
            reading.logprobs.append(TokenLogprob(prompt[0], None, []))
        logits, tokens = reading.prefix.logits, prompt[start + 1 : reading.prefix.length + 1]
        if tokens:
            reading.logprobs += token_logprobs(
                logits[: len(tokens)], tokens, [count] * len(tokens), self.model.config.softcap)
        reading.prefix = reading.prefix._replace(logits=logits[-1:])

    def _look_up(self, answer: Answer) -> None:
        """Take what the prompt cache has of the answer's prompt; it has no log-probabilities."""
        if answer.sampling.prompt_logprobs is None:
            answer.reading.prefix = self.prompt_cache.look_up(answer.reading.prefix, answer.prompt, answer.owner)

    def _advance(self, answer: Answer, drawn: int) -> None:
        """The answer's next token, if it may have one: what the tool has to say, or else what was drawn."""
        if answer.limit == 0:
            answer.finish_reason = "length"
            return
        forced = bool(answer.output)
        token = answer.output.popleft() if forced else drawn
        answer.tokens.append(token)
        answer.forced.append(forced)
        if not forced and answer.sampling.tools:
            self._use_tool(answer, token)
        stop = self.default_stop if answer.sampling.stop is None else answer.sampling.stop
        if token in stop and not forced and not answer.output:
            answer.finish_reason = "stop"
        elif len(answer.tokens) == answer.limit:
            answer.finish_reason = "length"
        elif answer.grammar:
            try:
                answer.grammar.advance(token)
            except UserError as error:
                answer.error = error

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
        """Empty a row, of which the prompt cache keeps a copy; as in the cache, the last one moves into its place."""
        answer = self.running[row]
        tokens = (answer.prompt + answer.tokens)[: self.model.lengths[row]]  # which the model has read
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
        num_samples answers to each prompt, those to one prompt next to each other. More than max_batch take turns.
        sampling: one for all prompts, or one for each.
        """
        assert not self.busy, "an engine that serves requests is driven by step() alone"
        samplings = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        answers = []
        try:
            for prompt, its_sampling in zip(prompts, samplings, strict=True):
                answers += self.add(prompt, its_sampling, num_samples, truncate)
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
            advanced = self.step(ahead=True)
            for answer in advanced:
                if answer.error:
                    raise answer.error
            yield advanced

    def clear(self) -> None:
        """End every answer now."""
        self.running, self.reading, self.waiting = [], [], {}
        self.model.clear()
