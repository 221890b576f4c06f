"""
How long a step takes on a cluster: seconds of computing, of sending over links within and between hosts, of waiting.
bench.layouts prints it, docs/step.html draws it. docs/zero.md compares the bytes of `collectives` with those that pass
PyTorch's dispatcher, docs/many_hosts.md with a network interface's traffic.
"""
import itertools
import math
from functools import cache
from typing import NamedTuple

import torch

from nanochat.model.gpt import model_without_memory
from nanochat.model.gpt_config import LARGE_DEPTH, GPTConfig
from nanochat.optim.pipeline import stage_layers
from nanochat.plan.memory import FLOAT32, GIB, Counts, count, pass_bytes, state_bytes, with_margins
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import read_toml

BF16 = torch.bfloat16


class Link(NamedTuple):
    bandwidth: float            # bytes/s that a rank can send, in one direction
    latency: float = 0.0        # least seconds that a message takes


LINKS = {name: Link(**row) for name, row in read_toml("../bench/links.toml").items()}


class Collective(NamedTuple):
    """One of the collectives of an optimizer step, `times` times."""

    kind: str           # reduce-scatter, all-gather, all-reduce or all-to-all
    bytes: float        # that a rank sends each time, on average
    ranks: int          # in the group
    stride: int = 1     # between neighbours of the group: 1 for ranks that share a copy, more for replicas of a shard
    times: int = 1
    behind: str = ""    # the pass that runs meanwhile: forward or backward; "": none


def collectives(
    zero_stage: int, shards: int, replicas: int, micro_steps: int, dtype: torch.dtype, total: int, muon: int, head: int
) -> list[Collective]:
    """
    The collectives of a step on shards · replicas ranks; on stage 0 shards is 1. total: parameters of the model; muon:
    Muon's; head: the last unit's, which stage 3 keeps whole from its forward to its backward pass.
    """
    # A reduce-scatter or an all-gather of S bytes sends S · (N − 1)/N; an all-reduce is both.
    share = (shards - 1) / shards
    gathered = total * dtype.itemsize * share
    # From stage 2 on no whole gradient is kept from one micro-step to the next.
    sums = micro_steps if zero_stage >= 2 else 1
    gathers = micro_steps if zero_stage == 3 else 1
    gathered_again = gathered * (1 - head / total) if zero_stage == 3 else 0
    sums_of_shards = 2 * total * FLOAT32 / shards * (replicas - 1) / replicas
    sent = [
        Collective("reduce-scatter", total * FLOAT32 * share, shards, times=sums, behind="backward"),
        Collective("all-gather", gathered, shards, times=gathers, behind="forward"),
        Collective("all-gather", gathered_again, shards, times=micro_steps, behind="backward"),
        # Each matrix travels to its owner and back.
        Collective("all-to-all", 2 * muon * dtype.itemsize / shards * share, shards),
        Collective("all-reduce", sums_of_shards, replicas, shards, behind="backward"),
    ]
    return [c for c in sent if c.bytes]


