"""The planner: bytes and seconds of a step with a pencil, on one host and two; the fastest layout; what it refuses."""
import itertools
import math

import pytest
import torch
from conftest import run_module

from bench.links import hiding_tokens, messages
from nanochat.gpt import GPTConfig, config_from_depth
from nanochat.plan.machines import (
    LINKS,
    Cluster,
    Layout,
    Link,
    fastest_layout,
    fits,
    largest_depth,
    plan_step,
    shard_sizes,
)
from nanochat.plan.memory import GIB, parts, shaped

BF16, RATE, BATCH = torch.bfloat16, 500e12, 2**19
CONFIG = config_from_depth(20, 65536, 2048)
EMBEDDING, BLOCK, MATRICES = 65536 * 1280, 12 * 1280**2, 20 * 12 * 1280**2
TOTAL = 2 * EMBEDDING + MATRICES
PER_TOKEN = 6 * (TOTAL - EMBEDDING) + 12 * 20 * 1280 * 2048


def test_one_host():
    """Depth 20 over NVLink 4 on eight ranks, from the formulas of docs/zero.md and docs/mfu.md."""
    cluster = Cluster(8, 8, LINKS["nvlink4"], LINKS["eth10"])
    for stage, elements in ((0, 2 * 4), (1, 4 + 2), (2, 4 * 4 + 2)):  # bytes per parameter: sums 4, gathers 2
        plan = plan_step(CONFIG, cluster, Layout(stage, 8 if stage else 1, 8, 4), RATE, BF16, BATCH)
        sent = 7 / 8 * (elements * TOTAL + (2 * 2 * MATRICES / 8 if stage else 0))
        assert plan.compute == pytest.approx(2**16 * PER_TOKEN / RATE)
        assert (plan.within, plan.between) == pytest.approx((sent, 0)), stage
        assert plan.sending == pytest.approx(sent / 450e9), stage
    link = LINKS["nvlink4"]
    for tokens, bytes in zip(hiding_tokens(CONFIG, 8, RATE, link, BF16), (4, 4 + 2)):  # the backward pass lasts as long
        assert 2 / 3 * tokens * PER_TOKEN / RATE == pytest.approx(7 / 8 * bytes * TOTAL / 450e9)
    assert messages(CONFIG, 8) == 2 * 22 * 7


def test_two_hosts():
    """
    Four ranks on each of two hosts. One ring through all eight crosses the slow link at one rank in four; groups of a
    host send there only the sums of their shards, in one all-reduce between two replicas.
    """
    cluster, steps = Cluster(8, 4, Link("fast", 100e9), Link("slow", 1e9)), 4
    matrices = 2 * 2 * MATRICES / 8  # there and back, bfloat16, a rank keeps an eighth
    ring = 7 / 8 * (steps * 4 + 2) * TOTAL
    plan = plan_step(CONFIG, cluster, Layout(2, 8, 8, steps), RATE, BF16, BATCH)
    assert plan.between == pytest.approx(ring / 4 + matrices * 4 / 8)    # 4 of 8 owners are there
    assert plan.within == pytest.approx(ring * 3 / 4 + matrices * 3 / 8)
    plan = plan_step(CONFIG, cluster, Layout(3, 4, 8, steps), RATE, BF16, BATCH)
    assert plan.between == pytest.approx(2 * 1 / 2 * 4 * TOTAL / 4)
    gathered = 2 * (2 * TOTAL - EMBEDDING)  # the head stays whole from forward to backward pass
    assert plan.within == pytest.approx(3 / 4 * (steps * (4 * TOTAL + gathered) + 2 * 2 * MATRICES / 4))
    assert plan.sending == pytest.approx(plan.within / 100e9 + plan.between / 1e9)


def test_what_does_not_hide_is_waited_for():
    """Stage 0 has one all-reduce a step, behind the last backward pass; the embedding's part of it comes after that."""
    def exposed(bandwidth: float, latency: float = 0.0, ranks: int = 2, micro_steps: int = 2) -> float:
        cluster = Cluster(ranks, 1, Link("none", math.inf), Link("link", bandwidth, latency))
        return plan_step(CONFIG, cluster, Layout(0, 1, 8, micro_steps), RATE, BF16, BATCH).exposed

    backward = BATCH / 2 * PER_TOKEN / RATE * 2 / 3 / 2  # of one micro-step
    slow, fast = 4 * TOTAL / 1e9, 4 * TOTAL / 100e9
    assert exposed(1e9) == pytest.approx(slow - backward)
    assert fast < backward and exposed(100e9) == pytest.approx(fast * EMBEDDING / TOTAL)
    assert exposed(math.inf) == 0
    # 22 units; a tree over 8 hosts is 3 levels, there and back
    assert exposed(math.inf, 1.0, ranks=8) == pytest.approx(22 * 2 * 3 - backward / 4)


