"""
What a machine means for a step: links between ranks, and seconds that a step computes and sends. docs/machines.md.
"""
from typing import NamedTuple

import torch

from nanochat.gpt import GPTConfig
from nanochat.plan.memory import parameter_counts, sent_bytes, shaped


class Link(NamedTuple):
    """What a rank can send, bytes/s in one direction, and seconds that a message takes at least (None: unpublished)."""

    name: str
    bandwidth: float
    latency: float | None


# Bandwidths: PCI-SIG (lanes x GT/s x 128/130), NVIDIA's and Google Cloud's specifications. Latencies: what NCCL itself
# reckons with for a step of a ring (src/graph/tuning.cc, hwLat, Simple). docs/machines.md has the details.
LINKS = {
    "nvlink5": Link("NVLink 5", 900e9, 3.4e-6),
    "nvlink4": Link("NVLink 4", 450e9, 3.4e-6),
    "nvlink3": Link("NVLink 3", 300e9, 3.4e-6),
    "tpuv5p": Link("TPU v5p torus", 600e9, None),
    "pcie5": Link("PCIe 5.0 x16", 63e9, 5.7e-6),
    "pcie4": Link("PCIe 4.0 x16", 31.5e9, 5.7e-6),
    "ndr": Link("InfiniBand NDR", 50e9, 14e-6),
    "hdr": Link("InfiniBand HDR", 25e9, 14e-6),
    "eth100": Link("100 Gbit Ethernet", 12.5e9, 14e-6),
    "eth10": Link("10 Gbit Ethernet", 1.25e9, 14e-6),
}


class Step(NamedTuple):
    """Seconds of an optimizer step on one rank."""

    compute: float
    send: list[float]             # by stage
    latency: float | None         # of stage 1's messages
    hides: tuple[float, float]    # tokens per rank of the smallest micro-batches behind which stages 2 and 3 can send


def plan_step(
    config: GPTConfig, ranks: int, rate: float, link: Link, dtype: torch.dtype, batch_tokens: int, micro_steps: int
) -> Step:
    """rate: FLOP/s that a rank achieves, batch_tokens: of a step over all ranks."""
    adamw, muon = parameter_counts(config)
    total, head = adamw + muon, config.padded_vocab_size * config.n_embd
    send = [sent_bytes(stage, ranks, micro_steps, dtype, torch.float32, total, muon, head) for stage in range(4)]
    messages = 2 * (config.n_layer + 2) * (ranks - 1)  # stage 1: each unit is reduced and gathered once
    # A third of a micro-batch's time is its forward pass, the rest the backward pass; each must outlast what it sends.
    gradients, gathered = (total * size * (ranks - 1) / ranks / link.bandwidth for size in (4, dtype.itemsize))
    per_token = shaped(config).estimate_flops() / rate
    forward, backward = per_token / 3, 2 * per_token / 3
    return Step(
        batch_tokens / ranks * per_token,
        [sent / link.bandwidth for sent in send],
        None if link.latency is None else messages * link.latency,
        (gradients / backward, max(gathered / forward, (gathered + gradients) / backward)),
    )
