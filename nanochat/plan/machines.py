"""
How long a step takes on a cluster: seconds of computing, of sending over links within and between hosts, of waiting.
docs/machines.md, docs/many_gpus.md. docs/zero.md compares the bytes of `collectives` with those that pass PyTorch's
dispatcher, docs/many_hosts.md with a network interface's traffic.
"""
import itertools
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

from nanochat.model.gpt_config import GPTConfig
from nanochat.plan.memory import FLOAT32, needed_bytes, split_into_stages
from nanochat.runtime.files import read_toml


class Link(NamedTuple):
    bandwidth: float            # bytes/s that a rank can send, in one direction
    latency: float = 0.0        # least seconds that a message takes


LINKS = {name: Link(**row) for name, row in read_toml("plan/links.toml").items()}


class Collective(NamedTuple):
    """One of the collectives of an optimizer step, `times` times."""

    kind: Literal["reduce-scatter", "all-gather", "all-reduce", "all-to-all"]
    bytes: float        # that a rank sends each time, on average
    ranks: int          # in the group
    stride: int = 1     # between neighbours of the group: 1 for ranks that share a copy, more for replicas of a shard
    times: int = 1
    behind: Literal["forward", "backward", ""] = ""  # the pass that runs meanwhile; "": none


def collectives(
    zero_stage: int, shards: int, replicas: int, micro_steps: int, dtype: torch.dtype, total: int, muon: int, head: int
) -> list[Collective]:
    """
    The collectives of a step on shards · replicas ranks; on stage 0 shards is 1. total: parameters of the model; muon:
    Muon's; head: the last unit's, which stage 3 keeps whole from its forward to its backward pass.
    """
    # A reduce-scatter or an all-gather of S bytes sends S · (N − 1)/N; an all-reduce is both.
    gradients = total * FLOAT32 * (shards - 1) / shards
    gathered = total * dtype.itemsize * (shards - 1) / shards
    sent = []
    if shards > 1:
        # From stage 2 on no whole gradient is kept from one micro-step to the next.
        sums = micro_steps if zero_stage >= 2 else 1
        sent.append(Collective("reduce-scatter", gradients, shards, times=sums, behind="backward"))
        gathers = micro_steps if zero_stage == 3 else 1
        sent.append(Collective("all-gather", gathered, shards, times=gathers, behind="forward"))
        if zero_stage == 3:
            again = gathered * (1 - head / total)
            sent.append(Collective("all-gather", again, shards, times=micro_steps, behind="backward"))
        # Each matrix travels to its owner and back.
        matrices = 2 * muon * dtype.itemsize / shards * (shards - 1) / shards
        sent.append(Collective("all-to-all", matrices, shards))
    if replicas > 1:
        sums_of_shards = 2 * total * FLOAT32 / shards * (replicas - 1) / replicas
        sent.append(Collective("all-reduce", sums_of_shards, replicas, shards, behind="backward"))
    return sent


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
        size = collective.ranks
        here = self.on_a_host(size, collective.stride)
        hosts = size // here
        # away: share of the bytes that leaves the host. near, far: sequential messages within and between hosts.
        if collective.kind == "all-to-all":  # matrices go directly to their owners, all at once, and back
            away, near, far = (size - here) / (size - 1), 2 * min(here - 1, 1), 2
        elif collective.kind == "all-reduce":  # there and back, a ring in each host, a tree between hosts
            away, near, far = 1 / here, 2 * (here - 1), 2 * math.ceil(math.log2(hosts))
        else:  # a ring goes through the group host by host, and leaves each host at one rank
            away, near, far = 1 / here, hosts * (here - 1), hosts
        if hosts == 1:
            away = far = 0
        latency = near * self.within.latency + far * self.between.latency
        return collective.bytes * (1 - away), collective.bytes * away, latency

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


