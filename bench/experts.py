"""
Expert parallelism: a mixture whose ranks have different experts and different tokens, and ways to get that wrong.
Lepikhin et al. 2020, arXiv:2006.16668; Fedus et al. 2021, arXiv:2101.03961. bench.parallel makes a table of it.
"""
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.tensor import C, T, Travel, compare
from nanochat.model.products import SquaredReLU
from nanochat.runtime.collectives import rank_and_size

EXPERTS, TOP = 8, 2  # all experts; experts per token
VARIANTS = ("two all-to-alls", "what comes back is not put back in order", "the router's weights are left out",
            "what exceeds an expert's even share is dropped")


def route(mixture: nn.ParameterDict, x: Tensor) -> tuple[Tensor, Tensor]:
    """x (1, t, C) → each token's experts and their weights, (t, TOP)."""
    weights, experts = (x[0] @ mixture["router"]).softmax(-1).topk(TOP)
    return experts, weights


def expert(mixture: nn.ParameterDict, e: int, x: Tensor) -> Tensor:
    """The model's MLP."""
    return SquaredReLU.apply(x @ mixture["c_fc"][e]) @ mixture["c_proj"][e]


def on_one(mixture: nn.ParameterDict, x: Tensor) -> Tensor:
    """Every expert computes every token."""
    weights = torch.zeros(T, EXPERTS).scatter(1, *route(mixture, x))
    return sum(weights[:, e, None] * expert(mixture, e, x) for e in range(EXPERTS))


def exchange(rows: Tensor, to: list[int], coming: list[int]) -> Tensor:
    """Send rows in the order of experts: `to` go to each rank, `coming` come from each. Gradients travel back."""
    def all_to_all(rows, to, coming):
        received = rows.new_empty(sum(coming), C)
        dist.all_to_all_single(received, rows.contiguous(), coming, to)
        return received

    return Travel.apply(rows, lambda x: all_to_all(x, to, coming), lambda grad: all_to_all(grad, coming, to))


def measure(variant: str) -> list[float]:
    rank, ranks = rank_and_size()
    here = EXPERTS // ranks  # experts of a rank

    def on_ranks(mixture, x):
        for name in ("c_fc", "c_proj"):
            mixture[name].data = mixture[name].data.chunk(ranks)[rank]
        experts, weights = route(mixture, x)
        order = experts.flatten().argsort(stable=True)              # (token, expert) pairs by expert, so by rank, too
        counts = experts.flatten().bincount(minlength=EXPERTS)
        if "dropped" in variant:
            share = len(order) // EXPERTS
            order = torch.cat([pairs[:share] for pairs in order.split(counts.tolist())])
            counts = counts.clamp(max=share)
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts)                      # from each rank, for each expert here
        sizes = [count.view(ranks, here).sum(1).tolist() for count in (counts, coming)]

        rows = exchange(x[0, order // TOP], *sizes)                 # by the rank they come from, then by expert
        parts = enumerate(rows.split(coming.tolist()))
        done = exchange(torch.cat([expert(mixture, i % here, part) for i, part in parts]), *sizes[::-1])

        y = x.new_zeros(x.size(1) * TOP, C)
        y[order.sort().values if "order" in variant else order] = done
        y = y.view(1, -1, TOP, C)
        return y.mean(2) if "left out" in variant else (y * weights[..., None]).sum(2)

    mixture = nn.ParameterDict({"router": torch.empty(C, EXPERTS), "c_fc": torch.empty(EXPERTS, C, 4 * C),
                                "c_proj": torch.empty(EXPERTS, 4 * C, C)})
    # Rows go there and back, and so do gradients, if all experts get equally many.
    sent = 4 * (ranks - 1) / ranks * TOP * T / ranks * C * 4
    return compare(mixture, on_one, on_ranks, torch.arange(T).chunk(ranks)[rank], sent)
