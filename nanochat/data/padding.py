"""Rows of different lengths as one padded batch: for conversations, rollouts and evaluations."""
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# On a GPU every kind of block is compiled for each length, so only these lengths and max_seq_len exist.
GPU_LENGTHS = (256, 1024)
# On a CPU one compilation serves all lengths. A multiple of this keeps vector instructions full.
CPU_MULTIPLE = 8

# A row: tokens, and the weight of each token as a target.
WeightedTokens = tuple[list[int] | np.ndarray, list[float] | np.ndarray]


def padded_batch(
    rows: Sequence[WeightedTokens], batch_size: int, length: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """
    (inputs, targets, weights), each (batch_size, length), of rows of at most length + 1 tokens; int64, int64, float32.
    Targets are one position ahead, −1 where the weight is zero. Missing rows are empty: every rank takes part in every
    step, even if all its rows are empty.
    """
    tokens = torch.zeros(batch_size, length + 1, dtype=torch.int64)
    weights = torch.zeros(batch_size, length + 1)
    for i, (ids, row_weights) in enumerate(rows):
        tokens[i, : len(ids)] = torch.as_tensor(ids)
        weights[i, : len(ids)] = torch.as_tensor(row_weights)
    targets = tokens[:, 1:].masked_fill(weights[:, 1:] == 0, -1)
    inputs, targets, weights = (
        on_device(part.contiguous(), device) for part in (tokens[:, :-1], targets, weights[:, 1:]))
    return inputs, targets, weights


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; on a CPU the tensor itself."""
    # From pinned memory the copy does not wait for work queued on the device.
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=tensor.is_pinned())


def padded_length(longest: int, max_seq_len: int, device: torch.device) -> int:
    """The length to which rows of at most `longest` tokens are padded; at most max_seq_len."""
    # The last token is a target only.
    needed = max(longest - 1, 1)
    if device.type == "cpu":
        length = math.ceil(needed / CPU_MULTIPLE) * CPU_MULTIPLE
    else:
        length = next((length for length in GPU_LENGTHS if length >= needed), max_seq_len)
    return min(length, max_seq_len)
