"""
A step on a cluster (bench/machines.py): bytes and seconds with a pencil, on one host and two, in a pipeline; the
fastest layout; the command. Memory is counted in test_gpu_dry_run.py.
"""
import itertools
import math

import pytest
from conftest import run_module

from bench.machines import LINKS, Cluster, Layout, Link, fastest_layout, plan_step, split_into_stages
from nanochat.model.gpt_config import config_from_depth
from nanochat.plan.memory import GIB, counted
from nanochat.runtime.errors import UserError

RATE, BATCH = 500e12, 2**19  # tokens of a step over all ranks
CONFIG = config_from_depth(20, 65536, 2048)
EMBEDDING, BLOCK, MATRICES = 65536 * 1280, 12 * 1280**2, 20 * 12 * 1280**2
TOTAL = 2 * EMBEDDING + MATRICES
PER_TOKEN = 6 * (TOTAL - EMBEDDING) + 12 * 20 * 1280 * 2048


def test_one_host():
    """Depth 20 over NVLink 4 on eight ranks, from the formulas of docs/zero.md and docs/memory.md."""
    cluster = Cluster(8, 8, LINKS["nvlink4"], LINKS["eth10"])
    for stage, elements in ((0, 2 * 4), (1, 4 + 2), (2, 4 * 4 + 2)):  # bytes per parameter: sums 4, gathers 2
        plan = plan_step(CONFIG, cluster, Layout(stage, 8 if stage else 1, 8, 4), RATE)
        sent = 7 / 8 * (elements * TOTAL + (2 * 2 * MATRICES / 8 if stage else 0))
        assert plan.compute == pytest.approx(2**16 * PER_TOKEN / RATE)
        assert (plan.within, plan.between) == pytest.approx((sent, 0)), stage
    again = plan_step(CONFIG, cluster, Layout(0, 1, 8, 4, checkpointing=True), RATE)
    assert again.compute == pytest.approx(2**16 * 4 / 3 * PER_TOKEN / RATE)  # a second forward pass, a third of it


def test_two_hosts():
    """
    Four ranks on each of two hosts. One ring through all eight crosses the slow link at one rank in four; groups of a
    host send there only the sums of their shards, in one all-reduce between two replicas.
    """
    cluster, steps = Cluster(8, 4, Link(100e9), Link(1e9)), 4
    matrices = 2 * 2 * MATRICES / 8  # there and back, bfloat16, a rank keeps an eighth
    ring = 7 / 8 * (steps * 4 + 2) * TOTAL
    plan = plan_step(CONFIG, cluster, Layout(2, 8, 8, steps), RATE)
    assert plan.between == pytest.approx(ring / 4 + matrices * 4 / 8)    # 4 of 8 owners are there
    assert plan.within == pytest.approx(ring * 3 / 4 + matrices * 3 / 8)
    plan = plan_step(CONFIG, cluster, Layout(3, 4, 8, steps), RATE)
    assert plan.between == pytest.approx(2 * 1 / 2 * 4 * TOTAL / 4)
    gathered = 2 * (2 * TOTAL - EMBEDDING)  # the head stays whole from forward to backward pass
    assert plan.within == pytest.approx(3 / 4 * (steps * (4 * TOTAL + gathered) + 2 * 2 * MATRICES / 4))


def test_what_does_not_hide_is_waited_for():
    """Stage 0 has one all-reduce a step, behind the last backward pass; the embedding's part of it comes after that."""
    def exposed(bandwidth: float, latency: float = 0.0, ranks: int = 2, micro_steps: int = 2) -> float:
        cluster = Cluster(ranks, 1, Link(math.inf), Link(bandwidth, latency))
        rows = BATCH // 2048 // ranks // micro_steps
        return plan_step(CONFIG, cluster, Layout(0, 1, rows, micro_steps), RATE).exposed

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
    assert sorted(set(counted(CONFIG).products)) == list(one)
    assert sum(counted(CONFIG).products) == 20 * (4 * one[0] + 2 * one[1])
    links = Link(math.inf), Link(math.inf)
    for shards, flops in ((8, 20 * (4 * one[0] + 2 * one[1]) / 8), (256, one[1])):
        plan = plan_step(CONFIG, Cluster(256, 8, *links), Layout(2, shards, 1, 1), RATE)
        assert plan.update == pytest.approx(flops / RATE), shards


def test_a_pipeline_of_two_hosts():
    """Four stages of two ranks, two stages on a host: one boundary of three is between hosts."""
    cluster, steps = Cluster(8, 4, Link(100e9), Link(1e9, 1e-3)), 8
    model = split_into_stages(CONFIG, 4)
    assert sum(part.flops for part in model) == PER_TOKEN and model[-1].layers.stop == 20
    counts = [part.counts for part in model]
    assert sum(part.adamw + part.muon for part in counts) == TOTAL and sum(part.muon for part in counts) == MATRICES
    plan = plan_step(CONFIG, cluster, Layout(1, 2, 16, steps, pipeline_stages=4), RATE)
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
                     Layout(1, 2, 16, steps, pipeline_stages=4), RATE)
    assert steps * max(busy) < free.compute + free.bubble <= sum(busy) + (steps - 1) * max(busy)
    with pytest.raises(UserError, match="pipeline_stages=21 of a model with 20 layers"):
        split_into_stages(CONFIG, 21)


def test_the_fastest_layout_that_fits():
    """Of depth 32 on 32 GPUs, among all layouts in powers of two."""
    config = config_from_depth(32, 65536, 2048, arch="modern")
    cluster = Cluster(32, 8, LINKS["nvlink4"], LINKS["hdr"])
    best = fastest_layout(config, cluster, RATE, 2**20, 80 * GIB)
    times = {}
    for stages, shards, i, again in itertools.product((1, 2, 4, 8, 16, 32), (8, 16, 32), range(9), (False, True)):
        ranks, micro_steps = 32 // stages, 2**i
        rows = 2**20 // 2048 // ranks // micro_steps
        for zero_stage in range(4 if stages == 1 else 2) if rows and micro_steps >= stages else ():
            layout = Layout(zero_stage, min(shards, ranks) if zero_stage else 1, rows, micro_steps, again, stages)
            tried = plan_step(config, cluster, layout, RATE)
            if tried.needs <= 80 * GIB:
                times[layout] = tried.seconds
    assert times[best] == min(times.values()) < max(times.values())


def test_the_command():
    """Two levels of links; each stage of ZeRO; last the fastest layout, which may be a pipeline; what it refuses."""
    shown = run_module("bench.layouts", "--depth=32", "--gpus=64", "--between=eth10")
    rows = [line.strip("| ").split(" | ") for line in shown.stdout.splitlines() if line.startswith("| ")][2:]
    *stages_of_zero, best = rows
    sharded = [[str(stage), size, "1"] for stage in (1, 2, 3) for size in ("8", "64")]
    assert [[*row[:2], row[5]] for row in stages_of_zero] == [["0", "1", "1"], *sharded]
    assert float(best[11]) == min(float(row[11]) for row in rows) and int(best[5]) > 1
    assert run_module("bench.layouts", "--gpus=1", "--depth=12").returncode == 0
    for wrong in ("--between=none", "--gpus=12", "--depth=300"):
        refused = run_module("bench.layouts", wrong)
        assert refused.returncode == 1 and refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1
