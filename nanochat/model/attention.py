"""Causal attention: one function, several kernels, one plain reference."""
import contextlib
import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

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
    with kernels():
        if window < q.size(2):  # few kernels take groups with a mask; on an A100 none but the one that keeps all scores
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible(0, q.size(2), 0, window, q.device))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1)


def kernels() -> contextlib.AbstractContextManager:
    """
    All of torch's kernels for training. Where lengths change from pass to pass, which is eagerly and without gradients,
    all but cuDNN's: torch prefers it on an H100, where it takes 0.2 to 0.5 s to plan for each new shape.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


@functools.cache
def window_blocks(length: int, window: int, device: torch.device):
    """FlexAttention's list of the blocks of keys that each block of queries sees. None where it is not used."""
    if device.type != "cuda" or window >= length:
        return None
    from torch.nn.attention.flex_attention import create_block_mask  # imports the compiler

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - window)

    with torch.inference_mode(False):  # the same list serves training, which takes no tensors of inference mode
        return create_block_mask(seen, None, None, length, length, device=device)


def blockwise_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """
    The same by blocks of queries, each against the keys between its first query's window and its own end only: nearly
    half of the score matrix is never computed, and much less of it with a short window. Softmax in float32.
    """
    B, H, T, D = q.shape
    k, v = k.reshape(-1, T, D), v.reshape(-1, T, D)
    return BlockwiseAttention.apply(q.reshape(len(k), -1, T, D), k, v, window).view(B, H, T, D)


def query_blocks(length: int, window: int) -> list[tuple[int, int, int]]:
    """(first query, end of queries and keys, first key) of each block."""
    size = QUERY_BLOCK if window >= length else WINDOW_BLOCK
    return [(start, min(start + size, length), max(start - window, 0)) for start in range(0, length, size)]


class BlockwiseAttention(torch.autograd.Function):
    """
    q: (N, G, T, D); k, v: (N, T, D). Products do what they can: they scale, mask and add up; between them is one pass
    each way. What is kept for the backward pass are the probabilities in the inputs' dtype.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        N, G, T, D = q.shape
        out, kept = torch.empty_like(q), []
        for start, end, first in query_blocks(T, window):
            unseen = ~visible(start, end, first, window, q.device)              # (rows, keys)
            bias = q.new_zeros(unseen.shape).masked_fill_(unseen, float("-inf")).repeat(G, 1)
            rows = q[:, :, start:end].reshape(N, -1, D)                         # (N, G * rows, D)
            scores = torch.baddbmm(bias.expand(N, -1, -1), rows, k[:, first:end].mT, alpha=D**-0.5)
            p = scores.softmax(-1)
            kept += [p] if any(ctx.needs_input_grad) else []
            out[:, :, start:end] = torch.bmm(p, v[:, first:end]).view(N, G, -1, D)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.window = window
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, *kept = ctx.saved_tensors
        N, G, T, D = q.shape
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for (start, end, first), p in zip(query_blocks(T, ctx.window), kept):
            rows, grad_rows = (x[:, :, start:end].reshape(N, -1, D) for x in (q, grad))
            keys_sum, values_sum = grad_k[:, first:end], grad_v[:, first:end]
            grad_p = torch.bmm(grad_rows, v[:, first:end].mT)
            grad_scores = torch._softmax_backward_data(grad_p, p, -1, p.dtype).mul_(D**-0.5)
            grad_q[:, :, start:end] = torch.bmm(grad_scores, k[:, first:end]).view(N, G, -1, D)
            torch.baddbmm(keys_sum, grad_scores.mT, rows, out=keys_sum)
            torch.baddbmm(values_sum, p.mT, grad_rows, out=values_sum)
        return grad_q, grad_k, grad_v, None


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
