"""
How long a step takes on a cluster: seconds that it computes, sends over links within and between hosts, and waits.
docs/machines.md, docs/many_gpus.md.
"""
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from nanochat.model.gpt_config import GPTConfig
from nanochat.optim.zero import MAX_IN_FLIGHT
from nanochat.plan.memory import PipelineStage, needed_bytes, split_into_stages
from nanochat.plan.passes import passes
from nanochat.plan.traffic import Collective, collectives


class Link(NamedTuple):
    name: str
    bandwidth: float            # bytes/s that a rank can send, in one direction
    latency: float = 0.0        # seconds that a message takes at least


# Bandwidths from PCI-SIG (lanes x GT/s x 128/130), NVIDIA's and Google Cloud's specifications. Latencies are what NCCL
# reckons with for a step of a ring (src/graph/tuning.cc, hwLat, Simple); of TPUs none is published.
LINKS = {
    "nvlink5": Link("NVLink 5", 900e9, 3.4e-6),
    "nvlink4": Link("NVLink 4", 450e9, 3.4e-6),
    "nvlink3": Link("NVLink 3", 300e9, 3.4e-6),
    "tpuv5p": Link("TPU v5p torus", 600e9),
    "pcie5": Link("PCIe 5.0 x16", 63e9, 5.7e-6),
    "pcie4": Link("PCIe 4.0 x16", 31.5e9, 5.7e-6),
    "ndr": Link("InfiniBand NDR", 50e9, 14e-6),
    "hdr": Link("InfiniBand HDR", 25e9, 14e-6),
    "eth100": Link("100 Gbit Ethernet", 12.5e9, 14e-6),
    "eth10": Link("10 Gbit Ethernet", 1.25e9, 14e-6),
}


