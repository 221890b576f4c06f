"""
What machines mean for a step: links within a host and between hosts, and the seconds that a step computes, sends and
waits. docs/machines.md, docs/many_gpus.md.
"""
import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from nanochat.model.gpt_config import GPTConfig
from nanochat.optim.zero import MAX_IN_FLIGHT
from nanochat.plan.memory import Part, needed_bytes, parts
from nanochat.plan.passes import passes
from nanochat.plan.traffic import Collective, collectives

DEEPEST = 512   # that is looked at


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
    gloo: bool = False  # instead of NCCL; see `direct`, `turns`, and plan_part

    def on_a_host(self, size: int, stride: int) -> int:
        """Ranks on one host of a group of `size`, every stride-th rank."""
        return min(size, max(self.per_host // stride, 1))

    def direct(self, collective: Collective) -> bool:
        """Whether each rank sends to each other one, instead of around a ring."""
        return collective.kind == "all-to-all" or self.gloo and collective.kind == "reduce-scatter"

    def turns(self, size: int, collective: Collective, at_once: int) -> float:
        """
        What a collective's seconds are multiplied with where `at_once` of them are on their way together. Gloo has one
        connection for each pair of ranks: that a rank is ready to receive waits there behind what it sends, so that two
        messages pass one after the other; of several, the first two do.
        """
        paired = self.direct(collective) or size == 2 and collective.kind == "all-gather"
        return 1 + 1 / at_once if self.gloo and paired else 1

    def sent(self, size: int, stride: int, collective: Collective) -> tuple[float, float]:
        """
        Bytes that a rank sends each time (within its host, to others), on average, in a group of every stride-th rank.
        A ring through the group, host by host, leaves each host at one rank; the owners of matrices, and with gloo of
        gradients, are sent to directly.
        """
        here = self.on_a_host(size, stride)
        sent = collective.passes * collective.bytes * (size - 1) / size
        if here == size:
            return sent, 0.0
        away = (size - here) / (size - 1) if self.direct(collective) else 1 / here
        return sent * (1 - away), sent * away

    def latency(self, size: int, stride: int, collective: Collective) -> float:
        """Seconds of the messages of one such collective: a tree between hosts for an all-reduce, else a ring."""
        here = self.on_a_host(size, stride)
        hosts = size // here
        if self.direct(collective):  # all at once
            steps = int(here > 1), int(hosts > 1)
        elif collective.kind == "all-reduce":
            steps = here - 1, math.ceil(math.log2(hosts))
        else:
            steps = hosts * (here - 1), hosts if hosts > 1 else 0
        return collective.passes * (steps[0] * self.within.latency + steps[1] * self.between.latency)


class Layout(NamedTuple):
    """How a run is laid out over the ranks of a cluster."""

    stage: int
    shards: int         # ranks that share one copy; 1 on stage 0
    rows: int           # per rank and micro-step
    micro_steps: int
    checkpointing: bool = False     # activations are computed twice instead of kept
    pipeline_stages: int = 1        # each on neighbouring ranks; with several, ZeRO's stage is 0 or 1


class StepPlan(NamedTuple):
    """An optimizer step of a rank, on average over the pipeline's stages; what it waits for is that of the slowest."""

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


class PartPlan(NamedTuple):
    """Seconds of a rank of one pipeline stage, and the bytes that it sends to its group in an optimizer step."""

    forward: float      # a micro-batch computes
    backward: float
    gathers: float      # passes wait for parameters, over the step
    reduces: float      # and for gradients
    update: float
    within: float
    between: float


def plan_part(
    part: Part, config: GPTConfig, cluster: Cluster, layout: Layout, rate: float, muon_rate: float, dtype: torch.dtype,
    tokens: float,
) -> PartPlan:
    """
    tokens: of a micro-batch of a rank.

    What is sent during a pass hides behind it; the pass waits for what takes longer than it, at least for what the
    first unit sends: its parameters are needed first, its gradients are complete last. Both links work at once. A third
    of the FLOPs are the forward pass's.
    """
    micro_steps, shards, total = layout.micro_steps, layout.shards, sum(part.units)
    third = tokens * part.flops / rate / 3
    passes = {"forward": third, "backward": (2 + layout.checkpointing) * third}
    replicas = cluster.ranks // layout.pipeline_stages // shards
    head = config.padded_vocab_size * config.n_embd
    sent = collectives(layout.stage, shards, replicas, micro_steps, dtype, total, part.muon, head)
    groups = {"shards": (shards, 1), "replicas": (replicas, shards)}

    def at_once(c: Collective) -> int:
        if c.kind == "all-to-all":
            return part.shapes
        return len(part.units) if layout.stage < 3 else 1 if c.kind == "reduce-scatter" else 2  # fetched ahead: one

    def seconds(of: Iterable[Collective]) -> float:
        """Until they are done if nothing else goes on. Each unit has collectives of its own."""
        turns = [cluster.turns(groups[c.among][0], c, at_once(c)) for c in of]
        both = [[times * bytes for bytes in cluster.sent(*groups[c.among], c)] for times, c in zip(turns, of)]
        units = {c: 1 if c.kind == "all-to-all" else len(part.units) for c in of}
        messages = sum(cluster.latency(*groups[c.among], c) * units[c] for c in of)
        return max(sum(near for near, _ in both) / cluster.within.bandwidth,
                   sum(far for _, far in both) / cluster.between.bandwidth) + messages

    def waits(behind: str) -> float:
        now, first = [c for c in sent if c.behind == behind], part.units[0] / total
        # With gloo fully_shard waits for gradients where they were computed: GlooReduceScatter in zero.py.
        waited_for = [c for c in now if cluster.gloo and layout.stage == 3 and c.kind != "all-gather"]
        now = [c for c in now if c not in waited_for]
        every = [c for c in now if c.times == micro_steps]
        # Replicas sum what has been summed within a copy: a unit's sum starts when two more units are computed.
        again = [c for c in now if c.kind == "all-reduce" and shards > 1 and layout.stage < 3]
        after = sum(part.units[: 1 + MAX_IN_FLIGHT]) / total * seconds(again)
        hidden = sum(times * max(seconds(of) - passes[behind], first * seconds(of), last)
                     for times, of, last in ((micro_steps - 1, every, 0.0), (1, now, after)))
        return hidden + sum(c.times * seconds([c]) for c in waited_for)

    levels = [[c.times * bytes for bytes in cluster.sent(*groups[c.among], c)] for c in sent]
    exchange = seconds([c for c in sent if c.kind == "all-to-all"])
    matrices = max(sum(part.products) / shards, max(part.products)) / muon_rate  # a matrix has one owner
    return PartPlan(*passes.values(), waits("forward"), waits("backward"), matrices + exchange,
                    sum(near for near, _ in levels), sum(far for _, far in levels))


def plan_step(
    config: GPTConfig, cluster: Cluster, layout: Layout, rate: float, dtype: torch.dtype, batch_tokens: int,
    muon_rate: float | None = None,
) -> StepPlan:
    """rate: FLOP/s that a rank achieves; batch_tokens: of a step over all ranks; muon_rate: None: as in the passes."""
    stages, micro_steps, model = layout.pipeline_stages, layout.micro_steps, parts(config, layout.pipeline_stages)
    ranks = cluster.ranks // stages
    tokens = batch_tokens / ranks / micro_steps
    planned = [plan_part(part, config, cluster, layout, rate, muon_rate or rate, dtype, tokens) for part in model]
    compute = micro_steps * sum(part.forward + part.backward for part in planned) / stages
    within, between = (sum(getattr(part, level) for part in planned) / stages for level in ("within", "between"))

    sending = []    # seconds of a micro-batch from each stage to the next; its gradient comes back as fast
    for number in range(1, len(model)):
        size = tokens * config.n_embd * dtype.itemsize
        here = number % cluster.on_a_host(stages, ranks) > 0
        link = cluster.within if here else cluster.between
        sending.append(size / link.bandwidth + link.latency)
        both_ways = 2 * micro_steps * size / stages
        within, between = within + both_ways * here, between + both_ways * (not here)
    schedule = passes(*(tuple(getattr(part, name) for part in planned) for name in ("forward", "backward")),
                      tuple(sending), micro_steps)
    starts, ends = {p.stage: p.start for p in reversed(schedule)}, {p.stage: p.end for p in schedule}
    late = max(0.0, *(part.gathers - starts[stage] for stage, part in enumerate(planned)))
    last = max(ends.values())
    after = max(ends[stage] + part.reduces for stage, part in enumerate(planned)) - last
    seconds = within / cluster.within.bandwidth + between / cluster.between.bandwidth
    update = max(part.update for part in planned)
    return StepPlan(compute, update, late + after, max(last - compute, 0.0), within, between, seconds)


def fits(config: GPTConfig, cluster: Cluster, layout: Layout, dtype: torch.dtype, memory: float) -> bool:
    """Whether a rank's training fits into so many bytes of a GPU, margins included."""
    sharing = layout.shards if layout.stage else cluster.ranks // layout.pipeline_stages
    return memory >= needed_bytes(
        config, layout.rows, dtype, "cuda", True, sharing, stage=layout.stage, checkpointing=layout.checkpointing,
        pipeline_stages=layout.pipeline_stages, micro_steps=layout.micro_steps)


def shard_sizes(cluster: Cluster, pipeline_stages: int = 1) -> list[int]:
    """Ranks that may share a copy of a pipeline stage: those of 1, 2, 4, … hosts, and all of the stage."""
    ranks = cluster.ranks // pipeline_stages
    hosts = math.ceil(ranks / cluster.per_host)
    sizes = [cluster.per_host << i for i in range(hosts.bit_length()) if hosts % 2**i == 0]
    return sorted({*sizes, ranks}) if hosts > 1 else [ranks]


def pipelines(config: GPTConfig, cluster: Cluster) -> list[int]:
    """Possible numbers of pipeline stages: each has a layer, and is whole hosts or an equal part of one."""
    sizes = {n: cluster.ranks // n for n in range(1, config.n_layer + 1) if cluster.ranks % n == 0}
    return [n for n, size in sizes.items() if size % cluster.per_host == 0 or cluster.per_host % size == 0]


def layouts(config: GPTConfig, cluster: Cluster, batch_tokens: int) -> Iterator[list[Layout]]:
    """All that are looked at; in each list the same with fewer and fewer rows at a time."""
    for stages in pipelines(config, cluster):
        rows = batch_tokens * stages // (config.sequence_len * cluster.ranks)
        halves = [rows >> i for i in range(rows.bit_length()) if rows % 2**i == 0 and 2**i >= stages]
        zero = (1, 2, 3) if stages == 1 else (1,) if stages < cluster.ranks else ()
        sharded = itertools.product(zero, shard_sizes(cluster, stages))
        for (stage, shards), again in itertools.product([(0, 1), *sharded], (False, True)):
            yield [Layout(stage, shards, half, rows // half, again, stages) for half in halves]


def fastest_layout(
    config: GPTConfig, cluster: Cluster, rate: float, dtype: torch.dtype, batch_tokens: int, memory: float
) -> tuple[Layout, StepPlan] | None:
    """
    The layout of the fastest step among those that fit; None: there is none. Without a pipeline only the largest rows
    of each are looked at: fewer send more often.
    """
    found = []
    for trials in layouts(config, cluster, batch_tokens):
        for trial in trials:
            if fits(config, cluster, trial, dtype, memory):
                found.append((trial, plan_step(config, cluster, trial, rate, dtype, batch_tokens)))
                if trial.pipeline_stages == 1:
                    break
    return min(found, key=lambda pair: pair[1].seconds, default=None)


def largest_depth(
    config_of: Callable[[int], GPTConfig], cluster: Cluster, dtype: torch.dtype, memory: float
) -> tuple[int, Layout]:
    """
    The deepest model that can be trained, one row at a time and activations computed twice, and how: stage 3 over all
    ranks, or a pipeline with stage 1 in each of its stages. Depth 0: none.
    """
    def fitting(depth: int) -> Layout | None:
        config = config_of(depth)
        tried = [Layout(1, cluster.ranks // n, 1, n, True, n) for n in pipelines(config, cluster)]
        tried = [Layout(3, cluster.ranks, 1, 1, True), *tried]
        return next((layout for layout in tried if fits(config, cluster, layout, dtype, memory)), None)

    depth = bisect.bisect_left(range(1, DEEPEST), True, key=lambda depth: fitting(depth) is None)
    return depth, fitting(depth) if depth else None
