"""What a rank of a GPU node computes and sends, on the meta device; stage 3, which that cannot run: test_zero_bench."""
import subprocess
import sys
from collections import Counter

import pytest
import torch
from conftest import REPO
from torch.overrides import TorchFunctionMode

from bench.dry_step import PHASES, Count, Product, dry_step, one_rank_of
from bench.harness import peak_of
from bench.roofline import COPY_SHARE, MEMORY, PRODUCT_SHARE, START, product_seconds
from nanochat import adamw
from nanochat.flops import datasheet_peak
from nanochat.gpt_config import config_from_depth
from nanochat.plan.memory import moments, parameter_counts, step_bytes
from nanochat.plan.probes import set_up_training
from nanochat.plan.traffic import sent_bytes

pytestmark = pytest.mark.filterwarnings("ignore:Set timeout is now only")  # of a fake process group
META, ROWS = torch.device("meta"), 16
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


def count_step(ranks: int, stage: int = 2, micro_steps: int = 2) -> Count:
    count = Count(min(3, ranks - 1), ranks)
    dry_step(count, CONFIG, ROWS, stage, micro_steps, META, compiled=False)
    return count


@pytest.fixture(scope="module")
def eight_ranks() -> Count:
    return count_step(8)


def test_the_host_never_waits_for_the_device(eight_ranks):
    """Reading a tensor of the meta device raises; copies from the host are looked for by themselves."""
    with NumbersSent() as numbers:
        count = count_step(1)
    assert count.waits == eight_ranks.waits == numbers.found == []
    assert all(count.operations[phase] for phase in PHASES)


def test_a_number_sent_to_the_device_is_found(monkeypatch):
    """As AdamW's epsilon once was."""
    usual = adamw.bias_correction
    monkeypatch.setattr(adamw, "bias_correction", lambda beta, step: usual(beta, step) + step.new_tensor(0.0))
    with NumbersSent() as numbers:
        count_step(1)
    assert numbers.found


def test_collectives_of_a_step_are_those_of_the_documentation(eight_ranks):
    """docs/zero.md: units' gradients in each micro-step, six numbers, matrices there and back, units' weights."""
    kinds = {phase: Counter((c.name, c.dtype) for c in eight_ranks.collectives[phase]) for phase in PHASES}
    assert kinds == {
        "forward": {}, "backward": {("_reduce_scatter_base_", "float32"): 2 * 4},
        "reduce": {("allreduce_", "float64"): 1}, "adamw": {}, "muon": {("alltoall_base_", "bfloat16"): 2 * 3},
        "gather": {("_allgather_base_", "bfloat16"): 4},
    }
    adamw, muon = parameter_counts(CONFIG)
    gathered = sum(c.elements for c in eight_ranks.collectives["gather"])
    assert adamw + muon <= gathered < adamw + muon + 4 * 8, "no more than padding"


@pytest.mark.parametrize("ranks, stage", [(8, 0), (8, 1), (16, 2), (64, 2)])
def test_bytes_sent_are_those_of_the_formula(ranks, stage):
    """Rank 3 may own more or fewer matrices than the average, which are 0.4% of this model."""
    count, (adamw, muon) = count_step(ranks, stage), parameter_counts(CONFIG)
    sent = sum(c.sent for phase in PHASES for c in count.collectives[phase])
    formula = sent_bytes(stage, ranks, 2, torch.bfloat16, adamw + muon, muon, 0)
    assert sent == pytest.approx(formula, rel=0.005)


@pytest.mark.parametrize("ranks", [1, 8])
def test_memory_of_a_step_is_that_of_the_formula(ranks, eight_ranks):
    """Within 2%, all that is alive at the fullest moment: weights, optimizer, activations, loss, what travels."""
    count = eight_ranks if ranks == 8 else count_step(ranks)
    formula = step_bytes(CONFIG, ROWS, torch.bfloat16, "cuda", compiled=False, stage=2, ranks=ranks)
    assert count.peak == pytest.approx(sum(formula), rel=0.02)


