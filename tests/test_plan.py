"""
The planner: bytes and seconds of a step with a pencil, on one host and two, in a pipeline; the fastest layout; steps
that are tried. What it says of memory is counted in test_gpu_dry_run.py; a speedrun's size is in test_speedrun.py.
"""
import itertools
import math
import resource
import subprocess
import sys
import time

import pytest
import torch
from conftest import run_module
from page_formulas import PUBLISHED, plan

import nanochat.plan.step_trial
from nanochat.model.gpt_config import GPTConfig, config_from_depth
from nanochat.plan.machines import LINKS, Cluster, Layout, Link, bytes_on_a_rank, fastest_layout, plan_step
from nanochat.plan.memory import GIB, samples_at_once, split_into_stages
from nanochat.plan.step_time import step_time
from nanochat.plan.step_trial import rows_that_train, try_steps
from nanochat.runtime.devices import choose_device_type
from nanochat.runtime.errors import UserError
from nanochat.runtime.flops import datasheet_gpu, find_gpu

BF16, RATE, BATCH = torch.bfloat16, 500e12, 2**19
CONFIG = config_from_depth(20, 65536, 2048)
EMBEDDING, BLOCK, MATRICES = 65536 * 1280, 12 * 1280**2, 20 * 12 * 1280**2
TOTAL = 2 * EMBEDDING + MATRICES
PER_TOKEN = 6 * (TOTAL - EMBEDDING) + 12 * 20 * 1280 * 2048


def test_one_host():
    """Depth 20 over NVLink 4 on eight ranks, from the formulas of docs/zero.md and docs/memory.md."""
    cluster = Cluster(8, 8, LINKS["nvlink4"], LINKS["eth10"])
    for stage, elements in ((0, 2 * 4), (1, 4 + 2), (2, 4 * 4 + 2)):  # bytes per parameter: sums 4, gathers 2
        plan = plan_step(CONFIG, cluster, Layout(stage, 8 if stage else 1, 8, 4), RATE, BF16, BATCH)
        sent = 7 / 8 * (elements * TOTAL + (2 * 2 * MATRICES / 8 if stage else 0))
        assert plan.compute == pytest.approx(2**16 * PER_TOKEN / RATE)
        assert (plan.within, plan.between) == pytest.approx((sent, 0)), stage


def test_two_hosts():
    """
    Four ranks on each of two hosts. One ring through all eight crosses the slow link at one rank in four; groups of a
    host send there only the sums of their shards, in one all-reduce between two replicas.
    """
    cluster, steps = Cluster(8, 4, Link(100e9), Link(1e9)), 4
    matrices = 2 * 2 * MATRICES / 8  # there and back, bfloat16, a rank keeps an eighth
    ring = 7 / 8 * (steps * 4 + 2) * TOTAL
    plan = plan_step(CONFIG, cluster, Layout(2, 8, 8, steps), RATE, BF16, BATCH)
    assert plan.between == pytest.approx(ring / 4 + matrices * 4 / 8)    # 4 of 8 owners are there
    assert plan.within == pytest.approx(ring * 3 / 4 + matrices * 3 / 8)
    plan = plan_step(CONFIG, cluster, Layout(3, 4, 8, steps), RATE, BF16, BATCH)
    assert plan.between == pytest.approx(2 * 1 / 2 * 4 * TOTAL / 4)
    gathered = 2 * (2 * TOTAL - EMBEDDING)  # the head stays whole from forward to backward pass
    assert plan.within == pytest.approx(3 / 4 * (steps * (4 * TOTAL + gathered) + 2 * 2 * MATRICES / 4))


