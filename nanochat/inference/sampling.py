"""Sampling tokens: what a request may ask for, and one draw for all rows of a batch at once."""
import copy
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanochat.model.loss import cap
from nanochat.runtime.errors import UserError, first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from nanochat.inference.copying import Copying

# Lower temperatures are greedy, because float32 must be able to hold 1 / temperature.
COLDEST = 1e-5
# Tokens that top_p without top_k compares first. On a CPU sorting 16 rows of 65,536 takes 77 ms, choosing 2,048 10 ms.
NUCLEUS = 2048


class Grammar:
    """
    How one answer may continue. allowed: (V,) bool, the tokens that may come next. They include tokens that end the
    answer exactly when the answer is complete.
    """

    def __init__(self, matcher: "LLMatcher", vocab_size: int):
        """UserError if the grammar is wrong or not supported."""
        self.matcher, self.vocab_size = matcher, vocab_size
        self.allowed = self._allowed()

    def start(self) -> "Grammar":
        """A copy, for another answer."""
        other = copy.copy(self)
        other.matcher = self.matcher.deep_copy()
        return other

    def advance(self, token: int) -> None:
        """Add the answer's next token, an allowed one. UserError if finding the next allowed tokens takes too long."""
        self.matcher.consume_token(token)
        self.allowed = self._allowed()

    def _allowed(self) -> np.ndarray:
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        if self.matcher.is_error():
            raise UserError(f"the form of the answer: {first_line(ValueError(self.matcher.get_error()))}")
        return np.unpackbits(bits, count=self.vocab_size, bitorder="little").view(bool)


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, when it ends, and which log-probabilities it gets."""
    max_tokens: int = 256               # forced tokens count as well; 0: only the prompt's log-probabilities
    temperature: float = 1.0            # 0: always the most probable token
    top_k: int = 0                      # only the k most probable tokens; 0: all
    top_p: float = 1.0                  # then only the most probable tokens that together reach this probability
    seed: int | None = None             # None: another seed every time
    stop: tuple[int, ...] | None = None  # tokens that end an answer; None: <|assistant_end|> and <|bos|>
    tools: bool = True                  # answer calls: <|python_start|>…<|python_end|>
    presence_penalty: float = 0.0       # these three: see `add_to_logits`
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what is added to its logit), each token once
    logprobs: int | None = None         # log-probabilities of an answer's tokens, and of this many most probable ones
    prompt_logprobs: int | None = None  # likewise for the prompt's tokens
    grammar: Grammar | None = None      # which tokens may come next; None: any. Not together with tools

    def __post_init__(self):
        assert not (self.grammar and self.tools), "no grammar knows what the tool writes"

    @property
    def adds(self) -> bool:
        """Whether something is added to logits before a token is chosen."""
        return bool(self.presence_penalty or self.frequency_penalty or self.logit_bias)

    def candidates(self, vocab_size: int) -> str:
        """Which tokens must be compared, from the cheapest way to the most expensive."""
        if self.temperature < COLDEST:
            return "best"
        if 0 < self.top_k < vocab_size:
            return "top_k"
        return "top_p" if self.top_p < 1 else "all"


class Adjustment:
    """
    Changes to one answer's logits: its grammar or what it copies, see `forbid`, and what is added to some of them, see
    `add_to_logits`. These values are updated token by token, so a step need not recount the tokens.
    """

    def __init__(self, sampling: SamplingParams, copying: "Copying | None" = None):
        self.sampling = sampling
        self.copying = copying
        self.grammar = sampling.grammar and sampling.grammar.start()
        self.added = dict(sampling.logit_bias)  # by token
        self.written: set[int] = set()

    @property
    def allowed(self) -> np.ndarray | list[int] | None:
        """The tokens that may come next, as (V,) bool or one by one; None: all."""
        limiting = self.grammar or self.copying     # never both: no grammar goes with tools
        return limiting.allowed if limiting else None

    @property
    def is_limited(self) -> bool:
        """Whether some tokens may not come next."""
        return self.grammar is not None or self.copying is not None and self.copying.copy is not None

    def add(self, token: int) -> None:
        """Add the answer's next token."""
        if self.copying:
            self.copying.add(token)
        if not self.sampling.adds:
            return
        penalty = self.sampling.frequency_penalty
        if token not in self.written:
            penalty += self.sampling.presence_penalty
        self.written.add(token)
        if penalty:
            self.added[token] = self.added.get(token, 0) - penalty


