"""Drawing tokens: what a request may ask for, and one draw for every row of a batch at once."""
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from nanochat.model.loss import cap

COLDEST = 1e-5  # temperatures below it are greedy


class Grammar(Protocol):
    """The tokens that may come next in one answer. A stop token is allowed exactly when the answer may end."""
    allowed: Tensor     # (V,) bool, on the CPU; at least one is true

    def start(self) -> Self:
        """A copy for an answer of its own."""

    def advance(self, token: int) -> None:
        """The answer got this token, an allowed one. UserError when it is too hard to say what may follow."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, when it ends, and which log-probabilities it gets."""
    max_tokens: int = 256               # forced tokens count as well; 0: only the prompt's log-probabilities
    temperature: float = 1.0            # 0: always the most probable token
    top_k: int | None = None            # only the k most probable tokens; None or 0: all
    top_p: float = 1.0                  # of these, only the most probable ones that together reach this probability
    seed: int | None = None             # None: another one every time
    stop: tuple[int, ...] | None = None  # tokens that end it; None: <|assistant_end|> and <|bos|>
    tools: bool = True                  # compute the expressions between <|python_start|> and <|python_end|>
    presence_penalty: float = 0.0       # these five: see `adjusted`
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what is added to its logit)
    min_p: float = 0.0
    logprobs: int | None = None         # log-probabilities of its tokens, and of this many most probable ones
    prompt_logprobs: int | None = None  # likewise of the prompt's tokens
    grammar: Grammar | None = None      # which tokens may come next; None: any. Not together with tools

    def __post_init__(self):
        fewest = 1 if self.prompt_logprobs is None else 0  # 0: only the prompt's log-probabilities are asked for
        assert self.max_tokens >= fewest and 0 <= self.temperature < math.inf, self
        assert (self.top_k or 0) >= 0 and 0 <= self.top_p <= 1, self
        assert self.repetition_penalty > 0 and 0 <= self.min_p <= 1, self
        assert not (self.grammar and self.tools), "no grammar knows what the tool writes"

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        penalized = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalized or self.logit_bias or self.min_p or self.grammar)

    def candidates(self, vocab_size: int) -> str:
        """Which tokens have to be compared, from the cheapest to the most expensive way."""
        if self.temperature < COLDEST:
            return "best"
        if 0 < (self.top_k or 0) < vocab_size:
            return "top"
        return "sorted" if self.top_p < 1 else "all"


class History(NamedTuple):
    """The tokens of a row so far."""
    prompt: Sequence[int]
    written: Sequence[int]
    allowed: Tensor | None = None   # (V,) bool, the tokens that may come next; None: all


def draw(
    logits: Tensor, samplings: list[SamplingParams], uniforms: list[float], softcap: float | None,
    histories: Sequence[History] = (),
) -> list[int]:
    """
    A token for each row: logits (B, V), float32, before the softcap; uniforms within [0, 1), one for each row;
    softcap: the model's, None or 0 for none; histories: one for each row if any row's logits are adjusted.

    A row's token depends on its own logits, sampling, uniform and history only. Rows that need the same candidates are
    drawn together; the tokens are read from the device once.
    """
    groups = defaultdict(list)
    for row, sampling in enumerate(samplings):
        groups[sampling.candidates(logits.size(1)), sampling.adjusts].append(row)
    order, drawn = [], []
    for (kind, adjusts), rows in groups.items():
        part = logits
        if len(groups) > 1:
            part = logits[rows]
        still_to_cap = softcap
        if adjusts:  # penalties and min_p are defined on capped logits
            capped, still_to_cap = cap(part, softcap), None
            part = torch.stack([adjusted(one, samplings[row], histories[row]) for one, row in zip(capped, rows)])
        order += rows
        if kind == "best":
            drawn.append(most_probable(part, still_to_cap))
        else:
            its_samplings = [samplings[row] for row in rows]
            its_uniforms = [uniforms[row] for row in rows]
            drawn.append(draw_candidates(part, kind, its_samplings, its_uniforms, still_to_cap))
    tokens = dict(zip(order, torch.cat(drawn).tolist()))  # the one read of this step
    return [tokens[row] for row in range(len(samplings))]