def test_what_does_not_hide_is_waited_for():
    """Stage 0 has one all-reduce a step, behind the last backward pass; the embedding's part of it comes after that."""
    def exposed(bandwidth: float, latency: float = 0.0, ranks: int = 2, micro_steps: int = 2) -> float:
        cluster = Cluster(ranks, 1, Link(math.inf), Link(bandwidth, latency))
        return plan_step(CONFIG, cluster, Layout(0, 1, 8, micro_steps), RATE, BF16, BATCH).exposed

    backward = BATCH / 2 * PER_TOKEN / RATE * 2 / 3 / 2  # of one micro-step
    slow, fast = 4 * TOTAL / 1e9, 4 * TOTAL / 100e9
    assert exposed(1e9) == pytest.approx(slow - backward)
    assert fast < backward and exposed(100e9) == pytest.approx(fast * EMBEDDING / TOTAL)
    assert exposed(math.inf) == 0
    # 22 units; a tree over 8 hosts is 3 levels, there and back
    assert exposed(math.inf, 1.0, ranks=8) == pytest.approx(22 * 2 * 3 - backward / 4)


def test_muons_products_are_shared_within_a_copy():
    """Newton–Schulz with a pencil: for m ≤ n five times 2m²n + 2m³ + 2m²n FLOPs; one owner for each matrix."""
    one = 5 * (4 + 2) * 1280**3, 5 * (4 * 4 + 2) * 1280**3
    assert sorted(set(split_into_stages(CONFIG)[0].products)) == list(one)
    assert sum(split_into_stages(CONFIG)[0].products) == 20 * (4 * one[0] + 2 * one[1])
    links = Link(math.inf), Link(math.inf)
    for shards, flops in ((8, 20 * (4 * one[0] + 2 * one[1]) / 8), (256, one[1])):
        plan = plan_step(CONFIG, Cluster(256, 8, *links), Layout(2, shards, 1, 1), RATE, BF16, BATCH)
        assert plan.update == pytest.approx(flops / RATE), shards


def test_flops_are_megatrons():
    """
    The 1.7 billion parameters of Narayanan et al. 2021 (arXiv:2104.04473, table 1: 24 layers, width 2304, 32 GPUs, 512
    rows of 2,048): its formula 96·B·s·l·h²·(1 + s/6h + V/16lh), in which all but the head is computed a second time.
    """
    B, s, layers, h, V = 512, 2048, 24, 2304, 51200
    config = GPTConfig(sequence_len=s, vocab_size=V, n_layer=layers, n_embd=h, n_head=24, n_kv_head=24)
    theirs = 96 * B * s * layers * h**2 * (1 + s / (6 * h) + V / (16 * layers * h))
    links = Link(math.inf), Link(math.inf)
    plan = plan_step(config, Cluster(32, 8, *links), Layout(0, 1, 16, 1, True), 137e12, BF16, B * s)
    assert plan.compute == pytest.approx((theirs + 2 * B * s * h * V) / (32 * 137e12))  # here the head's forward, too


def test_a_pipeline_of_two_hosts():
    """Four stages of two ranks, two stages on a host: one boundary of three is between hosts."""
    cluster, steps = Cluster(8, 4, Link(100e9), Link(1e9, 1e-3)), 8
    model = split_into_stages(CONFIG, 4)
    assert sum(part.flops for part in model) == PER_TOKEN and model[-1].layers.stop == 20
    assert sum(part.adamw + part.muon for part in model) == TOTAL and sum(part.muon for part in model) == MATRICES
    plan = plan_step(CONFIG, cluster, Layout(1, 2, 16, steps, pipeline_stages=4), RATE, BF16, BATCH)
    stream = 2 * 16 * 2048 * 1280  # bytes of a micro-batch's; there and back
    of_groups = 1 / 2 * (4 + 2) * TOTAL / 4 + 1 / 2 * 2 * 2 * MATRICES / 4 / 2
    assert plan.between == pytest.approx(2 * steps * stream / 4)
    assert plan.within == pytest.approx(2 * steps * 2 * stream / 4 + of_groups)
    assert plan.compute == pytest.approx(BATCH / 8 * PER_TOKEN / RATE)
    # The slowest stage is busy all the time, but while the first micro-batch comes and the last one goes.
    busy = [16 * 2048 * part.flops / RATE for part in model]
    both = busy[1] + stream / 100e9 + stream / 1e9 + 1e-3   # with what it sends to both sides
    assert plan.compute + plan.bubble > steps * both
    free = plan_step(CONFIG, Cluster(8, 4, Link(math.inf), Link(math.inf)),
                     Layout(1, 2, 16, steps, pipeline_stages=4), RATE, BF16, BATCH)
    assert steps * max(busy) < free.compute + free.bubble <= sum(busy) + (steps - 1) * max(busy)
    with pytest.raises(UserError, match="pipeline_stages=21 of a model with 20 layers"):
        split_into_stages(CONFIG, 21)


