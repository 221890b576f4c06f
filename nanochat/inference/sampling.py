"""Drawing tokens: what a request may ask for, and one draw for every row of a batch at once."""
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from nanochat.model.loss import cap

COLDEST = 1e-5  # temperatures below it are greedy


class Grammar(Protocol):
    """
    What an answer may still become. allowed: (V,) bool, on the CPU: the tokens that may come next, at least one; a stop
    token is among them exactly when the answer may end.
    """
    allowed: Tensor

    def start(self) -> Self:
        """A copy for an answer of its own."""

    def advance(self, token: int) -> None:
        """The answer has one token more, an allowed one. UserError when it cannot be found out what may follow."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, when it ends, and what is told about them."""
    max_tokens: int = 256               # forced tokens count as well; 0: only the prompt's log-probabilities
    temperature: float = 1.0            # 0: always the most probable token
    top_k: int | None = None            # only the k most probable tokens; None or 0: all
    top_p: float = 1.0                  # of these, only the most probable ones that together reach this probability
    seed: int | None = None             # None: another one every time
    stop: tuple[int, ...] | None = None  # tokens that end it; None: <|assistant_end|> and <|bos|>
    tools: bool = True                  # compute what stands between <|python_start|> and <|python_end|>
    presence_penalty: float = 0.0       # see `adjusted`, these five
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what is added to its logit)
    min_p: float = 0.0
    logprobs: int | None = None         # tell log-probabilities, and those of so many most probable tokens
    prompt_logprobs: int | None = None  # likewise of the prompt's tokens
    grammar: Grammar | None = None      # which tokens may come next; None: any. It excludes tools

    def __post_init__(self):
        assert self.max_tokens >= (self.prompt_logprobs is None) and 0 <= self.temperature < math.inf, self
        assert (self.top_k or 0) >= 0 and 0 <= self.top_p <= 1, self
        assert self.repetition_penalty > 0 and 0 <= self.min_p <= 1, self
        assert not (self.grammar and self.tools), "no grammar knows what the tool writes"

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        penalized = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalized or self.logit_bias or self.min_p or self.grammar)

    def candidates(self, vocab_size: int) -> str:
        """Which tokens have to be looked at, from the cheapest to the dearest way of choosing."""
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
    tokens = []
    for (kind, adjusts), rows in groups.items():
        part, cap_left = logits if len(rows) == len(samplings) else logits[rows], softcap
        if adjusts:
            part, cap_left = cap(part, softcap), None
            part = torch.stack([adjusted(part[i], samplings[row], histories[row]) for i, row in enumerate(rows)])
        if kind == "best":
            tokens.append(most_probable(part, cap_left))
        else:
            its_samplings, its_uniforms = [samplings[row] for row in rows], [uniforms[row] for row in rows]
            tokens.append(draw_candidates(part, kind, its_samplings, its_uniforms, cap_left))
    order = [row for rows in groups.values() for row in rows]
    drawn = dict(zip(order, torch.cat(tokens).tolist()))  # the one read of this step
    return [drawn[row] for row in range(len(samplings))]


def adjusted(logits: Tensor, sampling: SamplingParams, history: History) -> Tensor:
    """
    (V,) → (V,): capped logits as a request changes them before temperature, top-k and top-p. In this order:

        repetition_penalty   r of every token in prompt or answer: logit / r where it is positive, else logit · r
                             (Keskar et al. 2019, arXiv:1909.05858)
        frequency_penalty    subtracted as many times as the answer has the token; presence_penalty: once if it has it
        logit_bias           added
        grammar              tokens that are not allowed become −inf
        min_p                tokens less probable than this share of the most probable one's probability become −inf
    """
    logits = logits.clone()

    def ids(tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.long, device=logits.device)

    if sampling.repetition_penalty != 1:
        seen, r = ids([*{*history.prompt, *history.written}]), sampling.repetition_penalty
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / r, logits[seen] * r)
    if history.written and (sampling.frequency_penalty or sampling.presence_penalty):
        tokens, counts = zip(*Counter(history.written).items())
        times = torch.tensor(counts, dtype=logits.dtype, device=logits.device)
        logits[ids(tokens)] -= sampling.frequency_penalty * times + sampling.presence_penalty
    if sampling.logit_bias:
        tokens, bias = zip(*sampling.logit_bias)
        logits[ids(tokens)] += torch.tensor(bias, dtype=logits.dtype, device=logits.device)
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
    # c · tanh(x / c) = 2c · σ(2x / c) − c: on a CPU a sigmoid takes a tenth of tanh's time, and softmax ignores the −c.
    scale = column([(2 * softcap if softcap else 1) / sampling.temperature for sampling in samplings])
    scale.clamp_(min=1e-30)  # of an endless temperature: −∞, what a grammar forbids, times 0 would be NaN
    logits = (logits * (2 / softcap)).sigmoid_() if softcap else logits - logits.amax(-1, keepdim=True)
    p = (logits * scale).softmax(-1)  # (B, K)
    if kind == "all":
        reached = p.cumsum(-1)
        last = torch.searchsorted(reached, reached[:, -1:].contiguous())  # of those that are possible
        return torch.searchsorted(reached, column(uniforms) * reached[:, -1:], right=True).minimum(last)[:, 0]
    p *= torch.arange(p.size(1), device=device) < column(limits)
    reached = p.cumsum(-1)
    top_p = column([sampling.top_p for sampling in samplings]) * reached[:, -1:]
    kept = (reached - p < top_p) & (p > 0)  # those before it fall short of top_p
    last = kept.sum(-1, keepdim=True).clamp_(min=1) - 1  # (B, 1)
    rank = torch.searchsorted(reached, column(uniforms) * reached.gather(1, last), right=True).minimum(last)
    return ids.gather(1, rank)[:, 0]
