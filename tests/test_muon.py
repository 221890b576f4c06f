"""
Optimizers, sharded: the same bits on any ranks, and what they keep, on other ranks. Their rules are in test_zero.py.

Gradients are small integers, the same on every rank: their sums over ranks are exact, so that runs on any ranks and
stages can be compared to the bit.
"""
from pathlib import Path

import pytest
import torch
from ranks import run_on_ranks
from test_zero import Model
from torch import Tensor

from nanochat.corpus.learn_tokenizer import learn_tokenizer
from nanochat.optim.adamw import DistAdamW
from nanochat.optim.ema_nesterov import EMANesterov
from nanochat.optim.muon import DistMuon
from nanochat.optim.zero import shard_model
from nanochat.training.checkpoint import checkpoint_dir, find_checkpoint
from nanochat.training.resharding import load_training_state
from nanochat.training.saving import CheckpointWriter

TOKENIZER = learn_tokenizer(["a few words to learn merges from"], 270)
LR, DECAY, STEPS, HALF, BAD = 0.02, 0.1, 8, 4, 5
CASES = ((0, -1), (2, -1), (3, -1), (1, 1))  # stage and shard_size; with a size of one every rank is a replica
# Two tall matrices of one shape, a wide and a square one: fewer than three ranks can share out evenly. Of five ranks
# some keep nothing of the vectors.
SHAPES = [{"tall": (17, 8), "one": (1,)}, {"tall": (17, 8), "wide": (8, 24)}, {"square": (8, 8), "three": (3,)}]


def gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    """Rows and columns of very different sizes, one of each zero."""
    generator = torch.Generator().manual_seed(1000 * step + sum(name.encode()))
    sizes = [2.0 ** torch.arange(n).remainder(5) * (torch.arange(n) != 2) for n in shape]
    scale = sizes[0] if len(shape) == 1 else torch.outer(*sizes)
    return torch.randint(-3, 4, shape, generator=generator) * scale


class Run:
    """A run that can be saved after a step, and loaded into another on other ranks or another stage."""

    def __init__(self, stage: int, shard_size: int = -1, units: list[dict] = SHAPES, dtype=torch.float32):
        self.model = Model(units, seed=1)
        self.sharding = shard_model(self.model, list(self.model.parts), torch.device("cpu"), dtype, stage, shard_size)
        shards = self.sharding.shards
        names = [name for name, p in Model(units).named_parameters() if p.dim() == 2]
        self.muon = DistMuon(self.sharding, names, LR, DECAY)
        adamw = DistAdamW([{"shards": [s for s in shards if s.name not in names], "lr": LR}], torch.device("cpu"))
        self.optimizers = [self.muon, adamw, EMANesterov(shards, 0.5)]
        self.shapes = {name: p.shape for name, p in Model(units, seed=1).named_parameters()}

    def steps(self, first: int, last: int, bad: int = -1) -> dict[str, Tensor]:
        """The whole parameters after the steps from first to before last."""
        for step in range(first, last):
            wanted = {name: gradient(name, shape, step) for name, shape in self.shapes.items()}
            with self.sharding.accumulate(last=True):
                loss = self.model(wanted)
                loss = loss * float("nan") if step == bad and self.sharding.rank == 0 else loss
                loss.backward()
            stats = self.sharding.reduce_and_clip(loss)
            for optimizer in self.optimizers:
                optimizer.step(stats)
            if step == STEPS - 1:
                optimizer.end_run(0.3, dict.fromkeys(self.shapes, ""))
            self.sharding.all_gather_params()
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.sharding.full_tensors()}

    def writer(self, folder: Path, **settings) -> CheckpointWriter:
        return CheckpointWriter(folder, self.sharding, self.optimizers, TOKENIZER, **settings)

    def load(self, checkpoint: Path) -> None:
        load_training_state(checkpoint, self.sharding, self.optimizers)
        self.sharding.all_gather_params()


def every_case(rank: int, world_size: int, dtype: torch.dtype) -> dict:
    """{(stage, shard size): parameters at the end}, with a bad step; and saved in the middle."""
    results = {}
    for stage, shard_size in CASES:
        run = Run(stage, shard_size, dtype=dtype)
        run.steps(0, HALF)
        if stage == 1:
            run.optimizers[-1].kind = "look_ahead"  # its name in older checkpoints
        writer = run.writer(folder(world_size, stage, shard_size))
        writer.save(HALF, {"config": {}})
        writer.wait()
        results[stage, shard_size] = run.steps(HALF, STEPS, BAD)
    return results


def folder(ranks: int, stage: int, shard_size: int) -> Path:
    return checkpoint_dir("base", f"ranks{ranks}_stage{stage}_size{shard_size}")


def go_on(rank: int, world_size: int, saved_on: int, dtype: torch.dtype) -> dict:
    """From the middle of the runs of every_case: {(stage and shard size then, and now): parameters at the end}."""
    results = {}
    for before, now in zip(CASES, (*CASES[1:], CASES[0])):  # each on another stage
        run = Run(*now, dtype=dtype)
        run.load(find_checkpoint(folder(saved_on, *before)))
        results[before, now] = run.steps(HALF, STEPS, BAD)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_has_the_same_bits_anywhere_and_goes_on_elsewhere(dtype):
    """One, two and three ranks, every stage, replicas; saved on two and three ranks, loaded on five and one."""
    runs = [(n, run_on_ranks(n, every_case, dtype)) for n in (1, 2, 3)]
    alone = runs[0][1][0][0, -1]
    runs += [(n, run_on_ranks(n, go_on, saved_on, dtype)) for saved_on, n in ((2, 5), (3, 1))]
    for n, ranks in runs:
        for whole in ranks:
            for key, params in whole.items():  # a zero row that became NaN would equal nothing
                assert all(torch.equal(t, alone[name]) for name, t in params.items()), f"{key} on {n} ranks"


def one_matrix(rank: int, world_size: int) -> tuple[int, dict[str, Tensor]]:
    run = Run(2, units=[{"tall": (5, 3)}], dtype=torch.bfloat16)
    return len(run.muon.owned["second_moment"]), run.steps(0, 3)


def test_a_rank_that_owns_nothing_keeps_nothing_and_agrees():
    """One matrix on three ranks, in bfloat16: its second moment is float32, and on one rank only."""
    ranks = run_on_ranks(3, one_matrix)
    assert sorted(owned for owned, _ in ranks) == [0, 0, 1]
    for _, whole in ranks:
        assert torch.equal(whole["parts.0.tall"], ranks[0][1]["parts.0.tall"])