def test_bubbles_are_megatrons():
    """
    Narayanan et al. 2021 (arXiv:2104.04473), section 3.3.1: n GPUs, of which d share the batch, and b' micro-batches in
    all wait (n − d)/b' of their computing time. So in its table 1 the model of 39.1 billion parameters: 48 layers in
    two stages of 256 GPUs (8 of them, tensor-parallel, are a rank here) and 1536 rows.
    """
    config = GPTConfig(sequence_len=2048, vocab_size=64, n_layer=48, n_embd=8192, n_head=64, n_kv_head=64)
    links = Link(math.inf), Link(math.inf)
    for n, d, rows in ((64, 32, 1536), (64, 8, 512)):
        layout = Layout(1, d, 1, rows // d, pipeline_stages=n // d)
        plan = plan_step(config, Cluster(n, 1, *links), layout, 8 * 138e12, BF16, rows * 2048)
        assert plan.bubble / plan.compute == pytest.approx((n - d) / rows, rel=2e-2)  # the last stage has a small head


def test_the_fastest_layout_that_fits():
    """Of depth 32 on 32 GPUs, among all layouts in powers of two."""
    config = config_from_depth(32, 65536, 2048, arch="modern")
    cluster = Cluster(32, 8, LINKS["nvlink4"], LINKS["hdr"])
    best, plan = fastest_layout(config, cluster, RATE, BF16, 2**20, 80 * GIB)
    times = {}
    for stages, shards, i, again in itertools.product((1, 2, 4, 8, 16, 32), (8, 16, 32), range(9), (False, True)):
        ranks, micro_steps = 32 // stages, 2**i
        rows = 2**20 // 2048 // ranks // micro_steps
        for zero_stage in range(4 if stages == 1 else 2) if rows and micro_steps >= stages else ():
            layout = Layout(zero_stage, min(shards, ranks) if zero_stage else 1, rows, micro_steps, again, stages)
            if bytes_on_a_rank(config, cluster, layout, BF16) <= 80 * GIB:
                times[layout] = plan_step(config, cluster, layout, RATE, BF16, 2**20).seconds
    assert times[best] == plan.seconds == min(times.values()) < max(times.values())


@pytest.mark.parametrize("rows, fp8, seconds", [(32, True, 0.856), (16, True, 0.492), (16, False, 0.610)])
def test_a_step_takes_as_long_as_on_an_h100(rows, fp8, seconds):
    """Depth 22, two micro-steps: measured on one (docs/gpus.md); the constants were fitted to them."""
    config = config_from_depth(22, 49152, 2048, arch="modern")
    step = step_time(config, rows, 2, 1, datasheet_gpu("H100"), fp8)
    assert step.seconds == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize("name, depth, vocab_size, rows, seconds", PUBLISHED)
def test_a_step_is_not_far_below_those_that_others_published(name, depth, vocab_size, rows, seconds):
    """nanochat's, on eight H100: other code, also with the time of communication."""
    config = config_from_depth(depth, vocab_size, 2048, arch="modern")
    step = step_time(config, rows, 64 // rows, 8, datasheet_gpu("H100"), fp8=True)
    assert 0.8 * seconds < step.seconds < seconds


def test_a_gpu_is_found_by_the_names_that_people_and_cuda_write():
    for text, name, memory in (
            ("RTX4090", "RTX 4090", 24), ("rtx-4090,48", "RTX 4090", 48), ("NVIDIA GeForce RTX 4090", "RTX 4090", 24),
            ("a6000", "RTX A6000", 48), ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000", 96)):
        assert datasheet_gpu(text)[::3] == (name, memory)
    # torch reports less memory than is printed on the box.
    assert [find_gpu("NVIDIA A100-SXM4", memory).bandwidth for memory in (79.1, 39.4)] == [2.039e12, 1.555e12]
    assert find_gpu("NVIDIA RTX A4000") is None
    assert "cost $? for" in plan("--gpus=1", "--gpu=L40S"), "its price is not known"


def test_a_mac_trains_on_its_cpu_unless_asked(monkeypatch):
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert [choose_device_type(asked) for asked in ("", "mps")] == ["cpu", "mps"]


def test_samples_at_once_fit_with_the_states():
    """By hand for depth 22 on one GPU: 2 bytes and a master of 4, two moments or, of Muon, one; 63 MB a row."""
    config = config_from_depth(22, 49152, 2048, arch="modern")
    states, row = 14 * 1.423e9 - 4 * 12 * 22 * 1408**2, 2 * 22 * 1408 * 512 * 2
    for memory, samples in ((80, 256), (24, 32)):
        assert samples_at_once(config, 1, datasheet_gpu("H100")._replace(memory=memory)) == samples
        rows = ((memory - 1.5) * GIB / 1.15 - states) / row
        assert samples == min(256, 2 ** int(math.log2(rows)))


def test_the_command_for_one_model():
    """Two levels of links; each stage of ZeRO, and the fastest layout, which may be a pipeline; what it refuses."""
    cluster = ("--depth=32", "--gpus=64", "--gpu=H100")
    shown = run_module("scripts.plan", *cluster, "--between=eth10")
    rows = [line.strip("| ").split(" | ") for line in shown.stdout.splitlines() if line.startswith("| ")][2:]
    *stages_of_zero, best = rows
    sharded = [[str(stage), size, "1"] for stage in (1, 2, 3) for size in ("8", "64")]
    assert [row[:3] for row in stages_of_zero] == [["0", "1", "1"], *sharded]
    assert float(best[9]) == min(float(row[9]) for row in rows) and int(best[2]) > 1
    assert f"--zero_stage={best[0]} --device_batch_size={best[3]} --" in shown.stdout
    for wrong in ("--between=none", "--gpus=12", "--gpu=H1000", "--gpu=A100,20", "--gpu="):
        refused = run_module("scripts.plan", *cluster, wrong)
        assert refused.returncode == 1 and refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1


# ---- Steps that are tried


@pytest.fixture
def eager(monkeypatch):
    """In processes started here, which see no GPU."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux only")
def test_rows_are_halved_for_a_lack_of_memory_and_for_nothing_else(eager, monkeypatch):
    """A real process that runs out of memory; one that the kernel ends; one that fails otherwise."""
    config = config_from_depth(1, 64, 64)
    run = subprocess.run
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *args, **settings: run(*args, **settings, preexec_fn=limit_memory))
        with pytest.raises(UserError, match="out of memory"):
            try_steps(config, 2**15)
        patch.setattr(subprocess, "run", lambda *_, **settings: subprocess.CompletedProcess([], -9, "", ""))
        with pytest.raises(UserError, match="out of memory"):  # the kernel has ended it
            try_steps(config, 1)
    answers = {4: "out of memory with device_batch_size=4", 2: "Signal 9 (SIGKILL) received by PID 1"}

    def try_steps_of(config: GPTConfig, rows: int, *how, **settings) -> None:
        if rows in answers:
            raise UserError(answers[rows])

    monkeypatch.setattr(nanochat.plan.step_trial, "try_steps", try_steps_of)
    assert rows_that_train(5, config, False, 1) == 1
    answers[2] = "RuntimeError: no kernel image is available"
    with pytest.raises(UserError, match="no kernel image is available"):
        rows_that_train(5, config, False, 1)


def test_the_time_of_a_step_is_measured_here(eager):
    """Three steps take less than the whole command, and one step's products cannot be done at 20 TFLOP/s."""
    began = time.monotonic()
    seconds = try_steps(config_from_depth(1, 8192, 256), 16) / 1000
    head_flops = 6 * 128 * 8192 * 16 * 256
    assert head_flops / 20e12 < seconds < (time.monotonic() - began) / 3