def adjusted(logits: Tensor, sampling: SamplingParams, history: History) -> Tensor:
    """
    (V,) → (V,): capped logits as a request changes them before temperature, top-k and top-p. In this order:

        repetition_penalty   r of every token in prompt or answer: logit / r where it is positive, else logit · r
                             (Keskar et al. 2019, arXiv:1909.05858)
        frequency_penalty    subtracted once for each time that the answer has the token
        presence_penalty     subtracted once if the answer has the token
        logit_bias           added
        grammar              tokens that are not allowed become −inf
        min_p                tokens less probable than this share of the most probable one's probability become −inf
    """
    logits = logits.clone()
    index = partial(torch.tensor, dtype=torch.long, device=logits.device)

    if sampling.repetition_penalty != 1:
        seen = index(list({*history.prompt, *history.written}))
        r = sampling.repetition_penalty
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / r, logits[seen] * r)
    if sampling.frequency_penalty or sampling.presence_penalty:
        for token, times in Counter(history.written).items():
            logits[token] -= sampling.frequency_penalty * times + sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    if history.allowed is not None:
        logits[~history.allowed.to(logits.device)] = -math.inf
    if sampling.min_p:
        logits[logits < logits.amax() + sampling.temperature * math.log(sampling.min_p)] = -math.inf
    return logits


def most_probable(logits: Tensor, softcap: float | None) -> Tensor:
    """
    (B, V) → (B,), the first of the largest capped logits. The cap keeps the order, and on a CPU its tanh takes as long
    as a block of the model: it is applied only where logits are so large that it makes different ones equal.
    """
    if softcap and (logits.device.type != "cpu" or logits.amax() > 2 * softcap):
        logits = cap(logits, softcap)
    return logits.argmax(-1)


def draw_candidates(
    logits: Tensor, kind: str, samplings: list[SamplingParams], uniforms: list[float], softcap: float | None
) -> Tensor:
    """(B, V) → (B,): where the uniform number falls among the probabilities of a row's candidates, put end to end."""
    V, device = logits.size(1), logits.device

    def column(numbers: list) -> Tensor:
        return torch.tensor(numbers, device=device)[:, None]  # (B, 1)

    limits = [min(sampling.top_k or V, V) for sampling in samplings]
    if kind == "top":
        logits, ids = logits.topk(max(limits))  # (B, K), the largest first; the cap keeps the order
    elif kind == "sorted":
        logits, ids = logits.sort(descending=True)
    coldness = column([1 / sampling.temperature for sampling in samplings])
    if softcap:
        # c · tanh(x / c) = 2c · σ(2x / c) − c: on a CPU a sigmoid takes a tenth of tanh's time; softmax ignores the −c.
        logits = (logits * (2 / softcap)).sigmoid_()
        coldness *= 2 * softcap
    else:
        logits = logits - logits.amax(-1, keepdim=True)
    coldness.clamp_(min=1e-30)  # at an endless temperature a forbidden token's −∞ times 0 would be NaN
    p = (logits * coldness).softmax(-1)  # (B, K)
    if kind == "all":
        reached = p.cumsum(-1)
        total = reached[:, -1:].contiguous()  # not quite 1, after rounding
        last = torch.searchsorted(reached, total)  # the last token with a probability above 0
        return torch.searchsorted(reached, column(uniforms) * total, right=True).minimum(last)[:, 0]
    p *= torch.arange(p.size(1), device=device) < column(limits)
    reached = p.cumsum(-1)
    top_p = column([sampling.top_p for sampling in samplings]) * reached[:, -1:]
    kept = (reached - p < top_p) & (p > 0)  # the tokens before it fall short of top_p
    last = kept.sum(-1, keepdim=True).clamp_(min=1) - 1  # (B, 1)
    rank = torch.searchsorted(reached, column(uniforms) * reached.gather(1, last), right=True).minimum(last)
    return ids.gather(1, rank)[:, 0]