def draw(
    logits: Tensor, samplings: Sequence[SamplingParams], uniforms: Sequence[float], softcap: float | None,
    adjustments: Sequence[Adjustment | None] = (),
) -> list[int]:
    """
    A token for each row: logits (B, V), float32, before the softcap; uniforms within [0, 1), one for each row;
    softcap: the model's, None or 0 for none; adjustments: one for each row, if any row's logits are adjusted.

    A row's token depends only on the row's own logits, sampling, uniform and answer. Rows that compare the same
    candidates are drawn together.
    """
    groups = defaultdict(list)
    to_check: list[int] = []
    for row, sampling in enumerate(samplings):
        kind = sampling.candidates(logits.size(1))
        adjustment = adjustments[row] if adjustments else None
        limited = adjustment is not None and adjustment.is_limited
        if limited and kind == "best" and adjustment.copying and not sampling.adds:
            # Such a row mostly copies rightly, so checking its token is quicker than ruling out all others.
            to_check.append(row)
            limited = False
        groups[kind, sampling.adds, limited].append(row)
    tokens = torch.empty(len(samplings), dtype=torch.long, device=logits.device)
    for (kind, adds, limited), rows in groups.items():
        part = logits[rows]     # a copy
        still_to_cap = softcap
        if adds:
            # Penalties are defined on capped logits.
            part = cap(part, softcap)
            still_to_cap = None
            add_to_logits(part, [adjustments[row] for row in rows])
        if limited:
            forbid(part, [adjustments[row] for row in rows])
        if kind == "best":
            tokens[rows] = most_probable(part, still_to_cap)
        else:
            settings, numbers = [samplings[row] for row in rows], [uniforms[row] for row in rows]
            tokens[rows] = draw_candidates(part, kind, settings, numbers, still_to_cap)
    # The host waits for the device here, once per step, and once more if greedy rows copied wrongly.
    drawn = tokens.tolist()
    wrong = [row for row in to_check if not adjustments[row].copying.allows(drawn[row])]
    if wrong:
        part = logits[wrong]
        forbid(part, [adjustments[row] for row in wrong])
        for row, token in zip(wrong, most_probable(part, softcap).tolist()):
            drawn[row] = token
    return drawn


def add_to_logits(logits: Tensor, adjustments: Sequence[Adjustment]) -> None:
    """
    Add to capped logits, (B, V), what requests ask for, before temperature, top-k and top-p; all rows at once:

        frequency_penalty    subtracted once for each time that the answer has the token
        presence_penalty     subtracted once if the answer has the token
        logit_bias           added
    """
    places, values = [], []
    for row, one in enumerate(adjustments):
        places.append(np.fromiter(one.added, np.int64) + row * logits.size(1))
        values.append(np.fromiter(one.added.values(), np.float32))
    # One copy to the device for all rows; the limits on logit_bias and max_tokens bound it. No place occurs twice,
    # so the sum does not depend on the order.
    index, added = (torch.from_numpy(np.concatenate(parts)).to(logits.device) for parts in (places, values))
    logits.view(-1).index_add_(0, index, added)