def test_messages_of_rings_grow_with_ranks():
    """A ring through 4 hosts with 2 ranks each: 4 messages within hosts and 4 between, for each of 22 units."""
    cluster = Cluster(8, 2, Link("near", math.inf, 1e-3), Link("far", math.inf, 1e-2))
    plan = plan_step(CONFIG, cluster, Layout(1, 8, 8, 4), 1e30, BF16, BATCH)
    assert plan.exposed == pytest.approx(2 * 22 * (4 * 1e-3 + 4 * 1e-2))  # gradients, then parameters; nothing computes
    assert plan.update == pytest.approx(2 * (1e-3 + 1e-2))                # matrices go to all owners at once, and back


def test_muons_products_are_shared_within_a_copy():
    """Newton–Schulz with a pencil: for m ≤ n five times 2m²n + 2m³ + 2m²n FLOPs; one owner for each matrix."""
    one = 5 * (4 + 2) * 1280**3, 5 * (4 * 4 + 2) * 1280**3
    assert sorted(set(parts(CONFIG)[0].products)) == list(one)
    assert sum(parts(CONFIG)[0].products) == 20 * (4 * one[0] + 2 * one[1])
    links = Link("", math.inf), Link("", math.inf)
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
    links = Link("", math.inf), Link("", math.inf)
    plan = plan_step(config, Cluster(32, 8, *links), Layout(0, 1, 16, 1, True), 137e12, BF16, B * s)
    assert plan.compute == pytest.approx((theirs + 2 * B * s * h * V) / (32 * 137e12))  # here the head's forward, too


@pytest.mark.parametrize("gpus, depth", [(8, 20), (32, 32)])
def test_the_fastest_layout_that_fits(gpus: int, depth: int):
    config = config_from_depth(depth, 65536, 2048, arch="modern")
    cluster = Cluster(gpus, 8, LINKS["nvlink4"], LINKS["hdr"])
    best, plan = fastest_layout(config, cluster, RATE, BF16, 2**20, 80 * GIB)
    rows = 2**20 // (2048 * gpus)
    choices = itertools.product(range(4), shard_sizes(cluster), range(rows.bit_length()), (False, True))
    every = [Layout(stage, shards if stage else 1, rows >> i, 2**i, again) for stage, shards, i, again in choices]
    fitting = [layout for layout in every if fits(config, cluster, layout, BF16, 80 * GIB)]
    assert best in fitting and best.rows * best.micro_steps == rows
    assert plan.seconds == min(plan_step(config, cluster, layout, RATE, BF16, 2**20).seconds for layout in fitting)


def test_shard_groups_are_whole_hosts():
    links = Link("", 1.0), Link("", 1.0)
    assert [shard_sizes(Cluster(*sizes, *links)) for sizes in ((4, 8), (8, 8), (48, 8))] == [[4], [8], [8, 16, 48]]


def test_the_largest_model():
    """One layer more does not fit; a model that fits nowhere is none."""
    def config_of(depth: int) -> GPTConfig:
        return config_from_depth(depth, 65536, 2048)

    cluster, layout = Cluster(8, 8, LINKS["nvlink4"], LINKS["ndr"]), Layout(3, 8, 1, 1, True)
    depth = largest_depth(config_of, cluster, BF16, 20 * GIB)
    assert fits(config_of(depth), cluster, layout, BF16, 20 * GIB)
    assert not fits(config_of(depth + 1), cluster, layout, BF16, 20 * GIB)
    assert shaped(config_of(depth)).count_parameters("matrix") > 1e9
    assert largest_depth(config_of, cluster, BF16, GIB) == 0


def test_the_command():
    """Two levels of links; hours only; and what it refuses."""
    shown = run_module("scripts.plan", "--depth=24", "--gpus=16", "--between=hdr", "--total_batch_size=2**20")
    assert "over NVLink 4 within and InfiniBand HDR between hosts" in shown.stdout
    rows = [line.split(" | ") for line in shown.stdout.splitlines() if line.startswith("| ")][2:]
    sharded = [[f"| {stage}", size] for stage in (1, 2, 3) for size in ("8", "16")]
    assert [row[:2] for row in rows] == [["| 0", "–"], *sharded]
    assert "the fastest that fits: --zero_stage=1 --shard_size=" in shown.stdout
    nothing = run_module("scripts.plan", "--depth=48", "--gpus=1", "--device_batch_size=1")
    assert nothing.stdout.splitlines()[-1] == "nothing fits: take more GPUs or a smaller depth"
    wrong = {"--between=none": "between=none is not in the table", "--gpus=12": "must be a multiple of gpus_per_node=8"}
    for argument, words in wrong.items():
        refused = run_module("scripts.plan", argument)
        assert refused.returncode and words in refused.stderr and refused.stderr.count("\n") == 1
