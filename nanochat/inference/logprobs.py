"""
Log-probabilities of tokens: of the model's own distribution, log softmax of the capped logits, in float32, before
temperature, penalties and whatever else a request changes about the choice.
"""
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanochat.model.loss import cap


class TokenLogprob(NamedTuple):
    """A token, its log-probability, and the most probable ones at its place; None for a token that nothing predicts."""
    token: int
    logprob: float | None
    top: list[tuple[int, float]]    # (token, log-probability), the most probable first


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], counts: Sequence[int], softcap: float | None
) -> list[TokenLogprob]:
    """
    Of one token for each row of raw logits (N, V); counts: how many of the row's most probable ones are told. The first
    of them is the greedy choice where only one is asked for, of several that are equal as well. Read from the device
    once.
    """
    logits, most = cap(logits, softcap), min(max(counts), logits.size(1))
    tops = logits.argmax(-1, keepdim=True) if most == 1 else logits.topk(most).indices  # (N, most)
    ids = torch.cat((torch.tensor(tokens, device=logits.device)[:, None], tops), 1)
    values = logits.gather(1, ids) - logits.logsumexp(-1, keepdim=True)
    both = torch.stack((ids.float(), values)).tolist()  # exact below 2²⁴; Apple GPUs have no float64
    rows = [[(int(token), value) for token, value in zip(*row)] for row in zip(*both)]
    return [TokenLogprob(*own, top[:count]) for (own, *top), count in zip(rows, counts)]