def forbid(logits: Tensor, adjustments: Sequence[Adjustment]) -> None:
    """Logits, (B, V), become −inf where a row's grammar, or what it copies, does not allow the token."""
    forbidden = np.zeros(tuple(logits.shape), dtype=bool)   # torch takes four times as long
    for row, one in enumerate(adjustments):
        allowed = one.allowed
        if allowed is not None:
            forbidden[row] = True
            forbidden[row, allowed] = False
    logits.masked_fill_(torch.from_numpy(forbidden).to(logits.device), -math.inf)


def most_probable(logits: Tensor, softcap: float | None) -> Tensor:
    """
    (B, V) → (B,), the first of the largest capped logits. The cap keeps the order, and on a CPU its tanh takes as long
    as a block of the model. So it is applied only to rows whose largest logit is beyond twice the cap, positive or
    negative: there the cap makes different logits equal. Elsewhere only last digits could become equal.
    """
    if softcap:
        large = logits.amax(-1, keepdim=True).abs() > 2 * softcap   # (B, 1)
        if logits.device.type != "cpu" or large.any():
            capped = cap(logits, softcap).masked_fill(logits == -math.inf, -math.inf)
            logits = torch.where(large, capped, logits)
    return logits.argmax(-1)


def draw_candidates(
    logits: Tensor, kind: str, samplings: Sequence[SamplingParams], uniforms: Sequence[float], softcap: float | None
) -> Tensor:
    """(B, V) → (B,): the candidate where the uniform number falls, when a row's probabilities lie end to end."""
    device = logits.device

    def column(numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, device=device)[:, None]  # (B, 1)

    if kind == "top_k":
        limits = [min(sampling.top_k, logits.size(1)) for sampling in samplings]
        logits, ids = logits.topk(max(limits))  # (B, K), the largest first; the cap keeps the order
    coldness = column([1 / sampling.temperature for sampling in samplings])
    if softcap:
        # c · tanh(x / c) = 2c · σ(2x / c) − c: on a CPU a sigmoid takes a tenth of tanh's time; softmax ignores the −c.
        forbidden = logits == -math.inf
        logits = (logits * (2 / softcap)).sigmoid_().masked_fill_(forbidden, -math.inf)
        coldness *= 2 * softcap
    else:
        logits = logits - logits.amax(-1, keepdim=True)
    # At infinite temperature a forbidden token's −∞ times 0 would be NaN.
    coldness.clamp_(min=1e-30)
    p = (logits * coldness).softmax(-1)  # (B, K), or (B, V)
    top_p = column([sampling.top_p for sampling in samplings])
    if kind == "top_k":
        p *= torch.arange(p.size(1), device=device) < column(limits)
        top_p *= p.sum(-1, keepdim=True)
    elif kind == "top_p":
        p, ids = largest(p, top_p)

    reached = p.cumsum(-1)
    if kind == "all":
        # The last token with a probability above 0; because of rounding the sum is not quite 1.
        last = torch.searchsorted(reached, reached[:, -1:].contiguous())  # (B, 1)
    else:
        # A token is kept while the tokens before it fall short of top_p.
        kept = (reached - p < top_p) & (p > 0)
        last = kept.sum(-1, keepdim=True).clamp_(min=1) - 1
    place = torch.searchsorted(reached, column(uniforms) * reached.gather(1, last), right=True).minimum(last)
    return place[:, 0] if kind == "all" else ids.gather(1, place)[:, 0]


def largest(p: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """
    The largest probabilities of (B, V), in order, and their tokens: at least enough to reach top_p, (B, 1).
    A few thousand nearly always do, so a CPU does not sort the rest. A GPU sorts all, because checking the sum would
    make the host wait.
    """
    count = NUCLEUS if p.device.type == "cpu" else p.size(1)
    while count < p.size(1):
        # Skip the search if the distribution is too flat for this many tokens to reach top_p.
        if (count * p.amax(-1, keepdim=True) >= top_p).all():
            best = p.topk(count)
            if (best.values.sum(-1, keepdim=True) >= top_p).all():
                return best
        count *= 8
    return p.topk(p.size(1))
