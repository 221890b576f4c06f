"""
Tensor and sequence parallelism: a block of the real model cut over the ranks, and ways to get that wrong.
Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198. bench.parallel makes a table of it.
"""
import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.sent import Kept, Sent
from nanochat.model.gpt import Block, Positions, Streams, norm, rotary_angles
from nanochat.model.gpt_config import GPTConfig
from nanochat.runtime.collectives import all_gather_single, gather_objects, rank_and_size, reduce_scatter

T, C = 256, 128  # positions of a row, and channels
CONFIG = GPTConfig(T, 512, 1, C, n_head=8, n_kv_head=4, value_embeddings=True, key_offset=True, stream_scales=True)


class Travel(torch.autograd.Function):
    """there(x) in the forward pass, back(gradient) in the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, there: Callable, back: Callable) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.back(grad), None, None


def all_reduce(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def all_gather(x: Tensor) -> Tensor:
    """This rank's positions (1, T/N, C) → those of all (1, T, C)."""
    whole = x.new_empty(1, T, C)
    all_gather_single(whole[0], x[0])
    return whole


def scatter_sums(x: Tensor) -> Tensor:
    """(1, T, C) → this rank's positions of its sum over the ranks, (1, T/N, C)."""
    own = x.new_empty(1, T // dist.get_world_size(), C)
    reduce_scatter(own.view(-1), x.view(-1)).wait()
    return own


# Operations (forward, backward) on entering the layers that are cut, and on leaving them.
TENSOR = (torch.clone, all_reduce), (all_reduce, torch.clone)
SEQUENCE = (all_gather, scatter_sums), (scatter_sums, all_gather)
STREAM = "tensor: every rank adds the stream before the sum"
VARIANTS = {
    "tensor": TENSOR,
    "sequence": SEQUENCE,
    "tensor: gradients of what enters are not summed": ((torch.clone, torch.clone), TENSOR[1]),
    "tensor: gradients of what leaves are summed as well": (TENSOR[0], (all_reduce, all_reduce)),
    STREAM: TENSOR,
    "sequence: gradients of what every rank has whole are not summed": SEQUENCE,
}


def cut_block(block: Block, variant: str) -> None:
    """This rank computes 1/N of the block's heads, and of its MLP's channels."""
    rank, ranks = rank_and_size()
    for name, p in block.named_parameters():
        if p.dim() == 2:  # output matrices are cut by inputs, the table by columns, all others by outputs
            p.data = p.data.chunk(ranks, int(name.endswith(("c_proj.weight", "values.weight"))))[rank]
    attn = block.attn
    entering, leaving = VARIANTS[variant]

    def before_attention(x, cos, sin):
        normed = Travel.apply(norm(x), *entering)
        return normed, *attn.heads(normed, cos, sin)

    def after_attention(x, y):
        y = attn.output(y)  # (1, T, C/N) → (1, T, C), a summand on each rank
        x = Travel.apply(x + y, *leaving) if variant == STREAM else x + Travel.apply(y, *leaving)
        y = block.mlp(Travel.apply(norm(x), *entering))
        return x + Travel.apply(y, *leaving)

    attn.before_attention = before_attention  # the model's own lack only Travel
    block.after_attention = after_attention


def measure(variant: str) -> list[float]:
    def on_ranks(block, x):
        cut_block(block, variant)
        return on_one(block, x)

    rank, ranks = rank_and_size()
    here = torch.arange(T)
    if VARIANTS[variant] is SEQUENCE:  # outside the layers that are cut a rank has only its own positions
        here = here.chunk(ranks)[rank]
    sent = 4 * 2 * (ranks - 1) / ranks * 4 * T * C  # four all-reduces
    return compare(Block(CONFIG, 0), on_one, on_ranks, here, sent, summed=variant == "sequence")


# ---- Shared with context.py

COLUMNS = "output off", "gradients off", "sent", "formula", "kept by one rank", "kept"
ANGLES = rotary_angles(T, CONFIG.head_dim, CONFIG.rope_theta, torch.device("cpu"))


def on_one(block: Block, x: Tensor) -> Tensor:
    return block(Streams(x, x, x), torch.arange(T)[None], Positions(*ANGLES))


def compare(
    module: nn.Module,
    on_one: Callable,
    on_ranks: Callable,
    here: Tensor,
    sent: float,
    summed: bool = True,
) -> list[float]:
    """
    The COLUMNS, each of the rank where it is largest. Distances from one rank's output and gradients are relative; the
    furthest gradient counts. here: this rank's positions; sent: bytes by the formula; summed: gradients of whole
    parameters are summed over the ranks first.
    """
    rank, ranks = rank_and_size()
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters():
        p.data.normal_(0, 0.1, generator=generator)  # a new block's output matrices are zeros, and would hide the rest
    alone = copy.deepcopy(module)
    x, grad = (torch.randn(1, T, C, generator=generator) for _ in range(2))
    watch, kept, kept_alone = Sent(), Kept(), Kept()
    with kept_alone:
        right = on_one(alone, x.requires_grad_())
        right.backward(grad)
    with watch, kept:
        y = on_ranks(module, x[:, here])
        y.backward(grad[:, here])
    off = []
    for p, whole in zip(module.parameters(), alone.parameters()):
        cut = [dim for dim in range(p.dim()) if p.size(dim) < whole.size(dim)]
        found = torch.zeros_like(p) if p.grad is None else p.grad
        if summed and not cut:
            found = all_reduce(found)
        off.append(distance(found, whole.grad.chunk(ranks, cut[0])[rank] if cut else whole.grad))
    sizes = round(watch.sent), round(sent), kept_alone.bytes(alone), kept.bytes(module)
    return [max(column) for column in zip(*gather_objects([distance(y, right[:, here]), max(off), *sizes]))]


def distance(x: Tensor, right: Tensor) -> float:
    return (torch.dist(x, right) / right.norm()).item()