class Cluster(NamedTuple):
    """Ranks on hosts of one size, host by host. Each rank has its own port on both links."""

    ranks: int
    per_host: int
    within: Link
    between: Link

    def on_a_host(self, size: int, stride: int) -> int:
        """How many ranks of a group (`size`, every stride-th rank) are on one host."""
        return min(size, max(self.per_host // stride, 1))

    def sent(self, collective: Collective) -> tuple[float, float, float]:
        """Bytes that a rank sends to ranks of its host and to other hosts; seconds of latency."""
        kind, sent, size, stride, *_ = collective
        here = self.on_a_host(size, stride)
        hosts = size // here
        # away: share of the bytes that leaves the host. near, far: sequential messages within and between hosts.
        if kind == "all-to-all":  # matrices go directly to their owners, all at once, and back
            away, near, far = (size - here) / (size - 1), 2 * min(here - 1, 1), 2
        elif kind == "all-reduce":  # there and back, a ring in each host, a tree between hosts
            away, near, far = 1 / here, 2 * (here - 1), 2 * math.ceil(math.log2(hosts))
        else:  # a ring goes through the group host by host, and leaves each host at one rank
            away, near, far = 1 / here, hosts * (here - 1), hosts
        if hosts == 1:
            away = far = 0
        latency = near * self.within.latency + far * self.between.latency
        return sent * (1 - away), sent * away, latency

    def seconds(self, chosen: list[Collective], units: int) -> float:
        """How long collectives of that many units take if nothing else runs. Both links work at the same time."""
        within = between = latency = 0.0
        for c in chosen:
            near, far, delay = self.sent(c)
            within += near
            between += far
            # Matrices travel all at once; otherwise each unit has a collective of its own.
            latency += delay * (1 if c.kind == "all-to-all" else units)
        return max(within / self.within.bandwidth, between / self.between.bandwidth) + latency


class Layout(NamedTuple):
    """How a run is laid out over the ranks of a cluster."""

    zero_stage: int
    shards: int         # ranks that share one copy; 1 on stage 0
    rows: int           # per rank and micro-step
    micro_steps: int
    checkpointing: bool = False     # activations are computed twice instead of kept
    pipeline_stages: int = 1        # each on neighbouring ranks; with several, zero_stage is 0 or 1


# ---- A step


class Stage(NamedTuple):
    """The part of a model that a pipeline stage has; with one stage, the model."""

    layers: range
    flops: int              # per token, forward and backward; sum of all stages: GPT.estimate_flops
    counts: Counts


@cache
def split_into_stages(config: GPTConfig, pipeline_stages: int = 1) -> list[Stage]:
    """UserError for more stages than layers."""
    stages = []
    for layers in stage_layers(config, pipeline_stages):
        model = model_without_memory(config)
        model.keep_layers(layers)
        flops = 6 * model.count_parameters("matrix", "head") + 12 * config.n_embd * sum(map(config.window, layers))
        stages.append(Stage(layers, flops, count(model)))
    return stages


class StepPlan(NamedTuple):
    """An optimizer step of a rank, in bfloat16. Computing and bytes sent are averages over the stages of a pipeline."""

    compute: float      # seconds of forward and backward passes
    update: float       # seconds of Muon
    exposed: float      # seconds that passes wait for gradients and parameters
    bubble: float       # seconds that a stage idles: the pipeline fills, drains, sends, and is uneven
    within: float       # bytes sent within the host
    between: float      # bytes sent to other hosts
    needs: float        # bytes of the GPU's memory, margins included

    @property
    def seconds(self) -> float:
        return self.compute + self.update + self.exposed + self.bubble


def plan_step(config: GPTConfig, cluster: Cluster, layout: Layout, rate: float) -> StepPlan:
    """rate: FLOP/s that a rank achieves."""
    zero_stage, shards, rows, micro_steps, checkpointing, stages = layout
    ranks = cluster.ranks // stages  # of each stage
    tokens = rows * config.sequence_len
    head = config.padded_vocab_size * config.n_embd
    within = between = exposed = update = 0.0
    busy = []  # seconds of each stage for one micro-batch
    for _, flops, (units, _, muon, matrices) in split_into_stages(config, stages):
        sent = collectives(zero_stage, shards, ranks // shards, micro_steps, BF16, sum(units), muon, head)
        for c in sent:
            near, far, _ = cluster.sent(c)
            within += c.times * near / stages
            between += c.times * far / stages
        # The forward pass has a third of the FLOPs.
        forward = tokens * flops / rate / 3
        backward = (2 + checkpointing) * forward
        if not busy:  # a pipeline's first stage begins first and ends last: what others send hides while they idle
            exposed = waiting(cluster, sent, {"forward": forward, "backward": backward}, units, micro_steps)
        busy.append(forward + backward)
        # Muon: matrices travel to their owners and back. A matrix has one owner: more ranks than matrices do not help.
        products = max(sum(matrices) / shards, max(matrices)) / rate
        exchange = cluster.seconds([c for c in sent if c.kind == "all-to-all"], len(units))
        update = max(update, products + exchange)
    compute = micro_steps * sum(busy) / stages

    # A micro-batch's stream goes from each stage to the next; a gradient of equal size comes back.
    stream = tokens * config.n_embd * config.streams * BF16.itemsize
    sent_both_ways = 2 * micro_steps * stream / stages
    for number in range(1, stages):
        if number % cluster.on_a_host(stages, ranks):
            link = cluster.within
            within += sent_both_ways
        else:
            link = cluster.between
            between += sent_both_ways
        for end in (number - 1, number):
            busy[end] += stream / link.bandwidth + link.latency

    # 1F1B: the slowest stage is always busy, except while the first micro-batch arrives and the last one leaves. With
    # uneven stages and slow links this is up to a fifth off: docs/step.html runs the schedule pass by pass.
    passes = sum(busy) + (micro_steps - 1) * max(busy)
    needs = with_margins(rank_bytes(config, layout), cluster.ranks)
    return StepPlan(compute, update, exposed, max(passes - compute, 0.0), within, between, needs)


def waiting(
    cluster: Cluster, sent: list[Collective], passes: dict[str, float], units: list[int], micro_steps: int
) -> float:
    """
    Seconds that the "forward" and "backward" passes of a step, each of so many seconds, wait for collectives. Sending
    hides behind a pass, except for the time beyond the pass, or at least the first unit's time: its parameters are
    needed first, its gradients complete last.
    """
    exposed = 0.0
    for behind, pass_seconds in passes.items():
        once = [c for c in sent if c.behind == behind]
        always = [c for c in once if c.times == micro_steps]
        for chosen, times in (once, 1), (always, micro_steps - 1):
            seconds = cluster.seconds(chosen, len(units))
            exposed += times * max(seconds - pass_seconds, seconds * units[0] / sum(units))
    return exposed


def rank_bytes(config: GPTConfig, layout: Layout, compiled: bool = True) -> float:
    """
    `nanochat.plan.memory.step_bytes` in bfloat16 for each stage of ZeRO, and in a pipeline for the stage that holds
    most. Within 6% of the tensors that eager steps hold (tests/test_gpu_dry_run.py; stage 3's at e62bf999); pipelines
    were not compared.
    """
    zero_stage, shards, rows, micro_steps, checkpointing, stages = layout
    stream, block, kept, working, loss = pass_bytes(config, rows, BF16, checkpointing, compiled)
    peaks = []
    for number, (layers, _, (units, adamw, muon, _)) in enumerate(split_into_stages(config, stages)):
        states = state_bytes(zero_stage, shards, BF16, adamw, muon, config.n_layer >= LARGE_DEPTH)
        # Activations, in a pipeline of all micro-batches whose backward pass is still to come.
        saved = len(layers) * kept + 2 * config.smear * stream
        activations = saved * min(stages - number, micro_steps)
        # Buffers for the streams of each micro-batch, there and back, for each neighbour in a pipeline.
        activations += ((number > 0) + (number < stages - 1)) * micro_steps * config.streams * stream

        # Gradients when the last backward pass begins, and when it ends.
        gradients = FLOAT32 * sum(units)
        begin, end = gradients if micro_steps > 1 else 0, gradients
        if shards > 1 and stages == 1:
            # Two neighbouring units, being computed and sent, are whole; on stage 3 so are two units' weights.
            whole = max(map(sum, itertools.pairwise([0, *units])))
            end = gradients / shards + FLOAT32 * whole
            if zero_stage == 3:
                begin = gradients / shards + BF16.itemsize * whole
                end += BF16.itemsize * whole
            elif zero_stage == 2 and micro_steps > 1:
                begin = gradients / shards + FLOAT32 * sum(units[:2])  # last units of the micro-step before
        update = (gradients + 3.7 * BF16.itemsize * muon) / shards
        step = max(begin + activations + max(loss * (number == stages - 1), working), end + block + working, update)
        peaks.append(states.parameters + states.optimizer + step)
    return max(peaks)


def fastest_layout(config: GPTConfig, cluster: Cluster, rate: float, batch_tokens: int, memory: float) -> Layout:
    """
    The layout with the fastest step of batch_tokens over all ranks, a power of two, that fits into the memory. Each
    pipeline stage has a layer, and takes whole hosts or an equal part of one. UserError if nothing fits.
    """
    seconds = {}
    powers = [2**i for i in range(20)]
    for stages, zero_stage, shards, checkpointing, micro_steps in itertools.product(
            powers, range(4), powers, (False, True), powers):
        ranks = cluster.ranks // stages
        rows = batch_tokens // (config.sequence_len * ranks * micro_steps) if ranks else 0
        # A copy is shared by the ranks of a stage on 1, 2, 4, … hosts.
        shared = min(cluster.per_host, ranks) <= shards <= ranks if zero_stage else shards == 1
        if rows and shared and stages <= min(config.n_layer, micro_steps) and (stages == 1 or zero_stage < 2):
            layout = Layout(zero_stage, shards, rows, micro_steps, checkpointing, stages)
            plan = plan_step(config, cluster, layout, rate)
            if plan.needs <= memory:
                seconds[layout] = plan.seconds
    if not seconds:
        raise UserError(f"no layout fits into {memory / GIB:g} GiB: take more GPUs or a smaller depth")
    return min(seconds, key=seconds.__getitem__)