@pytest.mark.parametrize("ranks, stage, micro_steps", [
    (1, 2, 1), (1, 2, 2), (8, 0, 2), (8, 1, 1), (8, 1, 2), (8, 2, 1), (8, 2, 2), (64, 2, 1)])
def test_memory_of_each_moment_is_that_of_the_formula(ranks, stage, micro_steps):
    """One short row, so that gradients and states are most of it: at the loss, at the update, at most."""
    config, count = config_from_depth(4, 65536, 256, arch="modern"), Count(min(3, ranks - 1), ranks)
    dry_step(count, config, 1, stage, micro_steps, META, compiled=False)
    found = moments(config, 1, torch.bfloat16, "cuda", False, stage=stage, ranks=ranks, micro_steps=micro_steps)
    assert sum(found["loss"]) == pytest.approx(count.peaks["forward"], rel=0.01)
    assert sum(found["update"]) == pytest.approx(max(count.peaks[p] for p in ("reduce", "adamw", "muon")), rel=0.01)
    assert max(map(sum, found.values())) == pytest.approx(count.peak, rel=0.01)


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_memory_of_stage_3_is_that_of_the_formula(micro_steps):
    """On a CPU, as PyTorch's allocator counts it: fully_shard frees and fills storages behind the tensors' backs."""
    config, tokens = config_from_depth(2, 8192, 256, arch="modern"), torch.randint(8192, (4, 256))

    def micro_steps_of_a_step() -> None:
        for micro_step in range(micro_steps):
            with sharding.accumulate(last=micro_step == micro_steps - 1):
                model(tokens, tokens).backward()
        sharding.collect_gradients()
        for shard in sharding.shards:
            shard.grad = None

    with one_rank_of(2, 1):
        model, sharding, _ = set_up_training(config, torch.bfloat16, torch.device("cpu"), 3)
        micro_steps_of_a_step()
        measured = peak_of(micro_steps_of_a_step)
    found = moments(config, 4, torch.bfloat16, "cpu", False, stage=3, ranks=2, micro_steps=micro_steps)
    formula = max(sum(moment) - moment.kept - moment.saving for moment in found.values())
    assert formula == pytest.approx(measured, rel=0.02)


def test_products_have_the_flops_that_mfu_counts(eight_ranks):
    """Two micro-steps, gates and attention aside, which are products of other kinds or left out."""
    products = eight_ranks.products["forward"] + eight_ranks.products["backward"]
    flops = sum(n * p.flops() for p, n in products.items() if min(p.m, p.k, p.n) > 32)
    model = parameter_counts(CONFIG)[1] + CONFIG.padded_vocab_size * CONFIG.n_embd
    assert flops == 2 * ROWS * CONFIG.sequence_len * 6 * model


def test_a_product_takes_what_its_flops_or_its_bytes_take():
    """Whole rounds of tiles run at the assumed rate; a thin product is no faster than memory; an empty one is free."""
    whole = Product(1, 128 * 132, 8192, 256, "bfloat16")
    rate = PRODUCT_SHARE * datasheet_peak("H100") * 8192 / (8192 + START)
    assert product_seconds(whole, "H100") == pytest.approx(whole.flops() / rate)
    thin = Product(1, 32768, 32, 8, "bfloat16")
    moved = 2 * (32768 * 32 + 32 * 8 + 32768 * 8)
    assert product_seconds(thin, "H100") > moved / (COPY_SHARE * MEMORY["H100"]) * 0.999
    assert product_seconds(Product(0, 128, 128, 128, "bfloat16"), "H100") == 0


def test_the_dry_run_says_what_it_needs():
    if torch.version.cuda:
        pytest.skip("this torch is a CUDA build")
    done = subprocess.run([sys.executable, "-m", "bench.gpu_dry_run"], cwd=REPO, text=True, capture_output=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: torch") and "no CUDA build" in done.stderr
