"""Causal attention: one function, several kernels, one plain reference."""
import functools

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_BLOCK = 256           # rows of the score matrix per block on a CPU: large enough for a full GEMM rate
WINDOW_BLOCK = 128          # the same where a window leaves out most keys
BLOCKWISE_MAX_LENGTH = 2048  # above it the kept probabilities (B*H*T*T/2) outweigh what the blocks save


def attention(q: Tensor, k: Tensor, v: Tensor, window: int, blocks=None) -> Tensor:
    """
    softmax(q kᵀ / √D) v over the last `window` keys at or before each query, its own included.

    q: (B, H, T, D); k, v: (B, H_kv, T, D) with H a multiple of H_kv: consecutive query heads share a key head.
    Returns (B, H, T, D) in q's dtype. blocks: what `window_blocks` gave for T and the window.

    The kernel follows from the device: scaled_dot_product_attention on a GPU, but for windows in compiled code, where
    it would compute all scores, FlexAttention; on a CPU, where that kernel is slower than two plain matrix products
    (measured in docs/decisions.md), blocks of queries.
    """
    if q.device.type == "cpu" and q.size(2) <= BLOCKWISE_MAX_LENGTH:
        return blockwise_attention(q, k, v, window)
    group = q.size(1) // k.size(1)
    if blocks is not None and torch.compiler.is_compiling():
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(q, k, v, block_mask=blocks, enable_gqa=group > 1)
    if window < q.size(2):  # few kernels take groups with a mask; on an A100 none but the one that keeps all scores
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible(0, q.size(2), 0, window, q.device))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1)


@functools.cache
def window_blocks(length: int, window: int, device: torch.device):
    """FlexAttention's list of the blocks of keys that each block of queries sees. None where it is not used."""
    if device.type != "cuda" or window >= length:
        return None
    from torch.nn.attention.flex_attention import create_block_mask  # imports the compiler

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - window)

    return create_block_mask(seen, None, None, length, length, device=device)


def blockwise_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """
    The same by blocks of queries, each against the keys between its first query's window and its own end only: nearly
    half of the score matrix is never computed, and much less of it with a short window. Scores and softmax in float32.
    """
    B, H, T, D = q.shape
    H_kv = k.size(1)
    q = q.view(B, H_kv, H // H_kv, T, D) * D**-0.5
    outputs, size = [], QUERY_BLOCK if window >= T else WINDOW_BLOCK
    for start in range(0, T, size):
        first, end = max(start - window, 0), min(start + size, T)
        rows = q[:, :, :, start:end].reshape(B, H_kv, -1, D)                # (B, H_kv, G * rows, D)
        scores = (rows @ k[:, :, first:end].mT).view(B, H_kv, -1, end - start, end - first).float()
        unseen = ~visible(start, end, first, window, q.device)              # (rows, keys)
        p = scores.masked_fill(unseen, float("-inf")).softmax(-1).to(v.dtype)
        outputs.append((p.view(B, H_kv, -1, end - first) @ v[:, :, first:end]).view(B, H_kv, -1, end - start, D))
    return torch.cat(outputs, dim=3).reshape(B, H, T, D)


def visible(start: int, end: int, first: int, window: int, device: torch.device) -> Tensor:
    """(end − start, end − first) bool: which keys, from `first` on, each of the queries from `start` to `end` sees."""
    query = torch.arange(start, end, device=device)[:, None]
    key = torch.arange(first, end, device=device)
    return (key <= query) & (key > query - window)


def reference_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """The definition, in float32, with every key head repeated: slow, and what the kernels are held to."""
    group = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(group, dim=1).float(), v.repeat_interleave(group, dim=1).float()
    scores = q.float() @ k.mT / q.size(-1) ** 0.5                           # (B, H, T, T)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
    unseen = ~seen.tril() | seen.tril(-window)
    return (scores.masked_fill(unseen, float("-inf")).softmax(-1) @ v).to(q.dtype)