class Cluster(NamedTuple):
    """Ranks on hosts of one size, host by host. Each rank has its own port of both links."""

    ranks: int
    per_host: int
    within: Link
    between: Link

    def on_a_host(self, size: int, stride: int) -> int:
        """Ranks on one host of a group of `size`, every stride-th rank."""
        return min(size, max(self.per_host // stride, 1))

    def sent(self, size: int, stride: int, collective: Collective) -> tuple[float, float]:
        """
        Bytes that a rank sends each time (within its host, to others), on average, in a group of every stride-th rank.
        A ring through the group, host by host, leaves each host at one rank; matrices go directly to their owners.
        """
        here = self.on_a_host(size, stride)
        sent = collective.passes * collective.bytes * (size - 1) / size
        if here == size:
            return sent, 0.0
        away = (size - here) / (size - 1) if collective.kind == "all-to-all" else 1 / here
        return sent * (1 - away), sent * away

    def latency(self, size: int, stride: int, collective: Collective) -> float:
        """Seconds of the messages of one such collective: a tree between hosts for an all-reduce, else a ring."""
        here = self.on_a_host(size, stride)
        hosts = size // here
        if collective.kind == "all-to-all":  # all at once
            within = int(here > 1)
            between = int(hosts > 1)
        elif collective.kind == "all-reduce":
            within = here - 1
            between = math.ceil(math.log2(hosts))
        else:
            within = hosts * (here - 1)
            between = hosts if hosts > 1 else 0
        return collective.passes * (within * self.within.latency + between * self.between.latency)


class Layout(NamedTuple):
    """How a run is laid out over the ranks of a cluster."""

    zero_stage: int
    shards: int         # ranks that share one copy; 1 on stage 0
    rows: int           # per rank and micro-step
    micro_steps: int
    checkpointing: bool = False     # activations are computed twice instead of kept
    pipeline_stages: int = 1        # each on neighbouring ranks; with several, zero_stage is 0 or 1


class StepPlan(NamedTuple):
    """An optimizer step of a rank: an average over the pipeline's stages, but the waiting of the slowest one."""

    compute: float      # seconds of forward and backward passes
    update: float       # of Muon: its products, and matrices on their way to their owners and back
    exposed: float      # that the passes wait for gradients and parameters
    bubble: float       # that they wait for other stages of the pipeline: where it fills, drains, sends, is uneven
    within: float       # bytes sent within the host
    between: float      # to other hosts
    sending: float      # seconds that takes, one after the other

    @property
    def seconds(self) -> float:
        return self.compute + self.update + self.exposed + self.bubble


class StagePlan(NamedTuple):
    """Seconds of a rank of one pipeline stage, and the bytes that it sends to its group in an optimizer step."""

    forward: float      # a micro-batch computes
    backward: float
    gathers: float      # passes wait for parameters, over the step
    reduces: float      # and for gradients
    update: float
    within: float
    between: float


def plan_stage(
    stage: PipelineStage, config: GPTConfig, cluster: Cluster, layout: Layout, rate: float, dtype: torch.dtype,
    tokens: float,
) -> StagePlan:
    """
    tokens: of a micro-batch of a rank.

    Sending during a pass hides behind it; the pass waits for the part that takes longer, at least for the first unit's:
    its parameters are needed first, its gradients are complete last. Both links work at once. A third of the FLOPs are
    the forward pass's.
    """
    total = sum(stage.units)
    first = stage.units[0] / total
    forward = tokens * stage.flops / rate / 3
    backward = (2 + layout.checkpointing) * forward
    replicas = cluster.ranks // layout.pipeline_stages // layout.shards
    head = config.padded_vocab_size * config.n_embd
    sent = collectives(layout.zero_stage, layout.shards, replicas, layout.micro_steps, dtype, total, stage.muon, head)
    groups = {"shards": (layout.shards, 1), "replicas": (replicas, layout.shards)}  # ranks, stride

    def seconds(of: list[Collective]) -> float:
        """Until they are done if nothing else goes on. Each unit has collectives of its own."""
        within = between = messages = 0.0
        for collective in of:
            group = groups[collective.among]
            bytes_within, bytes_between = cluster.sent(*group, collective)
            within += bytes_within
            between += bytes_between
            units = 1 if collective.kind == "all-to-all" else len(stage.units)
            messages += cluster.latency(*group, collective) * units
        return max(within / cluster.within.bandwidth, between / cluster.between.bandwidth) + messages

    def waits(behind: str, lasting: float) -> float:
        now = [c for c in sent if c.behind == behind]
        every = [c for c in now if c.times == layout.micro_steps]  # in each micro-step, the others once
        # Replicas sum what has been summed within a copy: a unit's sum starts when two more units are computed.
        again = [c for c in now if c.kind == "all-reduce" and layout.shards > 1 and layout.zero_stage < 3]
        after = sum(stage.units[: 1 + MAX_IN_FLIGHT]) / total * seconds(again)
        each = max(seconds(every) - lasting, first * seconds(every))
        last = max(seconds(now) - lasting, first * seconds(now), after)
        return (layout.micro_steps - 1) * each + last

    within = between = 0.0
    for collective in sent:
        bytes_within, bytes_between = cluster.sent(*groups[collective.among], collective)
        within += collective.times * bytes_within
        between += collective.times * bytes_between
    products = max(sum(stage.products) / layout.shards, max(stage.products)) / rate  # a matrix has one owner
    exchange = seconds([c for c in sent if c.kind == "all-to-all"])
    return StagePlan(forward, backward, waits("forward", forward), waits("backward", backward), products + exchange,
                     within, between)


def plan_step(
    config: GPTConfig, cluster: Cluster, layout: Layout, rate: float, dtype: torch.dtype, batch_tokens: int
) -> StepPlan:
    """rate: FLOP/s that a rank achieves; batch_tokens: of a step over all ranks."""
    stages = layout.pipeline_stages
    micro_steps = layout.micro_steps
    model = split_into_stages(config, stages)
    ranks = cluster.ranks // stages
    tokens = batch_tokens / ranks / micro_steps
    planned = [plan_stage(stage, config, cluster, layout, rate, dtype, tokens) for stage in model]
    compute = micro_steps * sum(stage.forward + stage.backward for stage in planned) / stages
    within = sum(stage.within for stage in planned) / stages
    between = sum(stage.between for stage in planned) / stages

    sending = []    # seconds of a micro-batch from each stage to the next; its gradient comes back as fast
    size = tokens * config.n_embd * dtype.itemsize
    for number in range(1, stages):
        both_ways = 2 * micro_steps * size / stages
        if number % cluster.on_a_host(stages, ranks):
            link = cluster.within
            within += both_ways
        else:
            link = cluster.between
            between += both_ways
        sending.append(size / link.bandwidth + link.latency)
    schedule = passes(tuple(stage.forward for stage in planned), tuple(stage.backward for stage in planned),
                      tuple(sending), micro_steps)
    starts = {p.pipeline_stage: p.start for p in reversed(schedule)}
    ends = {p.pipeline_stage: p.end for p in schedule}
    last = max(ends.values())
    late = max(0.0, *(stage.gathers - starts[number] for number, stage in enumerate(planned)))
    after = max(ends[number] + stage.reduces for number, stage in enumerate(planned)) - last
    seconds = within / cluster.within.bandwidth + between / cluster.between.bandwidth
    update = max(stage.update for stage in planned)
    return StepPlan(compute, update, late + after, max(last - compute, 0.0), within, between, seconds)


def fits(config: GPTConfig, cluster: Cluster, layout: Layout, dtype: torch.dtype, memory: float) -> bool:
    """Whether a rank's training fits into `memory` bytes of a GPU, margins included."""
    sharing = layout.shards if layout.zero_stage else cluster.ranks // layout.pipeline_stages
    return memory >= needed_bytes(
        config, layout.rows, dtype, "cuda", True, sharing, zero_stage=layout.zero_stage,
        checkpointing=layout.checkpointing, pipeline_stages=layout.pipeline_stages, micro_steps=layout.micro_steps)


def shard_sizes(cluster: Cluster, pipeline_stages: int = 1) -> list[int]:
    """Ranks that may share a copy of a pipeline stage: those of 1, 2, 4, … hosts, and all of the stage."""
    ranks = cluster.ranks // pipeline_stages
    hosts = math.ceil(ranks / cluster.per_host)
    if hosts == 1:
        return [ranks]
    sizes = [cluster.per_host << i for i in range(hosts.bit_length()) if hosts % 2**i == 0]
    return sorted({*sizes, ranks})


def pipelines(config: GPTConfig, cluster: Cluster) -> list[int]:
    """Possible numbers of pipeline stages: each has a layer, and is whole hosts or an equal part of one."""
    sizes = {n: cluster.ranks // n for n in range(1, config.n_layer + 1) if cluster.ranks % n == 0}
    return [n for n, size in sizes.items() if size % cluster.per_host == 0 or cluster.per_host % size == 0]


def layouts(config: GPTConfig, cluster: Cluster, batch_tokens: int) -> Iterator[list[Layout]]:
    """All possible ones; in each list the same with fewer and fewer rows at a time."""
    for stages in pipelines(config, cluster):
        rows = batch_tokens * stages // (config.sequence_len * cluster.ranks)
        halves = [rows >> i for i in range(rows.bit_length()) if rows % 2**i == 0 and 2**i >= stages]
        zero_stages = (1, 2, 3)
        if stages > 1:
            zero_stages = (1,) if stages < cluster.ranks else ()
        sharded = itertools.product(zero_stages, shard_sizes(cluster, stages))
        for (zero_stage, shards), again in itertools.product([(0, 1), *sharded], (False, True)):
            yield [Layout(zero_stage, shards, half, rows // half, again, stages) for half in halves]


def fastest_layout(
    config: GPTConfig, cluster: Cluster, rate: float, dtype: torch.dtype, batch_tokens: int, memory: float
) -> tuple[Layout, StepPlan] | None:
    """
    The layout with the fastest step that fits; None: nothing fits. Without a pipeline only the largest rows
    that fit are planned: fewer send more often.
    """
    found = []
    for trials in layouts(config, cluster, batch_tokens):
        for trial in trials:
            if fits(config, cluster, trial, dtype, memory):
                found.append((trial, plan_step(config, cluster, trial, rate, dtype, batch_tokens)))
                if trial.pipeline_stages == 1:
                    break
    return min(found, key=lambda pair: pair[1].seconds, default=None)
