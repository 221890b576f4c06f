"""
Log-probabilities of tokens: of the model's own distribution, log softmax of the capped logits, in float32, before
temperature, penalties and whatever else a request changes about the choice.
"""
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanochat.gpt import GPT
from nanochat.loss import cap

CHUNK = 256     # positions of a prompt whose logits exist at once


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
    both = torch.stack((ids.double(), values.double())).tolist()
    rows = [[(int(token), value) for token, value in zip(*row)] for row in zip(*both)]
    return [TokenLogprob(*own, top[:count]) for (own, *top), count in zip(rows, counts)]


@torch.inference_mode()
def prompt_logprobs(model: GPT, prompt: Sequence[int], count: int) -> tuple[list[TokenLogprob], Tensor]:
    """The prompt's tokens, from one pass of the plain model, and the raw logits after the last one, (1, V) float32."""
    hidden = model.hidden(torch.tensor([prompt], device=model.lm_head.weight.device))[0]    # (T, C)
    read = [TokenLogprob(prompt[0], None, [])]

    def logits(x: Tensor) -> Tensor:
        return (x @ model.lm_head.weight.T)[:, : model.config.vocab_size].float()

    for start in range(0, len(prompt) - 1, CHUNK):
        tokens = prompt[start + 1 : start + 1 + CHUNK]
        rows = hidden[start : start + len(tokens)]
        read += token_logprobs(logits(rows), tokens, [count] * len(tokens), model.config.softcap)
    return read, logits(hidden[-1:])
