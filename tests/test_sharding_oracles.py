"""Sharding against plain backward passes, on units that a micro-batch may take in any order."""
import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch import Tensor, nn

from nanochat.optim.sharding import Sharding, partition
from nanochat.optim.zero import shard_model
from nanochat.runtime.errors import UserError


class Branches(nn.Module):
    """Units of one size; a micro-batch may take any of them in any order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, route: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
        for i in route:
            x = torch.tanh(self.branches[i](x))
        return x.square().sum()


def shard(model: Branches, zero_stage: int) -> Sharding:
    return shard_model(model, list(model.branches), torch.device("cpu"), torch.float32, zero_stage)


# For each rank the route of each micro-step.
ROUTES = [
    [[[0, 1, 2, 3]], [[0, 2, 3]]],               # one rank skips a unit
    [[[3, 1, 0], [2]], [[0, 1, 2, 3], [1, 3]]],  # other orders, some units in one micro-step only
    [[[0, 1], [1]], [[1, 0], [1]]],              # units that take no part in the last micro-step, or in none
]


def routed(rank: int, world_size: int) -> dict:
    """The summed gradient of each parameter, for each stage and case: this rank's part of it, zeros elsewhere."""
    results = {}
    for stage in range(3):
        for case, routes in enumerate(ROUTES):
            model = Branches()
            sharding = shard(model, stage)
            for micro_step, route in enumerate(routes[rank]):
                with sharding.accumulate(last=micro_step == len(routes[rank]) - 1):
                    model(torch.full((2, 4), 1.0 + rank), route).backward()
            sharding.reduce_and_clip(torch.zeros(()), weight=0.5)  # Σ weight is 1: sums
            grads = {name: torch.zeros(p.numel()) for name, p in model.named_parameters()}
            for s in sharding.shards:
                grads[s.name][s.start : s.end] = s.grad
            if stage > 0:
                for grad in grads.values():
                    dist.all_reduce(grad)
            results[stage, case] = grads
    return results


def test_gradients_belong_to_their_unit_in_any_order_in_which_ranks_complete_them():
    """Ranks may skip units or run them in other orders: the sum is that of one process."""
    expected = []
    for routes in ROUTES:
        model = Branches()
        for rank, own in enumerate(routes):
            for route in own:
                model(torch.full((2, 4), 1.0 + rank), route).backward()
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
        expected.append({name: grad.flatten() for name, grad in grads.items()})
    for results in run_on_ranks(2, routed):
        for (stage, case), grads in results.items():
            torch.testing.assert_close(grads, expected[case], rtol=1e-6, atol=1e-6, msg=f"stage {stage}, case {case}")


def different_start(rank: int, world_size: int) -> None:
    model = Branches()
    if rank == 1:
        model.branches[2].weight.data[3, 3] += 1e-6
    shard(model, 1)


def test_ranks_that_start_from_different_weights_are_refused():
    with pytest.raises(UserError, match="rank 1 .*branches.2.weight"):
        run_on_ranks(3, different_start)


def test_what_sharding_cannot_do_is_refused():
    """Nothing is trained that should not be, nothing is summed twice, and no step ends without its last micro-step."""
    tied, frozen, whole = (Branches() for _ in range(3))
    tied.branches[3].weight = tied.branches[0].weight
    frozen.branches[1].bias.requires_grad_(False)
    for model in (tied, frozen):
        with pytest.raises(AssertionError):
            shard(model, 1)
    tied.branches[3].bias = tied.branches[0].bias
    with pytest.raises(AssertionError):
        partition(tied, [tied.branches[i] for i in (0, 1, 3)])  # two are twice in units, two in none
    sharding = shard(whole, 1)
    with sharding.accumulate(last=False):
        whole(torch.ones(2, 4)).backward()
    with pytest.raises(AssertionError):
        sharding.reduce_and_clip(torch.zeros(()))
