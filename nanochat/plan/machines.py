"""
What machines mean for a step: links within a host and between hosts, and the seconds that a step computes, sends and
waits. docs/machines.md, docs/many_gpus.md.
"""
import bisect
import itertools
import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple

import torch

from nanochat.gpt import GPTConfig
from nanochat.plan.memory import needed_bytes, parameter_counts, shaped
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

    def on_a_host(self, size: int, stride: int) -> int:
        """Ranks on one host of a group of `size`, every stride-th rank."""
        return min(size, max(self.per_host // stride, 1))

    def sent(self, size: int, stride: int, collective: Collective) -> tuple[float, float]:
        """
        Bytes that a rank sends each time (within its host, to others), on average, in a group of every stride-th rank.
        A ring through the group, host by host, leaves each host at one rank; the owners of matrices are sent to
        directly.
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


class StepPlan(NamedTuple):
    """An optimizer step of a rank."""

    compute: float      # seconds of forward and backward passes
    update: float       # of Muon: its products, and matrices on their way to their owners and back
    exposed: float      # that the passes wait for gradients and parameters
    within: float       # bytes sent within the host
    between: float      # to other hosts
    sending: float      # seconds that takes, one after the other

    @property
    def seconds(self) -> float:
        return self.compute + self.update + self.exposed


@cache
def orthogonalizing_flops(config: GPTConfig) -> list[int]:
    """Of each of Muon's matrices: five steps of three products (`nanochat.muon.orthogonalize`)."""
    model = shaped(config)
    shapes = [sorted(p.shape) for name, p in model.named_parameters() if model.roles()[name] == "matrix"]
    return [5 * (4 * m * m * n + 2 * m**3) for m, n in shapes]


def plan_step(
    config: GPTConfig, cluster: Cluster, layout: Layout, rate: float, dtype: torch.dtype, batch_tokens: int
) -> StepPlan:
    """
    rate: FLOP/s that a rank achieves; batch_tokens: of a step over all ranks.

    What is sent during a pass hides behind it; the pass waits for what takes longer than it, at least for what the
    first unit sends: its parameters are needed first, its gradients are complete last. Both links work at once. A third
    of the FLOPs are the forward pass's.
    """
    stage, shards, _rows, micro_steps, again = layout
    adamw, muon = parameter_counts(config)
    total, units = adamw + muon, [sum(p.numel() for p in unit.parameters()) for unit in shaped(config).units()]
    third = batch_tokens / cluster.ranks * shaped(config).estimate_flops() / rate / 3  # seconds of a forward pass
    passes = {"forward": third, "backward": (2 + again) * third}
    replicas = cluster.ranks // shards
    head = config.padded_vocab_size * config.n_embd
    sent = collectives(stage, shards, replicas, micro_steps, dtype, torch.float32, total, muon, head)
    groups = {"shards": (shards, 1), "replicas": (replicas, shards)}
    within = sum(c.times * cluster.sent(*groups[c.among], c)[0] for c in sent)
    between = sum(c.times * cluster.sent(*groups[c.among], c)[1] for c in sent)

    def seconds(of: Iterable[Collective]) -> float:
        """Until they are done if nothing else goes on. Each unit has collectives of its own."""
        both = [cluster.sent(*groups[c.among], c) for c in of]
        messages = sum(cluster.latency(*groups[c.among], c) * (1 if c.kind == "all-to-all" else len(units)) for c in of)
        return max(sum(near for near, _ in both) / cluster.within.bandwidth,
                   sum(far for _, far in both) / cluster.between.bandwidth) + messages

    exposed, first = 0.0, units[0] / total
    for behind, computing in passes.items():
        window, now = computing / micro_steps, [c for c in sent if c.behind == behind]
        every = [c for c in now if c.times == micro_steps]
        for times, of in ((micro_steps - 1, every), (1, now)):
            exposed += times * max(seconds(of) - window, first * seconds(of))
    exchange, products = seconds([c for c in sent if c.kind == "all-to-all"]), orthogonalizing_flops(config)
    matrices = max(sum(products) / shards, max(products)) / rate  # a matrix has one owner
    sending = within / cluster.within.bandwidth + between / cluster.between.bandwidth
    return StepPlan(sum(passes.values()), matrices + exchange, exposed, within, between, sending)


def fits(config: GPTConfig, cluster: Cluster, layout: Layout, dtype: torch.dtype, memory: float) -> bool:
    """Whether a rank's training fits into so many bytes of a GPU, margins included."""
    sharing = layout.shards if layout.stage else cluster.ranks
    return memory >= needed_bytes(
        config, layout.rows, dtype, "cuda", True, sharing, stage=layout.stage, checkpointing=layout.checkpointing)


def shard_sizes(cluster: Cluster) -> list[int]:
    """Ranks that may share a copy: those of 1, 2, 4, … hosts, and all."""
    hosts = math.ceil(cluster.ranks / cluster.per_host)
    sizes = [cluster.per_host << i for i in range(hosts.bit_length()) if hosts % 2**i == 0]
    return sorted({*sizes, cluster.ranks}) if hosts > 1 else [cluster.ranks]


def fastest_layout(
    config: GPTConfig, cluster: Cluster, rate: float, dtype: torch.dtype, batch_tokens: int, memory: float
) -> tuple[Layout, StepPlan] | None:
    """The layout of the fastest step among those that fit, at the largest rows of each; None: there is none."""
    rows, found = batch_tokens // (config.sequence_len * cluster.ranks), []
    halves = [rows >> i for i in range(rows.bit_length()) if rows % 2**i == 0]
    stages = [(0, 1), *itertools.product((1, 2, 3), shard_sizes(cluster))]
    for (stage, shards), again in itertools.product(stages, (False, True)):
        trials = (Layout(stage, shards, half, rows // half, again) for half in halves)
        fitting = next((trial for trial in trials if fits(config, cluster, trial, dtype, memory)), None)
        if fitting:
            found.append((fitting, plan_step(config, cluster, fitting, rate, dtype, batch_tokens)))
    return min(found, key=lambda pair: pair[1].seconds, default=None)


def largest_depth(
    config_of: Callable[[int], GPTConfig], cluster: Cluster, dtype: torch.dtype, memory: float
) -> int:
    """The deepest model that can be trained: stage 3 over all ranks, one row, activations computed twice; 0: none."""
    layout = Layout(3, cluster.ranks, 1, 1, True)
    return bisect.bisect_left(
        range(1, DEEPEST), True, key=lambda depth: not fits(config_of(depth), cluster, layout, dtype, memory))
