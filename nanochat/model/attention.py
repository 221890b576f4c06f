"""Causal attention: one function, three kernels."""
import functools

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor

from nanochat.runtime.console import print0
from nanochat.runtime.errors import first_line

# Queries per block on a CPU, in rows of up to 512 tokens and in longer ones: enough for the rate of a matrix product,
# and few enough to skip many hidden scores.
QUERY_BLOCKS = 64, 128
# In longer rows the memory of the kept probabilities (B · H · T · T / 2) outweighs the time saved.
BLOCKWISE_MAX_LENGTH = 2048
# From torch 2.12 on, `enable_gqa` must be passed for groups; 2.11 does not need it.
GROUPS_ARE_NAMED = torch.__version__ >= "2.12"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    cu_seqlens: Tensor | None = None,
    doc_start: Tensor | None = None,
) -> Tensor:
    """
    softmax(q kᵀ / √D) v, each query over the last `window` keys, up to and including its own.

    q: (B, T, H, D); k, v: (B, T, H_kv, D) with H a multiple of H_kv: consecutive query heads share a key head.
    Returns (B, T, H, D) in q's dtype. cu_seqlens: see `GPT.forward`; given only if `has_varlen`.
    Otherwise `doc_start` is used, see `document_starts`. No query sees keys before its document.

    A GPU uses FlashAttention, which skips scores outside windows and documents. A CPU uses blocks of queries, two plain
    matrix products each, measured faster than scaled_dot_product_attention, which is the fallback.
    """
    length = q.size(1)
    if cu_seqlens is not None:
        return varlen_attention(q, k, v, window, cu_seqlens)
    if q.device.type == "cpu" and length <= BLOCKWISE_MAX_LENGTH:
        return blockwise_attention(q, k, v, window, doc_start)
    return masked_attention(q, k, v, window, doc_start)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    cu_seqlens: Tensor,
) -> Tensor:
    """`attention` in one call. The row length bounds every document: the host need not know the longest one."""
    from torch.nn.attention.varlen import varlen_attn

    length = q.size(1)
    groups = {"enable_gqa": True} if GROUPS_ARE_NAMED and q.size(2) > k.size(2) else {}
    y = varlen_attn(
        *(heads.flatten(0, 1) for heads in (q, k, v)), cu_seqlens, cu_seqlens, length, length,
        window_size=(window - 1 if window < length else -1, 0), **groups,
    )  # (B · T, H, D)
    return y.view(q.shape)


@functools.cache
def has_varlen(device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> bool:
    """
    Whether `varlen_attention` matches `masked_attention` on this device, tested once: with FlashAttention 4 if it is
    installed (the extra `gpu`), else with torch's FlashAttention 2. Older GPUs and float32 have neither. group: query
    heads per key head; kernels depend on it.
    """
    if device.type != "cuda" or dtype == torch.float32:
        return False
    kernels = torch.nn.attention
    for version in (4, 2):
        try:
            if version == 4:
                kernels.activate_flash_attention_impl("FA4")
            elif kernels.current_flash_attention_impl() is not None:
                kernels.restore_flash_attention_impl()
            error = varlen_error(device, dtype, head_dim, group)
        # Catch any error: there is another kernel.
        except Exception as problem:
            print0(f"not using FlashAttention {version}: {first_line(problem)}")
            continue
        if error < 0.02:
            print0(f"attention: FlashAttention {version}")
            return True
        print0(f"not using FlashAttention {version}: its error is {error:.1%}")
    return False


def varlen_error(device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> float:
    """
    The larger relative error of `varlen_attention` against `masked_attention`: of the result, and of the gradient of
    queries, keys and values together.
    """
    rows, length, window = 2, 320, 80
    # The first pass may be an evaluation, without gradients.
    with torch.inference_mode(False), torch.enable_grad():
        cu_seqlens = torch.tensor([0, 1, 200, length, 2 * length, 2 * length], dtype=torch.int32, device=device)
        drawn = torch.randn(rows, length, 2 * group + 4, head_dim, generator=torch.Generator().manual_seed(0))
        qkv = drawn.to(device, dtype).requires_grad_()
        q, k, v = qkv.split((2 * group, 2, 2), dim=2)
        ours = varlen_attention(q, k, v, window, cu_seqlens)
        exact = masked_attention(q, k, v, window, document_starts(cu_seqlens, rows, length))
        # Any gradient will do, if it differs from number to number.
        gradients = [torch.autograd.grad(y, qkv, q)[0] for y in (ours, exact)]
    return torch.stack([(a - b).norm() / b.norm() for a, b in ((ours, exact), gradients)]).max().item()


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    doc_start: Tensor | None,
) -> Tensor:
    """`attention` by scaled_dot_product_attention, which computes all scores if it gets a mask."""
    length = q.size(1)
    group = q.size(2) // k.size(2)
    # Few kernels take groups with a mask.
    k, v = (heads.repeat_interleave(group, dim=2) for heads in (k, v))
    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # (B, H, T, D)
    mask = None
    if doc_start is not None or window < length:
        mask = visible(0, length, 0, window, q.device, doc_start)  # (T, T) or (B, T, T)
        if doc_start is not None:
            # One mask for all heads.
            mask = mask[:, None]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return y.transpose(1, 2)


def blockwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    doc_start: Tensor | None = None,
) -> Tensor:
    """
    `attention` by blocks of queries. A block reads only the keys from its first query's window, or from the earliest
    document there in any row, to its own end. Softmax in float32.
    """
    B, T, H, D = q.shape
    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # (B, H, T, D)
    k = k.reshape(-1, T, D)                # (N, T, D), N = B · H_kv
    v = v.reshape(-1, T, D)
    q = q.reshape(len(k), -1, T, D)        # (N, G, T, D): the G query heads of each key head
    return BlockwiseAttention.apply(q, k, v, window, doc_start).view(B, H, T, D).transpose(1, 2)


