"""How well a model predicts text: bits per byte, a loss that does not depend on the tokenizer, and exact answers."""
import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from nanochat.distributed import all_reduce_sum, sum_dtype
from nanochat.errors import UserError
from nanochat.tokenizer import Tokenizer


@torch.no_grad()
def evaluate_bpb(model, batches: Iterable, steps: int, token_bytes: np.ndarray) -> float:
    """
    Bits per byte over `steps` batches (inputs, targets, …) on every rank: summed over ranks, then divided.

    token_bytes: (vocab_size,) raw bytes of each token; targets of zero bytes (special tokens) count neither as nats
    nor as bytes. UserError when there are no bytes at all.
    """
    device = next(model.parameters()).device
    bytes_of = torch.from_numpy(token_bytes).to(device)
    total = torch.zeros(2, dtype=sum_dtype(device), device=device)  # nats, bytes
    for _, (inputs, targets, *_) in zip(range(steps), batches):
        nats, target_bytes = counted_nats(model, inputs, targets, bytes_of)
        total += torch.stack((nats.sum(), target_bytes.sum()))
    all_reduce_sum(total)
    nats, count = total.tolist()
    if count == 0:
        raise UserError("nothing to evaluate: the validation tokens stand for zero bytes of text")
    return nats / math.log(2) / count


def counted_nats(model, inputs: Tensor, targets: Tensor, bytes_of: Tensor) -> tuple[Tensor, Tensor]:
    """Nats and bytes of each row, (B,), over targets that stand for at least one byte of text."""
    target_bytes = bytes_of[targets.clamp(min=0)] * (targets >= 0)
    losses = model(inputs, targets, reduction="none") * (target_bytes > 0)  # (B, T)
    return tuple(values.sum(1, dtype=sum_dtype(inputs.device)) for values in (losses, target_bytes))


@torch.no_grad()
def document_nats(model, documents: list[list[int]], token_bytes: np.ndarray, batch_size: int) -> list[tuple[float, int]]:
    """
    (nats, bytes) of each document by itself, cut at the model's longest row. documents: token ids that begin with
    <|bos|>; special tokens count nothing, and neither does the end of the document.
    """
    bytes_of = torch.from_numpy(token_bytes).to(next(model.parameters()).device)
    results: list[tuple[float, int]] = [(0.0, 0)] * len(documents)
    for indices, inputs, targets in padded_batches(model, documents, batch_size):
        nats, counts = counted_nats(model, inputs, targets, bytes_of)
        for index, n, count in zip(indices, nats.tolist(), counts.tolist()):
            results[index] = n, int(count)
    return results


@torch.no_grad()
def greedy_completes(
    model, tokenizer: Tokenizer, pairs: list[tuple[str, str]], batch_size: int
) -> list[bool]:
    """
    Whether greedy decoding of each prompt gives exactly its completion. One forward pass per batch: the tokens are
    those of greedy decoding if and only if each is the most likely one after the expected ones before it.
    """
    bos = tokenizer.get_bos_token_id()
    prompts, wholes = (tokenizer.encode(texts, prepend=bos) for texts in ([p for p, _ in pairs], [p + c for p, c in pairs]))
    assert all(whole[: len(prompt)] == prompt for prompt, whole in zip(prompts, wholes)), "a token spans prompt and completion"
    results = [False] * len(pairs)
    for indices, inputs, targets in padded_batches(model, wholes, batch_size):
        right = model(inputs).argmax(-1) == targets  # (B, T)
        for index, line in zip(indices, right.cpu()):
            # Position i predicts token i + 1.
            # What does not fit into a row was not seen to the end, and is not right.
            fits = len(wholes[index]) <= model.config.sequence_len + 1
            results[index] = fits and bool(line[len(prompts[index]) - 1 : len(wholes[index]) - 1].all())
    return results


def padded_batches(model, sequences: list[list[int]], batch_size: int) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """(indices, inputs, targets): sequences of like length together, padded with targets of −1, cut at the longest row."""
    device, limit = next(model.parameters()).device, model.config.sequence_len + 1
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        length = min(len(sequences[indices[-1]]), limit)
        tokens = torch.full((len(indices), length), -1, dtype=torch.int64)
        for line, index in zip(tokens, indices):
            ids = torch.tensor(sequences[index][:length])
            line[: len(ids)] = ids
        tokens = tokens.to(device)
        yield indices, tokens[:, :-1].clamp(min=0), tokens[:, 1:]


def sample(model, tokenizer: Tokenizer, prompt: str, max_tokens: int, temperature: float = 0.0, seed: int = 0) -> str:
    """The prompt's continuation, up to max_tokens tokens or the end of the document."""
    bos, out = tokenizer.get_bos_token_id(), []
    for token in model.generate(tokenizer.encode(prompt, prepend=bos), max_tokens, temperature=temperature, seed=seed):
        if token == bos:
            break
        out.append(token)
    return tokenizer.decode(out)


