"""Bits per byte: a loss that does not depend on the tokenizer."""
import math
from collections.abc import Iterable

import numpy as np
import torch

from nanochat.distributed import all_reduce_sum
from nanochat.errors import UserError


@torch.no_grad()
def evaluate_bpb(model, batches: Iterable, steps: int, token_bytes: np.ndarray) -> float:
    """
    Bits per byte over `steps` batches (inputs, targets, …) on every rank: summed over ranks, then divided.

    token_bytes: (vocab_size,) raw bytes of each token; targets of zero bytes (special tokens) count neither as nats
    nor as bytes.
    """
    bytes_of = None
    for _, (inputs, targets, *_) in zip(range(steps), batches):
        if bytes_of is None:
            bytes_of = torch.from_numpy(token_bytes).to(inputs.device)
            total = torch.zeros(2, dtype=torch.float64, device=inputs.device)
        target_bytes = bytes_of[targets.clamp(min=0)] * (targets >= 0)
        losses = model(inputs, targets, reduction="none")  # (B, T)
        total += torch.stack(((losses * (target_bytes > 0)).sum(dtype=torch.float64), target_bytes.sum(dtype=torch.float64)))
    all_reduce_sum(total)
    nats, count = total.tolist()
    if count == 0:
        raise UserError("nothing to evaluate: the validation tokens stand for zero bytes of text")
    return nats / math.log(2) / count


@torch.no_grad()
def document_nats(model, documents: list[list[int]], token_bytes: np.ndarray, batch_size: int) -> list[tuple[float, int]]:
    """
    (nats, bytes) of each document by itself. documents: token ids beginning with <|bos|>; special tokens count
    nothing, and neither does the document's end. Documents of like length share a padded batch.
    """
    device = next(model.parameters()).device
    bytes_of = torch.from_numpy(token_bytes).to(device)
    results: list[tuple[float, int]] = [(0.0, 0)] * len(documents)
    limit = model.config.sequence_len + 1
    order = sorted(range(len(documents)), key=lambda i: len(documents[i]))
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        length = min(len(documents[indices[-1]]), limit)
        tokens = torch.full((len(indices), length), -1, dtype=torch.int64)
        for line, index in zip(tokens, indices):
            ids = torch.tensor(documents[index][:length])
            line[: len(ids)] = ids
        tokens = tokens.to(device)
        inputs, targets = tokens[:, :-1].clamp(min=0), tokens[:, 1:]
        target_bytes = bytes_of[targets.clamp(min=0)] * (targets >= 0)
        nats = (model(inputs, targets, reduction="none") * (target_bytes > 0)).sum(1, dtype=torch.float64)
        for index, n, b in zip(indices, nats.tolist(), target_bytes.sum(1).tolist()):
            results[index] = n, b
    return results


def sample(model, tokenizer, prompt: str, max_tokens: int, temperature: float = 0.0, seed: int = 0) -> str:
    """The prompt's continuation, up to max_tokens tokens or the end of the document."""
    ids = tokenizer.encode(prompt, prepend=tokenizer.get_bos_token_id())
    out: list[int] = []
    for token in model.generate(ids, max_tokens, temperature=temperature, seed=seed):
        if token == tokenizer.get_bos_token_id():
            break
        out.append(token)
    return tokenizer.decode(out)
