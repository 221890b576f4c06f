"""
How long a step takes on a cluster: seconds of computing, of sending over links within and between hosts, of waiting.
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
    latency: float = 0.0        # least seconds that a message takes


# Bandwidths from PCI-SIG (lanes x GT/s x 128/130) and NVIDIA's specifications. Latencies are the ones that NCCL assumes
# for a step of a ring (src/graph/tuning.cc, hwLat, Simple).
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


class Sent(NamedTuple):
    """What a rank sends in one collective, on average over the ranks."""

    within: float       # bytes to ranks of its host
    between: float      # bytes to other hosts
    latency: float      # seconds


class Cluster(NamedTuple):
    """Ranks on hosts of one size, host by host. Each rank has its own port on both links."""

    ranks: int
    per_host: int
    within: Link
    between: Link

    def on_a_host(self, size: int, stride: int) -> int:
        """How many ranks of a group (`size`, every stride-th rank) are on one host."""
        return min(size, max(self.per_host // stride, 1))

    def sent(self, collective: Collective) -> Sent:
        size = collective.ranks
        here = self.on_a_host(size, collective.stride)
        hosts = size // here
        # away: share of the bytes that leaves the host. near, far: sequential messages within and between hosts.
        if collective.kind == "all-to-all":  # matrices go directly to their owners, all at once
            away, near, far = (size - here) / (size - 1), min(here - 1, 1), 1
        elif collective.kind == "all-reduce":  # a ring in each host, a tree between hosts
            away, near, far = 1 / here, here - 1, math.ceil(math.log2(hosts))
        else:  # a ring goes through the group host by host, and leaves each host at one rank
            away, near, far = 1 / here, hosts * (here - 1), hosts
        if hosts == 1:
            away = far = 0
        size_sent = collective.passes * collective.bytes * (size - 1) / size
        latency = collective.passes * (near * self.within.latency + far * self.between.latency)
        return Sent(size_sent * (1 - away), size_sent * away, latency)


class Layout(NamedTuple):
    """How a run is laid out over the ranks of a cluster."""

    zero_stage: int
    shards: int         # ranks that share one copy; 1 on stage 0
    rows: int           # per rank and micro-step
    micro_steps: int
    checkpointing: bool = False     # activations are computed twice instead of kept
    pipeline_stages: int = 1        # each on neighbouring ranks; with several, zero_stage is 0 or 1


# ---- One pipeline stage (without a pipeline: the model)


class StagePlan:
    """
    An optimizer step of a rank of one pipeline stage: seconds that it computes and that its passes wait, and the bytes
    that it sends to its group. tokens: per micro-batch of a rank. rate: FLOP/s that a rank achieves.
    """

    def __init__(self, stage: PipelineStage, config: GPTConfig, cluster: Cluster, layout: Layout, rate: float,
                 dtype: torch.dtype, tokens: float):
        self.cluster = cluster
        self.layout = layout
        self.units = stage.units
        replicas = cluster.ranks // layout.pipeline_stages // layout.shards
        head = config.padded_vocab_size * config.n_embd
        all_collectives = collectives(layout.zero_stage, layout.shards, replicas, layout.micro_steps, dtype,
                                      sum(stage.units), stage.muon, head)
        self.sent = {c: cluster.sent(c) for c in all_collectives}
        self.within = sum(c.times * sent.within for c, sent in self.sent.items())
        self.between = sum(c.times * sent.between for c, sent in self.sent.items())
        # Of one micro-batch. The forward pass has a third of the FLOPs.
        self.forward = tokens * stage.flops / rate / 3
        self.backward = (2 + layout.checkpointing) * self.forward
        # Waiting over the step: for parameters, and for gradients.
        self.gathers = self.waits("forward", self.forward)
        self.reduces = self.waits("backward", self.backward)
        # Muon: matrices travel to their owners and back. A matrix has one owner: more ranks than matrices do not help.
        products = max(sum(stage.products) / layout.shards, max(stage.products)) / rate
        self.update = products + self.seconds([c for c in self.sent if c.kind == "all-to-all"])

    def seconds(self, chosen: list[Collective]) -> float:
        """How long these collectives take if nothing else runs. Both links work at the same time."""
        within = between = latency = 0.0
        for c in chosen:
            within += self.sent[c].within
            between += self.sent[c].between
            # Matrices travel all at once; otherwise each unit has a collective of its own.
            latency += self.sent[c].latency * (1 if c.kind == "all-to-all" else len(self.units))
        return max(within / self.cluster.within.bandwidth, between / self.cluster.between.bandwidth) + latency

    def waits(self, behind: str, pass_seconds: float) -> float:
        """
        Seconds that the "forward" or "backward" passes of a step, of pass_seconds each, wait for collectives. Sending
        hides behind a pass, except for the time beyond the pass, or at least the first unit's time: its parameters are
        needed first, its gradients complete last.
        """
        total = sum(self.units)

        def wait(chosen: list[Collective]) -> float:
            seconds = self.seconds(chosen)
            return max(seconds - pass_seconds, seconds * self.units[0] / total)

        last_pass = [c for c in self.sent if c.behind == behind]
        every_pass = [c for c in last_pass if c.times == self.layout.micro_steps]
        # Replicas add up the sums of shard groups: a unit's sum over the replicas starts after two more units are
        # computed. So the sums of the last three units follow the pass.
        replica_sums = []
        if self.layout.shards > 1 and self.layout.zero_stage < 3:
            replica_sums = [c for c in last_pass if c.kind == "all-reduce"]
        following = sum(self.units[: 1 + MAX_IN_FLIGHT]) / total * self.seconds(replica_sums)
        return (self.layout.micro_steps - 1) * wait(every_pass) + max(wait(last_pass), following)


# ---- A step of all stages


class StepPlan(NamedTuple):
    """An optimizer step of a rank: averages over the pipeline's stages, and the waiting of the slowest one."""

    compute: float      # seconds of forward and backward passes
    update: float       # seconds of Muon
    exposed: float      # seconds that passes wait for gradients and parameters
    bubble: float       # seconds that a stage idles: the pipeline fills, drains, sends, and is uneven
    within: float       # bytes sent within the host
    between: float      # bytes sent to other hosts

    @property
    def seconds(self) -> float:
        return self.compute + self.update + self.exposed + self.bubble


