"""
Log-probabilities of tokens in the model's own distribution: log softmax of the capped logits, in float32, before
temperature and anything else that a request changes.
"""
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanochat.model.loss import cap


class TokenLogprob(NamedTuple):
    """A token, its log-probability, and the most probable tokens at its place."""
    token: int
    logprob: float
    top: list[tuple[int, float]]    # (token, log-probability), the most probable first


def token_logprobs(logits: Tensor, tokens: Sequence[int], count: int, softcap: float | None) -> list[TokenLogprob]:
    """For each row of raw logits (N, V): its token and the `count` most probable tokens."""
    logits = cap(logits, softcap)
    if count == 1:
        # Among equal logits the first is the greedy choice; topk may take another.
        top = logits.argmax(-1, keepdim=True)
    else:
        top = logits.topk(count).indices  # (N, count)
    own = torch.tensor(tokens, device=logits.device)[:, None]
    ids = torch.cat((own, top), 1)
    values = logits.gather(1, ids) - logits.logsumexp(-1, keepdim=True)
    result = []
    for row, logprobs in zip(ids.tolist(), values.tolist()):
        pairs = list(zip(row, logprobs))
        result.append(TokenLogprob(*pairs[0], pairs[1:]))
    return result