def query_blocks(length: int, window: int, doc_start: Tensor | None = None) -> list[tuple[int, int, int]]:
    """
    (first query, end of queries and keys, first key) of each block. Beginnings of documents are rounded down to a
    multiple of the small block, so that few shapes occur: the first product of each shape is slow.
    """
    small, large = QUERY_BLOCKS
    size = small if length <= 512 else large
    starts = range(0, length, size)
    # Per block, where the document of its first query begins: the earliest of all rows.
    documents = [0] * len(starts) if doc_start is None else doc_start[:, ::size].amin(0).tolist()
    return [
        (start, min(start + size, length), max(start - window, document // small * small, 0))
        for start, document in zip(starts, documents)
    ]


class BlockwiseAttention(torch.autograd.Function):
    """
    q: (N, G, T, D); k, v: (N, T, D). The products also scale, mask and accumulate, so each direction needs only one
    other pass over the scores. Keeps the probabilities for the backward pass, in the inputs' dtype.
    """

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int,
        doc_start: Tensor | None,
    ) -> Tensor:
        N, G, T, D = q.shape
        out = torch.empty_like(q)
        kept = []
        ctx.blocks = query_blocks(T, window, doc_start)
        for start, end, first in ctx.blocks:
            of_queries = None if doc_start is None else doc_start[:, start:end]
            unseen = ~visible(start, end, first, window, q.device, of_queries)  # (rows, keys) or (B, rows, keys)
            bias = q.new_zeros(unseen.shape).masked_fill_(unseen, float("-inf")).view(-1, 1, 1, *unseen.shape[-2:])
            scores = bias.repeat(1, N // len(bias), G, 1, 1).view(N, -1, end - first)  # (N, G · rows, keys)
            rows = q[:, :, start:end].reshape(N, -1, D)                         # (N, G · rows, D)
            # In place: a copy of the masks would cost as much as the softmax.
            p = torch.baddbmm(scores, rows, k[:, first:end].mT, alpha=D**-0.5, out=scores).softmax(-1)
            if any(ctx.needs_input_grad):
                kept.append(p)
            out[:, :, start:end] = torch.bmm(p, v[:, first:end]).view(N, G, -1, D)
        ctx.save_for_backward(q, k, v, *kept)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, *kept = ctx.saved_tensors
        N, G, T, D = q.shape
        grad_q = torch.empty_like(q)
        grad_k = torch.zeros_like(k)
        grad_v = torch.zeros_like(v)
        for (start, end, first), p in zip(ctx.blocks, kept):
            rows = q[:, :, start:end].reshape(N, -1, D)                         # (N, G · rows, D)
            grad_rows = grad[:, :, start:end].reshape(N, -1, D)
            grad_p = torch.bmm(grad_rows, v[:, first:end].mT)                   # (N, G · rows, keys)
            grad_scores = torch._softmax_backward_data(grad_p, p, -1, p.dtype)  # of the scaled scores
            grad_q[:, :, start:end] = torch.bmm(grad_scores, k[:, first:end]).view(N, G, -1, D) * D**-0.5
            # Blocks share keys: their gradients are added in place.
            keys_sum = grad_k[:, first:end]
            values_sum = grad_v[:, first:end]
            torch.baddbmm(keys_sum, grad_scores.mT, rows, alpha=D**-0.5, out=keys_sum)
            torch.baddbmm(values_sum, p.mT, grad_rows, out=values_sum)
        return grad_q, grad_k, grad_v, None, None


def token_before(x: Tensor, doc_start: Tensor | None) -> Tensor:
    """x (B, T, …) shifted by one position: each token gets its predecessor's values; zeros where a document begins."""
    before = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1)
    if doc_start is None:
        return before
    follows = doc_start < torch.arange(x.size(1), device=x.device)  # (B, T)
    return before * follows.view(*follows.shape, *[1] * (x.dim() - 2))


def offset_keys(k: Tensor, doc_start: Tensor | None) -> Tensor:
    """
    Keys (B, T, H, D) whose slow channels (the half that `rotate` turns least) come from the token before, or are zeros
    where a document begins. Then a single layer can find what followed a token's last occurrence. Partial key
    offset: modded-nanogpt, 2025.
    """
    fast, slow = k.unflatten(-1, (2, 2, -1)).unbind(-2)  # (B, T, H, 2, D/4): `rotate` pairs the 2
    before = token_before(slow, doc_start)
    return torch.stack((fast, before), dim=-2).flatten(-3)


def visible(
    start: int,
    end: int,
    first: int,
    window: int,
    device: torch.device,
    doc_start: Tensor | None = None,
) -> Tensor:
    """
    (end − start, end − first) bool: which keys, from `first` on, each of the queries from `start` to `end` sees.
    doc_start (…, end − start): where each query's document begins; then the result is (…, end − start, end − first).
    """
    query = torch.arange(start, end, dtype=torch.int32, device=device)[:, None]
    key = torch.arange(first, end, dtype=torch.int32, device=device)
    seen = (key <= query) & (key > query - window)
    if doc_start is not None:
        seen = seen & (key >= doc_start[..., None])
    return seen


def document_starts(cu_seqlens: Tensor, rows: int, length: int) -> Tensor:
    """cu_seqlens (see `GPT.forward`) → (rows, length): the position in its row where each token's document begins."""
    place = torch.arange(rows * length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    last = torch.searchsorted(cu_seqlens, place, right=True) - 1
    return (cu_seqlens[last] % length).view(rows, length)