def plan_step(
    config: GPTConfig, cluster: Cluster, layout: Layout, rate: float, dtype: torch.dtype, batch_tokens: int
) -> StepPlan:
    """rate: FLOP/s that a rank achieves; batch_tokens: of a step over all ranks."""
    stages = layout.pipeline_stages
    ranks = cluster.ranks // stages
    tokens = batch_tokens / ranks / layout.micro_steps
    planned = []
    for stage in split_into_stages(config, stages):
        planned.append(StagePlan(stage, config, cluster, layout, rate, dtype, tokens))
    within = sum(stage.within for stage in planned) / stages
    between = sum(stage.between for stage in planned) / stages

    # A micro-batch's stream goes from each stage to the next; a gradient of equal size comes back.
    hops = [0.0]
    stream = tokens * config.n_embd * config.streams * dtype.itemsize
    both_ways = 2 * layout.micro_steps * stream / stages
    for number in range(1, stages):
        if number % cluster.on_a_host(stages, ranks):
            link = cluster.within
            within += both_ways
        else:
            link = cluster.between
            between += both_ways
        hops.append(stream / link.bandwidth + link.latency)
    hops.append(0.0)

    # 1F1B: the slowest stage is always busy, except while the first micro-batch arrives and the last one leaves. With
    # uneven stages and slow links this is up to a fifth off: docs/step.html runs the schedule pass by pass.
    busy = []       # seconds of a stage for each micro-batch
    late = [0.0]    # from the arrival of a stage's first micro-batch until its parameters arrive
    after = []      # from the last stage's end until gradients are summed
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


# ---- The fastest layout


def bytes_on_a_rank(config: GPTConfig, cluster: Cluster, layout: Layout, dtype: torch.dtype) -> float:
    """Bytes of a GPU's memory that training needs, margins included."""
    ranks = layout.shards if layout.zero_stage else cluster.ranks // layout.pipeline_stages
    return needed_bytes(config, layout.rows, dtype, "cuda", True, ranks, layout.checkpointing, layout.zero_stage,
                        layout.micro_steps, pipeline_stages=layout.pipeline_stages)


def shard_sizes(cluster: Cluster, pipeline_stages: int = 1) -> list[int]:
    """How many ranks may share a copy of a pipeline stage: the ranks of 1, 2, 4, … hosts, or all."""
    ranks = cluster.ranks // pipeline_stages
    hosts = math.ceil(ranks / cluster.per_host)
    sizes = [cluster.per_host << i for i in range(hosts.bit_length()) if hosts % 2**i == 0]
    return sorted({min(size, ranks) for size in [*sizes, ranks]})


def pipelines(config: GPTConfig, cluster: Cluster) -> list[int]:
    """Possible numbers of pipeline stages: each has a layer, and takes whole hosts or an equal part of one."""
    sizes = {n: cluster.ranks // n for n in range(1, config.n_layer + 1) if cluster.ranks % n == 0}
    return [n for n, size in sizes.items() if size % cluster.per_host == 0 or cluster.per_host % size == 0]


def fastest_layout(
    config: GPTConfig, cluster: Cluster, rate: float, dtype: torch.dtype, batch_tokens: int, memory: float
) -> tuple[Layout, StepPlan] | None:
    """The layout with the fastest step that fits into the memory; None: nothing fits."""
    plans = []
    for stages in pipelines(config, cluster):
        rows = batch_tokens * stages // (config.sequence_len * cluster.ranks)
        micro_steps = [2**i for i in range(rows.bit_length()) if rows % 2**i == 0 and 2**i >= stages]
        zero_stages = (1,) if stages > 1 else (1, 2, 3)
        sharing = [(0, 1), *itertools.product(zero_stages, shard_sizes(cluster, stages))]
        for (zero_stage, shards), checkpointing in itertools.product(sharing, (False, True)):
            for count in micro_steps:
                layout = Layout(zero_stage, shards, rows // count, count, checkpointing, stages)
                if bytes_on_a_rank(config, cluster, layout, dtype) <= memory:
                    plans.append((layout, plan_step(config, cluster, layout, rate, dtype, batch_tokens)))
                    if stages == 1:  # more micro-steps send more often; in a pipeline they make the bubble smaller
                        break
    return min(plans, key=lambda plan: plan[1].seconds, default=None)
