"""Importing it gives torch's varlen_attn kernels for a CPU: by the definition, one sequence after the other."""
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention.varlen import _varlen_attn, _varlen_attn_backward


def sequences(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, window: list[int]) -> Iterator[tuple]:
    """
    Of each sequence its place, and queries, keys, values and probabilities by head in float64. q (N, H, D), k, v
    (N, H_kv, D), end to end; cu_seqlens as in varlen_attn; window: keys to the left and right, −1: all.
    """
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens[0] == 0 and cu_seqlens[-1] == len(q)
    left, right = (len(q) if keys < 0 else keys for keys in window)
    k, v = (heads.repeat_interleave(q.size(1) // heads.size(1), dim=1) for heads in (k, v))
    for begin, end in itertools.pairwise(cu_seqlens.tolist()):
        assert 0 <= end - begin <= longest, "kernels start as many blocks as the longest needs"
        own = [heads[begin:end].double().transpose(0, 1) for heads in (q, k, v)]
        distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        unseen = (distance > left) | (distance < -right)
        scores = own[0] @ own[1].mT / q.size(-1) ** 0.5
        yield slice(begin, end), *own, scores.masked_fill(unseen, -torch.inf).softmax(-1)


@_varlen_attn.register_kernel("cpu")
def forward(q, k, v, cu_seqlens, cu_seqlens_k, longest, longest_keys, causal, scale, window, groups=False):
    assert torch.equal(cu_seqlens, cu_seqlens_k) and longest == longest_keys and scale is None
    assert causal == (window == [-1, 0])
    out = torch.empty_like(q)
    for place, _, _, values, p in sequences(q, k, v, cu_seqlens, longest, window):
        out[place] = (p @ values).transpose(0, 1)
    return out, torch.zeros(q.size(1), len(q)), torch.zeros(2, dtype=torch.uint64)


@_varlen_attn_backward.register_kernel("cpu")
def backward(grad, q, k, v, out, lse, cu_seqlens, cu_seqlens_k, longest, longest_keys, causal, rng, scale, window):
    grads = [torch.zeros(q.shape, dtype=torch.float64) for _ in range(3)]
    for place, queries, keys, values, p in sequences(q, k, v, cu_seqlens, longest, window):
        upstream = grad[place].double().transpose(0, 1)
        by_p = upstream @ values.mT
        by_scores = p * (by_p - (by_p * p).sum(-1, keepdim=True)) / q.size(-1) ** 0.5
        for of, own in zip(grads, (by_scores @ keys, by_scores.mT @ queries, p.mT @ upstream)):
            of[place] = own.transpose(0, 1)
    return tuple(of.unflatten(1, (x.size(1), -1)).sum(2).to(x.dtype) for of, x in zip(grads, (q, k, v)))
