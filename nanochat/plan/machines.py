"""
How long a step takes on a cluster: seconds that it computes, sends over links within and between hosts, and waits.
docs/machines.md, docs/many_gpus.md.
"""
import itertools
import math
from typing import NamedTuple

import torch

from nanochat.model.gpt_config import GPTConfig
from nanochat.optim.zero import MAX_IN_FLIGHT
from nanochat.plan.memory import PipelineStage, needed_bytes, split_into_stages
from nanochat.plan.traffic import Collective, collectives


class Link(NamedTuple):
    bandwidth: float            # bytes/s that a rank can send, in one direction
    latency: float = 0.0        # seconds that a message takes at least


# Bandwidths from PCI-SIG (lanes x GT/s x 128/130) and NVIDIA's specifications. Latencies are what NCCL reckons with for
# a step of a ring (src/graph/tuning.cc, hwLat, Simple).
LINKS = {
    "nvlink5": Link(900e9, 3.4e-6),  # NVLink 5
    "nvlink4": Link(450e9, 3.4e-6),  # NVLink 4
    "nvlink3": Link(300e9, 3.4e-6),  # NVLink 3
    "pcie5": Link(63e9, 5.7e-6),     # PCIe 5.0 x16
    "pcie4": Link(31.5e9, 5.7e-6),   # PCIe 4.0 x16
    "ndr": Link(50e9, 14e-6),        # InfiniBand NDR
    "hdr": Link(25e9, 14e-6),        # InfiniBand HDR
    "eth100": Link(12.5e9, 14e-6),   # 100 Gbit Ethernet
    "eth10": Link(1.25e9, 14e-6),    # 10 Gbit Ethernet
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

    def sent(self, size: int, stride: int, collective: Collective) -> tuple[float, float, float]:
        """
        Of a collective in a group of every stride-th rank: bytes that a rank sends within its host and to others, on
        average, and the seconds of its messages' latencies. Rings go through the group host by host and leave each host
        at one rank; an all-reduce is a tree between hosts; matrices go directly to their owners, all at once.
        """
        here = self.on_a_host(size, stride)
        hosts = size // here
        if collective.kind == "all-to-all":
            away = (size - here) / (size - 1)
            near = min(here - 1, 1)
            far = min(hosts - 1, 1)
        else:
            away = 1 / here
            near = hosts * (here - 1)
            far = hosts
        if collective.kind == "all-reduce":
            near = here - 1
            far = math.ceil(math.log2(hosts))
        if hosts == 1:
            away = far = 0
        sent = collective.bytes * (size - 1) / size
        latency = near * self.within.latency + far * self.between.latency
        return collective.passes * sent * (1 - away), collective.passes * sent * away, collective.passes * latency


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
    groups = {"shards": (layout.shards, 1), "replicas": (replicas, layout.shards)}  # ranks, stride
    sent = {}
    for c in collectives(
            layout.zero_stage, layout.shards, replicas, layout.micro_steps, dtype, total, stage.muon, head):
        sent[c] = cluster.sent(*groups[c.among], c)

    def seconds(of: list[Collective]) -> float:
        """Until they are done if nothing else goes on. Each unit has collectives of its own."""
        within = between = messages = 0.0
        for c in of:
            bytes_within, bytes_between, latency = sent[c]
            within += bytes_within
            between += bytes_between
            messages += latency if c.kind == "all-to-all" else latency * len(stage.units)
        return max(within / cluster.within.bandwidth, between / cluster.between.bandwidth) + messages

    def waits(behind: str, pass_seconds: float) -> float:
        """Seconds that the "forward" or "backward" passes of a step, of pass_seconds each, wait for collectives."""
        concurrent = [c for c in sent if c.behind == behind]
        repeated = [c for c in concurrent if c.times == layout.micro_steps]  # in each micro-step; the others in one
        # Replicas add up the sums of shard groups: a unit's sum over the replicas starts when two more units are
        # computed. So the sums of the last three units to be computed follow the pass.
        replica_sums = []
        if layout.shards > 1 and layout.zero_stage < 3:
            replica_sums = [c for c in concurrent if c.kind == "all-reduce"]
        following = sum(stage.units[: 1 + MAX_IN_FLIGHT]) / total * seconds(replica_sums)
        usual_wait = max(seconds(repeated) - pass_seconds, first * seconds(repeated))
        longest_wait = max(seconds(concurrent) - pass_seconds, first * seconds(concurrent), following)
        return (layout.micro_steps - 1) * usual_wait + longest_wait

    products = max(sum(stage.products) / layout.shards, max(stage.products)) / rate  # a matrix has one owner
    exchange = seconds([c for c in sent if c.kind == "all-to-all"])
    within = sum(c.times * sent[c][0] for c in sent)
    between = sum(c.times * sent[c][1] for c in sent)
    return StagePlan(forward, backward, waits("forward", forward), waits("backward", backward), products + exchange,
                     within, between)


def plan_step(
    config: GPTConfig, cluster: Cluster, layout: Layout, rate: float, dtype: torch.dtype, batch_tokens: int
) -> StepPlan:
    """rate: FLOP/s that a rank achieves; batch_tokens: of a step over all ranks."""
    stages = layout.pipeline_stages
    ranks = cluster.ranks // stages
    tokens = batch_tokens / ranks / layout.micro_steps
    planned = []
    for stage in split_into_stages(config, stages):
        planned.append(plan_stage(stage, config, cluster, layout, rate, dtype, tokens))
    within = sum(stage.within for stage in planned) / stages
    between = sum(stage.between for stage in planned) / stages
    hops = [0.0]    # seconds of a micro-batch's stream from each stage to the next; its gradient comes back as fast
    size = tokens * config.n_embd * config.streams * dtype.itemsize
    for number in range(1, stages):
        both_ways = 2 * layout.micro_steps * size / stages
        link = cluster.between
        if number % cluster.on_a_host(stages, ranks):
            link = cluster.within
            within += both_ways
        else:
            between += both_ways
        hops.append(size / link.bandwidth + link.latency)
    hops.append(0.0)

    # 1F1B: the slowest stage is busy all the time, but while the first micro-batch comes and the last one goes. Where
    # stages are uneven and links slow that is up to a fifth off: docs/step.html runs the schedule pass by pass.
    busy = []       # seconds of a stage for each micro-batch
    late = [0.0]    # until parameters have come to a stage, after its first micro-batch has
    after = []      # until gradients are summed, after the last stage has ended
    begun = 0.0
    ended = 0.0
    for stage, to_previous, to_next in zip(planned, hops, hops[1:]):
        busy.append(stage.forward + stage.backward + to_previous + to_next)
        late.append(stage.gathers - begun)
        after.append(stage.reduces - ended)
        begun += stage.forward + to_next
        ended += stage.backward + to_previous
    compute = layout.micro_steps * sum(stage.forward + stage.backward for stage in planned) / stages
    passes = sum(busy) + (layout.micro_steps - 1) * max(busy)
    update = max(stage.update for stage in planned)
    return StepPlan(compute, update, max(late) + max(after), max(passes - compute, 0.0), within, between)


def bytes_on_a_rank(config: GPTConfig, cluster: Cluster, layout: Layout, dtype: torch.dtype) -> float:
    """Bytes of a GPU's memory that training needs, margins included."""
    sharing = layout.shards if layout.zero_stage else cluster.ranks // layout.pipeline_stages
    return needed_bytes(
        config, layout.rows, dtype, "cuda", True, sharing, zero_stage=layout.zero_stage,
        checkpointing=layout.checkpointing, pipeline_stages=layout.pipeline_stages, micro_steps=layout.micro_steps)


def shard_sizes(cluster: Cluster, pipeline_stages: int = 1) -> list[int]:
    """Ranks that may share a copy of a pipeline stage: those of 1, 2, 4, … hosts, and all of the stage."""
    ranks = cluster.ranks // pipeline_stages
    hosts = math.ceil(ranks / cluster.per_host)
    sizes = [cluster.per_host << i for i in range(hosts.bit_length()) if hosts % 2**i == 0]
    return sorted({min(size, ranks) for size in [*sizes, ranks]})


def pipelines(config: GPTConfig, cluster: Cluster) -> list[int]:
    """Possible numbers of pipeline stages: each has a layer, and is whole hosts or an equal part of one."""
    sizes = {n: cluster.ranks // n for n in range(1, config.n_layer + 1) if cluster.ranks % n == 0}
    return [n for n, size in sizes.items() if size % cluster.per_host == 0 or cluster.per_host % size == 0]


def fastest_layout(
    config: GPTConfig, cluster: Cluster, rate: float, dtype: torch.dtype, batch_tokens: int, memory: float
) -> tuple[Layout, StepPlan] | None:
    """
    The layout with the fastest step that fits; None: nothing fits. Without a pipeline only the largest rows that fit
    are planned: fewer send more often.
    """
    found = []
    for stages in pipelines(config, cluster):
        rows = batch_tokens * stages // (config.sequence_len * cluster.ranks)
        halves = [rows >> i for i in range(rows.bit_length()) if rows % 2**i == 0 and 2**i >= stages]
        zero_stages = (1,) if stages > 1 else (1, 2, 3)
        sharing = [(0, 1), *itertools.product(zero_stages, shard_sizes(cluster, stages))]
        for (zero_stage, shards), checkpointing in itertools.product(sharing, (False, True)):
            for half in halves:
                layout = Layout(zero_stage, shards, half, rows // half, checkpointing, stages)
                if bytes_on_a_rank(config, cluster, layout, dtype) <= memory:
                    found.append((layout, plan_step(config, cluster, layout, rate, dtype, batch_tokens)))
                    if stages == 1:
                        break
    return min(found, key=lambda pair: pair[1].seconds, default=None)
