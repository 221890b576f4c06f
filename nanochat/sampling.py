"""Drawing tokens: what a request may ask for, and one draw for every row of a batch at once."""
import math
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from nanochat.loss import cap

COLDEST = 1e-5  # temperatures below it are greedy


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends."""
    max_tokens: int = 256               # forced tokens count as well
    temperature: float = 1.0            # 0: always the most probable token
    top_k: int | None = None            # only the k most probable tokens; None or 0: all
    top_p: float = 1.0                  # of these, only the most probable ones that together reach this probability
    seed: int | None = None             # None: another one every time
    stop: tuple[int, ...] | None = None  # tokens that end it; None: <|assistant_end|> and <|bos|>
    tools: bool = True                  # compute what stands between <|python_start|> and <|python_end|>

    def __post_init__(self):
        assert self.max_tokens >= 1 and 0 <= self.temperature < math.inf, self
        assert (self.top_k or 0) >= 0 and 0 <= self.top_p <= 1, self

    def candidates(self, vocab_size: int) -> str:
        """Which tokens have to be looked at, from the cheapest to the dearest way of choosing."""
        if self.temperature < COLDEST:
            return "best"
        if 0 < (self.top_k or 0) < vocab_size:
            return "top"
        return "sorted" if self.top_p < 1 else "all"


def draw(logits: Tensor, samplings: list[SamplingParams], uniforms: list[float], softcap: float | None) -> list[int]:
    """
    A token for each row: logits (B, V), float32, before the softcap; uniforms within [0, 1), one for each row;
    softcap: the model's, None or 0 for none.

    A row's token depends on its own logits, sampling and uniform only. Rows that need the same candidates are drawn
    together; the tokens are read from the device once.
    """
    groups = defaultdict(list)
    for row, sampling in enumerate(samplings):
        groups[sampling.candidates(logits.size(1))].append(row)
    tokens = []
    for kind, rows in groups.items():
        part = logits if len(rows) == len(samplings) else logits[rows]
        if kind == "best":
            tokens.append(most_probable(part, softcap))
        else:
            its_samplings, its_uniforms = [samplings[row] for row in rows], [uniforms[row] for row in rows]
            tokens.append(draw_candidates(part, kind, its_samplings, its_uniforms, softcap))
    order = [row for rows in groups.values() for row in rows]
    drawn = dict(zip(order, torch.cat(tokens).tolist()))  # the one read of this step
    return [drawn[row] for row in range(len(samplings))]


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
    logits = (logits * (2 / softcap)).sigmoid_() if softcap else logits - logits.amax(-1, keepdim=True)
    p = (logits * scale).softmax(-1)  # (B, K)
    if kind == "all":
        reached = p.cumsum(-1)
        return torch.searchsorted(reached, column(uniforms) * reached[:, -1:], right=True).clamp_(max=V - 1)[:, 0]
    p *= torch.arange(p.size(1), device=device) < column(limits)
    reached = p.cumsum(-1)
    top_p = column([sampling.top_p for sampling in samplings]) * reached[:, -1:]
    kept = reached - p < top_p  # those before it fall short of top_p
    last = kept.sum(-1, keepdim=True).clamp_(min=1) - 1  # (B, 1)
    rank = torch.searchsorted(reached, column(uniforms) * reached.gather(1, last), right=True).minimum(last)
    return ids.gather(1, rank)[:, 0]
