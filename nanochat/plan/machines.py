"""
What a machine means for a step: links between ranks, and seconds that a step computes and sends. docs/machines.md.
"""
from typing import NamedTuple

import torch

from nanochat.gpt import GPTConfig
from nanochat.plan.memory import parameter_counts, sent_bytes, shaped


class Link(NamedTuple):
    name: str
    bandwidth: float  # bytes/s that a rank can send, in one direction


# From PCI-SIG (lanes x GT/s x 128/130), NVIDIA's and Google Cloud's specifications. docs/machines.md has the details.
LINKS = {
    "nvlink5": Link("NVLink 5", 900e9),
    "nvlink4": Link("NVLink 4", 450e9),
    "nvlink3": Link("NVLink 3", 300e9),
    "tpuv5p": Link("TPU v5p torus", 600e9),
    "pcie5": Link("PCIe 5.0 x16", 63e9),
    "pcie4": Link("PCIe 4.0 x16", 31.5e9),
    "ndr": Link("InfiniBand NDR", 50e9),
    "hdr": Link("InfiniBand HDR", 25e9),
    "eth100": Link("100 Gbit Ethernet", 12.5e9),
    "eth10": Link("10 Gbit Ethernet", 1.25e9),
}


def plan_step(
    config: GPTConfig, ranks: int, rate: float, link: Link, dtype: torch.dtype, batch_tokens: int, micro_steps: int
) -> tuple[float, list[float]]:
    """
    Seconds that a rank computes in an optimizer step, and seconds that it sends on each stage. rate: FLOP/s that a rank
    achieves; batch_tokens: of a step over all ranks.
    """
    adamw, muon = parameter_counts(config)
    total, head = adamw + muon, config.padded_vocab_size * config.n_embd
    sent = [sent_bytes(stage, ranks, micro_steps, dtype, torch.float32, total, muon, head) for stage in range(4)]
    compute = batch_tokens / ranks * shaped(config).estimate_flops() / rate
    return compute, [count / link.bandwidth for count in sent]
