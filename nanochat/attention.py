"""Causal attention: one function, several kernels, one plain reference."""
import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_BLOCK = 256           # rows of the score matrix per block on a CPU: large enough for a full GEMM rate
BLOCKWISE_MAX_LENGTH = 2048  # above it the kept probabilities (B*H*T*T/2) outweigh what the blocks save


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """
    softmax(q kᵀ / √D) v over the keys at or before each query.

    q: (B, H, T, D); k, v: (B, H_kv, T, D) with H a multiple of H_kv: consecutive query heads share a key head.
    Returns (B, H, T, D) in q's dtype.

    The kernel follows from the device: scaled_dot_product_attention on a GPU; on a CPU, where that kernel is slower
    than two plain matrix products (measured in docs/decisions.md), blocks of queries.
    """
    if q.device.type == "cpu" and q.size(2) <= BLOCKWISE_MAX_LENGTH:
        return blockwise_attention(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1))


def blockwise_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """
    The same by blocks of queries, each against the keys up to its own end only: nearly half of the score matrix
    is never computed, and only the square on the diagonal needs a mask. Scores and softmax in float32.
    """
    B, H, T, D = q.shape
    H_kv = k.size(1)
    q = q.view(B, H_kv, H // H_kv, T, D) * D**-0.5
    outputs = []
    for start in range(0, T, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, T)
        rows = q[:, :, :, start:end].reshape(B, H_kv, -1, D)                # (B, H_kv, G * rows, D)
        scores = (rows @ k[:, :, :end].mT).view(B, H_kv, -1, end - start, end).float()
        position = torch.arange(end, device=q.device)
        future = position[None, :] > position[start:end, None]              # (rows, end)
        p = scores.masked_fill(future, float("-inf")).softmax(-1).to(v.dtype)
        outputs.append((p.view(B, H_kv, -1, end) @ v[:, :, :end]).view(B, H_kv, -1, end - start, D))
    return torch.cat(outputs, dim=3).reshape(B, H, T, D)


def reference_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition, in float32, with every key head repeated: slow, and what the kernels are held to."""
    group = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(group, dim=1).float(), v.repeat_interleave(group, dim=1).float()
    scores = q.float() @ k.mT / q.size(-1) ** 0.5                           # (B, H, T, T)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(future, float("-inf")).softmax(-1) @ v).to(q.dtype)
