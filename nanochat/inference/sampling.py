"""Sampling tokens: what a request may ask for, and one draw for all rows of a batch at once."""
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanochat.inference.copying import Copying

# Lower temperatures are greedy, because float32 must be able to hold 1 / temperature.
COLDEST = 1e-5
# Tokens that top_p without top_k compares first. On a CPU sorting 16 rows of 65,536 takes 77 ms, choosing 2,048 10 ms.
NUCLEUS = 2048


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, when it ends, and which log-probabilities it gets."""
    max_tokens: int = 256               # at least 1; forced tokens count as well
    temperature: float = 1.0            # 0: always the most probable token
    top_k: int = 0                      # only the k most probable tokens; 0: all
    top_p: float = 1.0                  # then only the most probable tokens that together reach this probability
    seed: int | None = None             # None: another seed every time
    tools: bool = True                  # answer calls: <|python_start|>…<|python_end|>
    logprobs: int | None = None         # log-probabilities of an answer's tokens, and of this many most probable ones


@dataclass
class Sampler:
    """How one answer's next token is chosen."""
    sampling: SamplingParams
    copying: Copying | None = None      # what it copies, and so which tokens it may write
    forbidden: int = -1                 # a token that is not drawn either; -1: none

    def allows(self, token: int) -> bool:
        return token != self.forbidden and (self.copying is None or self.copying.allows(token))

    def candidates(self, vocab_size: int) -> str:
        """Which tokens must be compared, from the cheapest way to the most expensive."""
        if self.sampling.temperature < COLDEST:
            return "best"
        if 0 < self.sampling.top_k < vocab_size:
            return "top_k"
        return "top_p" if self.sampling.top_p < 1 else "all"


def draw(
    logits: Tensor, samplers: Sequence[Sampler], uniforms: Sequence[float], softcap: float | None,
) -> list[int]:
    """
    A token for each row: logits (B, V), float32, before the softcap; uniforms within [0, 1), one for each row;
    softcap: the model's, None or 0 for none.

    A row's token depends only on the row's own logits, sampler and uniform. Rows that compare the same candidates are
    drawn together.
    """
    groups = defaultdict(list)
    for row, sampler in enumerate(samplers):
        groups[sampler.candidates(logits.size(1))].append(row)
    drawn = [0] * len(samplers)
    for kind, rows in groups.items():
        own = [samplers[row] for row in rows]
        part = shifted_softcap(logits[rows], softcap)
        if kind == "best":
            tokens = most_probable(part, own)
        else:
            forbid(part, own)
            tokens = draw_candidates(part, kind, own, [uniforms[row] for row in rows])
        for row, token in zip(rows, tokens):
            drawn[row] = token
    return drawn


def shifted_softcap(logits: Tensor, softcap: float | None) -> Tensor:
    """
    The capped logits but for a constant, which changes no draw: c · tanh(x / c) = 2c · σ(2x / c) − c, and on a CPU a
    sigmoid takes a tenth of tanh's time. Without a cap the largest is 0, so a low temperature makes none infinite.
    """
    if softcap:
        return (logits * (2 / softcap)).sigmoid_().mul_(2 * softcap)
    return logits - logits.amax(-1, keepdim=True)


def forbid(logits: Tensor, samplers: Sequence[Sampler]) -> None:
    """Logits, (B, V), become −inf where a row's sampler does not allow the token."""
    forbidden = np.zeros(tuple(logits.shape), dtype=bool)   # torch takes four times as long
    for row, sampler in enumerate(samplers):
        allowed = sampler.copying.allowed if sampler.copying else None
        if allowed is not None:
            forbidden[row] = True
            forbidden[row, allowed] = False
        if sampler.forbidden >= 0:
            forbidden[row, sampler.forbidden] = True
    if forbidden.any():
        logits.masked_fill_(torch.from_numpy(forbidden).to(logits.device), -math.inf)


def most_probable(logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """
    For each row the first of the largest logits that are allowed. Most answers copy rightly, so checking a token is
    quicker than ruling out all others.
    """
    tokens = logits.argmax(-1).tolist()
    wrong = [row for row, token in enumerate(tokens) if not samplers[row].allows(token)]
    if wrong:
        part = logits[wrong]
        forbid(part, [samplers[row] for row in wrong])
        for row, token in zip(wrong, part.argmax(-1).tolist()):
            tokens[row] = token
    return tokens


def draw_candidates(
    logits: Tensor, kind: str, samplers: Sequence[Sampler], uniforms: Sequence[float],
) -> list[int]:
    """For each row the candidate where the uniform number falls, when the probabilities lie end to end."""
    samplings = [sampler.sampling for sampler in samplers]

    def column(numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, device=logits.device)[:, None]  # (B, 1)

    if kind == "top_k":
        limits = [min(sampling.top_k, logits.size(1)) for sampling in samplings]
        logits, ids = logits.topk(max(limits))  # (B, K), the largest first
        logits.masked_fill_(torch.arange(logits.size(1), device=logits.device) >= column(limits), -math.inf)
    # At infinite temperature a forbidden token's −∞ times 0 would be NaN.
    coldness = column([1 / sampling.temperature for sampling in samplings]).clamp_(min=1e-30)
    p = (logits * coldness).softmax(-1)  # (B, K), or (B, V)
    top_p = column([sampling.top_p for sampling in samplings])
    if kind == "top_p":
        p, ids = largest(p, top_p)
    reached = p.cumsum(-1)
    # The last candidate: with it the sum reaches top_p. Because of rounding the whole sum is not quite 1.
    last = torch.searchsorted(reached, top_p.minimum(reached[:, -1:]))  # (B, 1)
    place = torch.searchsorted(reached, column(uniforms) * reached.gather(1, last), right=True).minimum(last)
    if kind != "all":
        place = ids.gather(1, place)
    return place[:, 0].tolist()


def largest(p: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """
    The largest probabilities of (B, V), in order, and their tokens: enough to reach top_p, (B, 1). A few thousand
    nearly always do, so the rest need not be sorted.
    """
    best = p.topk(min(NUCLEUS, p.size(1)))
    if (best.values.sum(-1, keepdim=True) >= top_p).all():
        return best
    return p.topk(p.size(1))