class StepPlan(NamedTuple):
    """An optimizer step of a rank. Computing and bytes are averages over the stages of a pipeline."""

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
    parts = split_into_stages(config, layout.pipeline_stages)
    stages = len(parts)
    ranks = cluster.ranks // stages  # of each stage
    tokens = batch_tokens / ranks / layout.micro_steps
    head = config.padded_vocab_size * config.n_embd
    within = between = exposed = update = 0.0
    busy = []  # seconds of each stage for one micro-batch
    for part in parts:
        sent = collectives(layout.zero_stage, layout.shards, ranks // layout.shards, layout.micro_steps, dtype,
                           sum(part.units), part.muon, head)
        for c in sent:
            near, far, _ = cluster.sent(c)
            within += c.times * near / stages
            between += c.times * far / stages
        # The forward pass has a third of the FLOPs.
        forward = tokens * part.flops / rate / 3
        backward = (2 + layout.checkpointing) * forward
        if not busy:  # a pipeline's first stage begins first and ends last: what others send hides while they idle
            exposed = (waiting(cluster, sent, "forward", forward, part.units, layout.micro_steps)
                       + waiting(cluster, sent, "backward", backward, part.units, layout.micro_steps))
        busy.append(forward + backward)
        # Muon: matrices travel to their owners and back. A matrix has one owner: more ranks than matrices do not help.
        products = max(sum(part.products) / layout.shards, max(part.products)) / rate
        exchange = cluster.seconds([c for c in sent if c.kind == "all-to-all"], len(part.units))
        update = max(update, products + exchange)
    compute = layout.micro_steps * sum(busy) / stages

    # A micro-batch's stream goes from each stage to the next; a gradient of equal size comes back.
    stream = tokens * config.n_embd * config.streams * dtype.itemsize
    for number in range(1, stages):
        sent_both_ways = 2 * layout.micro_steps * stream / stages
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
    passes = sum(busy) + (layout.micro_steps - 1) * max(busy)
    return StepPlan(compute, update, exposed, max(passes - compute, 0.0), within, between)


def waiting(
    cluster: Cluster, sent: list[Collective], behind: str, pass_seconds: float, units: list[int], micro_steps: int
) -> float:
    """
    Seconds that the "forward" or "backward" passes of a step, of pass_seconds each, wait for collectives. Sending
    hides behind a pass, except for the time beyond the pass, or at least the first unit's time: its parameters are
    needed first, its gradients complete last.
    """
    def wait(chosen: list[Collective]) -> float:
        seconds = cluster.seconds(chosen, len(units))
        return max(seconds - pass_seconds, seconds * units[0] / sum(units))

    once = [c for c in sent if c.behind == behind]
    always = [c for c in once if c.times == micro_steps]
    return wait(once) + (micro_steps - 1) * wait(always)


# ---- The fastest layout


def bytes_on_a_rank(config: GPTConfig, cluster: Cluster, layout: Layout, dtype: torch.dtype) -> float:
    """Bytes of a GPU's memory that training needs, margins included."""
    ranks = layout.shards if layout.zero_stage else cluster.ranks // layout.pipeline_stages
    return needed_bytes(config, layout.rows, dtype, ranks, layout.checkpointing, layout.zero_stage, layout.micro_steps,
                        layout.pipeline_stages)


def layouts(config: GPTConfig, cluster: Cluster, batch_tokens: int) -> Iterator[Layout]:
    """Ways to run such a step: each pipeline stage has a layer, and takes whole hosts or an equal part of one."""
    for stages in range(1, config.n_layer + 1):
        ranks = cluster.ranks // stages
        if cluster.ranks % stages or (ranks % cluster.per_host and cluster.per_host % ranks):
            continue
        # A copy is shared by the ranks of 1, 2, 4, … hosts, or by all.
        sizes = {min(cluster.per_host << i, ranks) for i in range(ranks.bit_length())}
        sharing = [(0, 1)]
        for zero_stage in (1, 2, 3) if stages == 1 else (1,):
            sharing += [(zero_stage, size) for size in sorted(sizes) if ranks % size == 0]
        rows = batch_tokens // (config.sequence_len * ranks)
        micro_steps = [2**i for i in range(rows.bit_length()) if rows % 2**i == 0 and 2**i >= stages]
        for (zero_stage, shards), checkpointing, count in itertools.product(sharing, (False, True), micro_steps):
            yield Layout(zero_stage, shards, rows // count, count, checkpointing, stages)


def fastest_layout(
    config: GPTConfig, cluster: Cluster, rate: float, dtype: torch.dtype, batch_tokens: int, memory: float
) -> tuple[Layout, StepPlan] | None:
    """The layout with the fastest step that fits into the memory; None: nothing fits."""
    plans = []
    for layout in layouts(config, cluster, batch_tokens):
        if bytes_on_a_rank(config, cluster, layout, dtype) <= memory:
            plans.append((layout, plan_step(config, cluster, layout, rate, dtype, batch_tokens)))
    return min(plans, key=lambda plan: plan[1].seconds, default=None)
