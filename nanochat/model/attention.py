"""Causal attention: one function, several kernels."""
import contextlib
import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# Queries per block on a CPU: enough rows for the full rate of a matrix product, and few enough that half of the
# scores are never computed.
QUERY_BLOCK = 256
# The same where a window leaves out most keys: larger blocks would compute scores that the window hides.
WINDOW_BLOCK = 128
# In longer rows the probabilities that the backward pass keeps (B · H · T · T / 2) outweigh the time saved.
BLOCKWISE_MAX_LENGTH = 2048


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    blocks=None,
    begins: Tensor | None = None,
) -> Tensor:
    """
    softmax(q kᵀ / √D) v over the last `window` keys at or before each query, its own included.

    q: (B, H, T, D); k, v: (B, H_kv, T, D) with H a multiple of H_kv: consecutive query heads share a key head.
    Returns (B, H, T, D) in q's dtype. blocks: what `window_blocks` gave for T and the window. begins: see
    `document_begins`; no query sees a key before its document.

    On a CPU: blocks of queries, two plain matrix products each, measured faster than scaled_dot_product_attention. On a
    GPU: that function, which computes all scores; for windows in compiled code FlexAttention instead. Documents are
    apart in short rows, where computing all scores costs little.
    """
    length = q.size(2)
    group = q.size(1) // k.size(1)
    if q.device.type == "cpu" and length <= BLOCKWISE_MAX_LENGTH:
        return blockwise_attention(q, k, v, window, begins)
    if begins is None and blocks is not None and torch.compiler.is_compiling():
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(q, k, v, block_mask=blocks, enable_gqa=group > 1)
    with kernels():
        if begins is None and window >= length:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1)
        # Few kernels take groups with a mask; on an A100 only the one that keeps all scores does.
        k = k.repeat_interleave(group, dim=1)  # (B, H, T, D)
        v = v.repeat_interleave(group, dim=1)
        mask = visible(0, length, 0, window, q.device, begins)  # (T, T) or (B, T, T)
        if begins is not None:
            # The same for every head.
            mask = mask[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def kernels() -> contextlib.AbstractContextManager:
    """
    All of torch's kernels for training; all but cuDNN's for eager passes without gradients, whose lengths change: torch
    prefers cuDNN on an H100, where it plans 0.2 to 0.5 s for each new shape.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


@functools.cache
def window_blocks(length: int, window: int, device: torch.device):
    """
    FlexAttention's list of the blocks of keys that each block of queries sees; None where it is not used. Cached, as
    every layer would otherwise be compiled for a list of its own. Never run on a GPU.
    """
    if device.type != "cuda" or window >= length:
        return None
    # Here, because it imports the compiler.
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(
        batch: Tensor,
        head: Tensor,
        query: Tensor,
        key: Tensor,
    ) -> Tensor:
        return (key <= query) & (key > query - window)

    # The same list serves training, which takes no tensors of inference mode.
    with torch.inference_mode(False):
        return create_block_mask(seen, None, None, length, length, device=device)


def blockwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    begins: Tensor | None = None,
) -> Tensor:
    """
    The same by blocks of queries, each against the keys between its first query's window and its own end only: nearly
    half of the score matrix is never computed, and much less of it with a short window. Softmax in float32.
    """
    B, H, T, D = q.shape
    k = k.reshape(-1, T, D)                # (N, T, D), N = B · H_kv
    v = v.reshape(-1, T, D)
    q = q.reshape(len(k), -1, T, D)        # (N, G, T, D): the G query heads of each key head
    return BlockwiseAttention.apply(q, k, v, window, begins).view(B, H, T, D)


def query_blocks(length: int, window: int) -> list[tuple[int, int, int]]:
    """(first query, end of queries and keys, first key) of each block."""
    size = QUERY_BLOCK if window >= length else WINDOW_BLOCK
    return [(start, min(start + size, length), max(start - window, 0)) for start in range(0, length, size)]


class BlockwiseAttention(torch.autograd.Function):
    """
    q: (N, G, T, D); k, v: (N, T, D). The products also scale, mask and add up, so between them there is only one pass
    over the scores each way. Kept for the backward pass: the probabilities, in the inputs' dtype.
    """

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int,
        begins: Tensor | None,
    ) -> Tensor:
        N, G, T, D = q.shape
        out = torch.empty_like(q)
        kept = []
        for start, end, first in query_blocks(T, window):
            of_queries = None if begins is None else begins[:, start:end]
            unseen = ~visible(start, end, first, window, q.device, of_queries)  # (rows, keys) or (B, rows, keys)
            bias = q.new_zeros(unseen.shape).masked_fill_(unseen, float("-inf"))
            if begins is None:
                bias = bias.repeat(G, 1).expand(N, -1, -1)                      # (N, G · rows, keys)
            else:
                bias = bias.repeat(1, G, 1).repeat_interleave(N // len(begins), dim=0)
            rows = q[:, :, start:end].reshape(N, -1, D)                         # (N, G · rows, D)
            scores = torch.baddbmm(bias, rows, k[:, first:end].mT, alpha=D**-0.5)
            p = scores.softmax(-1)
            if any(ctx.needs_input_grad):
                kept.append(p)
            out[:, :, start:end] = torch.bmm(p, v[:, first:end]).view(N, G, -1, D)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.window = window
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, *kept = ctx.saved_tensors
        N, G, T, D = q.shape
        grad_q = torch.empty_like(q)
        grad_k = torch.zeros_like(k)
        grad_v = torch.zeros_like(v)
        for (start, end, first), p in zip(query_blocks(T, ctx.window), kept):
            rows = q[:, :, start:end].reshape(N, -1, D)                         # (N, G · rows, D)
            grad_rows = grad[:, :, start:end].reshape(N, -1, D)
            grad_p = torch.bmm(grad_rows, v[:, first:end].mT)                   # (N, G · rows, keys)
            grad_scores = torch._softmax_backward_data(grad_p, p, -1, p.dtype).mul_(D**-0.5)
            grad_q[:, :, start:end] = torch.bmm(grad_scores, k[:, first:end]).view(N, G, -1, D)
            # Blocks share keys: their gradients are added in place.
            keys_sum = grad_k[:, first:end]
            values_sum = grad_v[:, first:end]
            torch.baddbmm(keys_sum, grad_scores.mT, rows, out=keys_sum)
            torch.baddbmm(values_sum, p.mT, grad_rows, out=values_sum)
        return grad_q, grad_k, grad_v, None, None


def offset_keys(k: Tensor, begins: Tensor | None) -> Tensor:
    """
    Keys (B, H, T, D) whose slow channels (the half that `rotate` turns least) come from the token before, or are zeros
    where a document begins. Then one layer can find what followed a token the last time. Partial key offset:
    modded-nanogpt, 2025.
    """
    fast, slow = k.unflatten(-1, (2, 2, -1)).unbind(-2)  # (B, H, T, 2, D/4): `rotate` pairs the 2
    before = F.pad(slow[:, :, :-1], (0, 0, 0, 0, 1, 0))
    if begins is not None:
        follows = begins < torch.arange(k.size(2), device=k.device)  # (B, T)
        before = before * follows[:, None, :, None, None]
    return torch.stack((fast, before), dim=-2).flatten(-3)


def visible(
    start: int,
    end: int,
    first: int,
    window: int,
    device: torch.device,
    begins: Tensor | None = None,
) -> Tensor:
    """
    (end − start, end − first) bool: which keys, from `first` on, each of the queries from `start` to `end` sees.
    begins (…, end − start): the position where each query's document begins; (…, end − start, end − first) then.
    """
    query = torch.arange(start, end, device=device)[:, None]
    key = torch.arange(first, end, device=device)
    seen = (key <= query) & (key > query - window)
    if begins is not None:
        seen = seen & (key >= begins[..., None])
    return seen


def document_begins(tokens: Tensor, document_token: int) -> Tensor:
    """tokens (B, T) → (B, T): the position of the last document_token at or before each, 0 where there is none."""
    position = torch.arange(tokens.size(1), device=tokens.device)
    return torch.where(tokens == document_token, position, 0).cummax(1).values
