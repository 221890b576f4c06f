"""
Context parallelism: attention in a ring of ranks that each have 1/N of a row's positions, and ways to get that
wrong. Liu et al. 2023, arXiv:2310.01889. bench.parallel makes a table of it.
"""
import torch
import torch.distributed as dist
from torch import Tensor

from bench.tensor import ANGLES, C, T, compare, on_one
from nanochat.model.gpt import Block
from nanochat.model.gpt_config import GPTConfig
from nanochat.runtime.collectives import rank_and_size

CONFIG = GPTConfig(T, 64, 1, C, n_head=8, n_kv_head=4)
VARIANTS = ("two chunks a rank", "one chunk a rank", "earlier pieces are not rescaled", "causal by local positions",
            "rotated by local positions", "gradients of keys and values stop a rank early")


def positions(rank: int, ranks: int, variant: str) -> Tensor:
    """A rank's positions, (T/N,). Of two chunks one is early and one late: all ranks compute the same amount."""
    chunks = torch.arange(T).chunk(2 * ranks)
    if variant == "one chunk a rank":
        return torch.cat(chunks[2 * rank : 2 * rank + 2])
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def scores(q: Tensor, k: Tensor, step: int, variant: str) -> Tensor:
    """(…, T/N, T/N): this rank's queries times the keys that are here in a step of the ring."""
    rank, ranks = rank_and_size()
    source = rank if "causal" in variant else (rank - step) % ranks  # the keys' owner
    unseen = positions(rank, ranks, variant)[:, None] < positions(source, ranks, variant)
    return (q @ k.mT * q.size(-1) ** -0.5).masked_fill(unseen, float("-inf"))


def send_on(x: Tensor) -> Tensor:
    """Send to the next rank; returns what the previous rank sends."""
    rank, ranks = rank_and_size()
    received = torch.empty_like(x)
    sending = dist.isend(x, (rank + 1) % ranks)
    dist.recv(received, (rank - 1) % ranks)
    sending.wait()
    return received


class Ring(torch.autograd.Function):
    """
    Queries (H_kv, G, T/N, D) stay where they are; keys and values (2, H_kv, 1, T/N, D) go round. A rank keeps its own,
    its output and log Σ exp(score). In the backward pass keys and values go round again, with their gradients.
    """

    @staticmethod
    def forward(ctx, q: Tensor, kv: Tensor, variant: str) -> Tensor:
        here = kv
        out = torch.zeros_like(q)
        total = torch.full_like(q[..., :1], float("-inf"))  # log Σ exp(score) of the keys that have been here
        for step in range(dist.get_world_size()):
            if step:
                here = send_on(here)
            s = scores(q, here[0], step, variant)
            new = total.logaddexp(s.logsumexp(-1, keepdim=True))
            if "rescaled" not in variant:
                out *= (total - new).exp()
            out += (s - new).exp() @ here[1]
            total = new
        ctx.save_for_backward(q, kv, out, total)
        ctx.variant = variant
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, kv, out, total = ctx.saved_tensors
        grad_q = torch.zeros_like(q)
        grad_kv = torch.zeros_like(kv)
        along = (grad * out).sum(-1, keepdim=True)
        for step in range(dist.get_world_size()):
            if step:
                kv = send_on(kv)
                grad_kv = send_on(grad_kv)
            p = (scores(q, kv[0], step, ctx.variant) - total).exp()
            grad_s = p * (grad @ kv[1].mT - along) * q.size(-1) ** -0.5
            grad_q += grad_s @ kv[0]
            grad_kv += torch.stack((grad_s.mT @ q, p.mT @ grad)).sum(2, keepdim=True)  # over a key head's G heads
        if "early" not in ctx.variant:
            grad_kv = send_on(grad_kv)  # home
        return grad_q, grad_kv, None


def measure(variant: str) -> list[float]:
    rank, ranks = rank_and_size()
    here = positions(rank, ranks, variant)
    cos, sin = (angle[: len(here)] if "rotated" in variant else angle[here] for angle in ANGLES)

    def on_ranks(block, x):
        _, q, k, v = block.attn.before_attention(x, cos, sin)               # (1, T/N, H or H_kv, D)
        q = q[0].transpose(0, 1).unflatten(0, (CONFIG.n_kv_head, -1))       # (H_kv, G, T/N, D)
        kv = torch.cat((k, v)).transpose(1, 2)[:, :, None].contiguous()     # (2, H_kv, 1, T/N, D)
        y = Ring.apply(q, kv, variant).flatten(0, 1).transpose(0, 1)        # (T/N, H, D)
        return block.after_attention(x, y.reshape(x.shape))

    # Keys and values travel N − 1 times in each pass, their gradients N times.
    sent = (3 * ranks - 2) * 2 * len(here) * CONFIG.n_kv_head * CONFIG.head_dim * 4
    return compare(Block(CONFIG, 0), on_one, on_ranks, here, sent)
