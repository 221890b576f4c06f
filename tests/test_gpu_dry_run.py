"""What a rank of a GPU node sends and keeps, on the meta device; stage 3, which that cannot run: test_zero_bench."""
import pytest
import torch
from dry_step import META, PHASES, DryStep, dry_step
from torch.overrides import TorchFunctionMode

from bench.machines import Layout, rank_bytes
from nanochat.model.gpt_config import config_from_depth
from nanochat.plan.memory import counted, step_bytes

pytestmark = pytest.mark.filterwarnings("ignore:Set timeout is now only")  # of a fake process group
CONFIG = config_from_depth(2, 65536, 2048, arch="modern")  # four units


class NumbersSent(TorchFunctionMode):
    """Python's numbers that become tensors on the device: a copy, for which the host waits until the device is idle."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor) and made.device == META:
            self.found.append(func)
        return made


@pytest.fixture(scope="module")
def eight_ranks() -> DryStep:
    return dry_step(8, CONFIG, 16, stage=2, micro_steps=2)


def test_the_host_never_waits_for_the_device(eight_ranks):
    """Reading a tensor of the meta device raises; copies from the host are looked for."""
    with NumbersSent() as numbers:
        count = dry_step(1, CONFIG, 1, stage=2, micro_steps=2)
    assert count.copies == eight_ranks.copies == numbers.found == []


def test_collectives_of_a_step_are_those_of_the_documentation(eight_ranks):
    """
    docs/zero.md: units' gradients while the backward pass of each micro-step runs, on stage 1 of the last one; six
    numbers, matrices there and back, units' weights.
    """
    assert {phase: eight_ranks.collectives[phase] for phase in PHASES} == {
        "forward": {}, "backward": {("_reduce_scatter_base_", "float32"): 2 * 4}, "end of pass": {},
        "reduce": {("allreduce_", "float64"): 1}, "adamw": {}, "muon": {("alltoall_base_", "bfloat16"): 2 * 3},
        "gather": {("_allgather_base_", "bfloat16"): 4},
    }
    once = dry_step(8, CONFIG, 1, stage=1, micro_steps=2).collectives
    assert once["backward"] == {("_reduce_scatter_base_", "float32"): 4} and not once["end of pass"]
    total = sum(counted(CONFIG).units)
    assert total <= eight_ranks.gathered < total + 4 * 8 * 8, "no more than padding: 7 elements a unit and rank"


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("ranks, stage, micro_steps, rows, depth, length", [
    (1, 2, 2, 16, 2, 2048), (8, 2, 2, 16, 2, 2048),  # activations are most of it; else gradients and states
    (1, 2, 1, 1, 4, 256), (8, 0, 2, 1, 4, 256), (8, 1, 1, 1, 4, 256), (8, 1, 2, 1, 4, 256), (8, 2, 1, 1, 4, 256),
    (8, 2, 2, 1, 4, 256), (64, 2, 1, 1, 4, 256), (8, 2, 2, 4, 12, 2048)])
def test_memory_is_that_of_the_formula(ranks, stage, micro_steps, rows, depth, length, checkpointing):
    for arch in ("modern", "classic"):
        config = config_from_depth(depth, 65536, length, arch=arch)
        count = dry_step(ranks, config, rows, stage, micro_steps, checkpointing)
        layout = Layout(stage, ranks if stage else 1, rows, micro_steps, checkpointing)
        formula = rank_bytes(config, layout, compiled=False)
        assert formula == pytest.approx(count.peak, rel=0.06), arch
        if stage == 2:
            ours = step_bytes(config, rows, torch.bfloat16, ranks, checkpointing, micro_steps, compiled=False)
            assert ours == pytest.approx(count.peak, rel=0.06), arch
