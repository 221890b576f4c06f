"""Sharding against torch's own AdamW, plain backward passes and fully_shard alone, on nets with all that is awkward."""
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_on_ranks
from torch import Tensor, nn

from nanochat.corpus.learn_tokenizer import learn_tokenizer
from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import config_from_depth
from nanochat.optim.adamw import DistAdamW
from nanochat.optim.optimizers import setup_optimizers
from nanochat.optim.partition import partition
from nanochat.optim.zero import Sharding
from nanochat.runtime.errors import UserError
from nanochat.training.checkpoint import checkpoint_dir, find_checkpoint
from nanochat.training.resharding import load_training_state
from nanochat.training.saving import CheckpointWriter

TOKENIZER = learn_tokenizer(["a few words to learn merges from"], 270)
CPU, ROWS, STEPS, VOCABULARY, WIDTH = torch.device("cpu"), 12, 5, 11, 6
ADAMW = dict(betas=(0.8, 0.95), eps=1e-8, weight_decay=0.1)


class TiedHead(nn.Module):
    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight, self.bias = weight, nn.Parameter(torch.randn(VOCABULARY) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Net(nn.Module):
    """Tied and frozen weights, biases, a unit without parameters, one that is frozen, a parameter outside of units."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.blocks[0].weight.requires_grad_(False)
        self.blocks[1].requires_grad_(False)
        self.activation = nn.Tanh()
        self.head = TiedHead(self.embedding.weight)

    def units(self) -> list[nn.Module]:
        return [self.embedding, *self.blocks, self.activation, self.head]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = x + self.activation(block(x))
        return F.cross_entropy(self.head(x), (tokens + 1) % VOCABULARY, reduction="sum")


class Branches(nn.Module):
    """Units of one size, of which a micro-batch may take any in any order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def units(self) -> list[nn.Module]:
        return list(self.branches)

    def forward(self, x: Tensor, route: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
        for i in route:
            x = torch.tanh(self.branches[i](x))
        return x.square().sum()


def shard(model: nn.Module, stage: int, dtype: torch.dtype = torch.float32) -> Sharding:
    return Sharding(model, model.units(), CPU, dtype, stage)


def tokens_of(step: int) -> Tensor:
    return torch.randint(VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(step))


def sharded(rank: int, world_size: int, stage: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The whole parameters after five steps of two micro-steps."""
    model = Net().to(dtype)
    sharding = shard(model, stage, dtype)
    assert {s.master.dtype for s in sharding.shards} == {torch.float32}
    optimizer = DistAdamW([{"shards": sharding.shards, "lr": 0.05}], CPU, **ADAMW)
    for step in range(STEPS):
        share = tokens_of(step).chunk(2 * world_size)
        for micro_step in range(2):
            with sharding.accumulate(last=micro_step == 1):
                loss = model(share[2 * rank + micro_step])
                loss.backward()
        optimizer.step(sharding.reduce_and_clip(loss, count=ROWS / world_size))
        sharding.all_gather_params()
    assert model.head.weight is model.embedding.weight
    return {name: tensor.clone() for name, tensor in sharding.whole_tensors()}


def every_stage(rank: int, world_size: int) -> dict:
    dtypes = (torch.float32, torch.bfloat16)
    return {(stage, dtype): sharded(rank, world_size, stage, dtype) for stage in range(4) for dtype in dtypes}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_net_with_tied_frozen_and_biased_parameters_equals_torchs_adamw(world_size):
    """Every stage within two roundings of torch.optim.AdamW on the whole batch; frozen parameters keep their bits."""
    model = Net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.05, **ADAMW)
    for step in range(STEPS):
        (model(tokens_of(step)) / ROWS).backward()
        optimizer.step()
        optimizer.zero_grad()
    start, expected = dict(Net().named_parameters()), dict(model.named_parameters())
    moved = {name for name, p in expected.items() if (p - start[name]).abs().max() > 0.1}
    assert moved == {name for name, p in start.items() if p.requires_grad}, "five steps move what they can move"
    for results in run_on_ranks(world_size, every_stage):
        for (stage, dtype), whole in results.items():
            assert whole.keys() == expected.keys()
            for name, tensor in whole.items():
                if name not in moved:
                    assert torch.equal(tensor, start[name].to(dtype)), f"stage {stage}: {name} is frozen"
                else:  # bfloat16 has 8 bits for values near 1, and gradients carry its noise into the masters
                    limits = dict(atol=2e-7, rtol=2e-7) if dtype == torch.float32 else dict(atol=0.1, rtol=0)
                    message = f"stage {stage}: {name}"
                    torch.testing.assert_close(tensor.float(), expected[name].detach(), **limits, msg=message)


# For each rank the route of each micro-step.
ROUTES = [
    [[[0, 1, 2, 3]], [[0, 2, 3]]],               # one rank skips a unit
    [[[3, 1, 0], [2]], [[0, 1, 2, 3], [1, 3]]],  # other orders, some units in one micro-step only
    [[[0, 1], [1]], [[1, 0], [1]]],              # units that take no part in the last micro-step, or in none
    [[[0, 1, 2, 3]], []],                        # the second rank has no micro-batch
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
            sharding.reduce_and_clip(torch.zeros(()), count=0.5)  # Σ count is 1: sums
            grads = {name: torch.zeros(p.numel()) for name, p in model.named_parameters()}
            for s in sharding.shards:
                grads[s.name][s.start : s.end] = s.grad
            for grad in grads.values() if stage > 0 else ():
                dist.all_reduce(grad)
            results[stage, case] = grads
    return results


def test_gradients_belong_to_their_unit_whatever_order_ranks_complete_them_in():
    """Ranks may skip units, run them in other orders or have no micro-batch: the sum is that of one process."""
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


def skips_a_unit(rank: int, world_size: int) -> None:
    model = Branches()
    with shard(model, stage=3).accumulate(last=True):
        model(torch.ones(2, 4), [0, 1, 2, 3] if rank == 0 else [0, 2, 3]).backward()


def different_start(rank: int, world_size: int) -> None:
    model = Net()
    if rank == 1:
        model.blocks[2].weight.data[5, 5] += 1e-6
    shard(model, stage=1)


def float16(rank: int, world_size: int) -> None:
    shard(Net(), 0, torch.float16)


@pytest.mark.parametrize(("ranks", "mistake", "message"), [
    (2, skips_a_unit, "rank 1 left out unit 1 of 4.*zero_stage=3"),  # different units of one size would be mixed
    (3, different_start, r"rank 1 starts from other weights than rank 0 \(the first is blocks.2.weight\)"),
    (1, float16, "dtype=torch.float16.*float32 or bfloat16"),
])
def test_what_would_train_something_else_is_refused(ranks, mistake, message):
    with pytest.raises(UserError, match=message):
        run_on_ranks(ranks, mistake)


def two_steps(rank: int, world_size: int) -> None:
    """Two calls without `all_gather_params` between them: the second brings its own gradient, on all stages."""
    fresh = Branches()
    fresh(torch.full((2, 4), 2.0)).backward()
    expected = dict(fresh.named_parameters())
    for stage in range(4):
        model = Branches()
        sharding = shard(model, stage)
        for size in (1.0, 2.0):
            with sharding.accumulate(last=True):
                model(torch.full((2, 4), size)).backward()
            sharding.reduce_and_clip(torch.zeros(()))
        for s in sharding.shards:
            torch.testing.assert_close(s.grad, expected[s.name].grad.flatten()[s.start : s.end], msg=f"stage {stage}")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_second_reduction_brings_the_second_gradient(world_size):
    run_on_ranks(world_size, two_steps)


def test_a_unit_that_shares_weights_with_two_others_joins_them():
    a, b, c = Branches().branches[:3]
    c.first, c.second = a.weight, b.weight
    model = nn.ModuleList([a, nn.Linear(2, 2), b, c])
    (both, both_params), (other, _) = partition(model, list(model))
    assert both == [a, b, c] and other == [model[1]]
    assert set(map(id, both_params.values())) == set(map(id, [*a.parameters(), *b.parameters(), *c.parameters()]))


def fully_shard_alone(rank: int, world_size: int) -> float:
    """The largest difference between stage 3 and fully_shard with torch's AdamW, after five steps on halves of rows."""
    from torch.distributed.fsdp import fully_shard

    model, alone = Branches(), Branches()
    for unit in (*alone.branches, alone):
        fully_shard(unit)
    theirs = torch.optim.AdamW(alone.parameters(), 0.05, **ADAMW)
    sharding = shard(model, stage=3)
    ours = DistAdamW([{"shards": sharding.shards, "lr": 0.05}], CPU, **ADAMW)
    for step in range(STEPS):
        x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(step)).chunk(world_size)[rank]
        alone(x).backward()
        theirs.step()
        theirs.zero_grad()
        with sharding.accumulate(last=True):
            loss = model(x)
            loss.backward()
        ours.step(sharding.reduce_and_clip(loss))
        sharding.all_gather_params()
    before, whole = dict(Branches().named_parameters()), dict(sharding.whole_tensors())
    assert all((whole[name] - before[name]).abs().max() > 0.1 for name in whole)
    return max((whole[name] - p.full_tensor()).abs().max().item() for name, p in alone.named_parameters())


def test_stage_3_equals_fully_shard_with_torchs_adamw():
    assert max(run_on_ranks(2, fully_shard_alone)) <= 2e-7


def saved_and_loaded(rank: int, world_size: int) -> None:
    """Save a model with a frozen embedding on one stage, load it on another into other weights: the same bits."""
    for before, after in ((2, 3), (3, 0)):
        shardings = []
        for seed, stage in ((0, before), (1, after)):
            model = GPT(config_from_depth(1, TOKENIZER.get_vocab_size(), 8))
            model.init_weights(seed)
            model.transformer.wte.requires_grad_(False)
            sharding = shard(model, stage, torch.bfloat16)
            shardings.append((sharding, setup_optimizers(model, sharding)))
        (saved, optimizers), (loaded, theirs) = shardings
        writer = CheckpointWriter(checkpoint_dir("base", f"stage{before}"), saved, optimizers, TOKENIZER)
        writer.save(1, {"config": {}, "tokenizer": TOKENIZER.fingerprint})
        writer.wait()
        load_training_state(find_checkpoint(writer.folder), loaded, theirs)
        loaded.all_gather_params()
        wholes = {name: tensor.clone() for name, tensor in saved.whole_tensors()}
        for name, tensor in loaded.whole_tensors():
            assert torch.equal(tensor, wholes[name]), f"{name}, stage {before} to {after}"


def test_frozen_parameters_are_saved_and_loaded_across_stages():
    run_on_ranks(2, saved_and_loaded)
