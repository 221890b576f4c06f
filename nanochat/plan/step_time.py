"""
How long a GPU computes for an optimizer step: counted work over rates. The rates were measured on one H100; other GPUs
are assumed to reach the same shares of their datasheet rates. docs/gpus.md says how, and compares with published steps
of eight H100s, to which nothing here was fitted; bench/gpu_first_hour.py measures again.
"""
import math
from typing import NamedTuple

from nanochat.model.gpt_config import GPTConfig
from nanochat.plan.memory import counted, shaped
from nanochat.runtime.flops import Gpu

# Products within a step: share of the datasheet's bfloat16 rate, or in 8 bits of twice that rate.
PRODUCTS = 0.7
# Kernels between the products: share of the memory's bandwidth. It and UPDATE are fitted to three steps, two in 8 bits
# and one in bfloat16, so they cover uncounted work, too: reductions, sorts, sums of gradients.
MEMORY = 0.74
# Attention: share of the peak for the scores that it computes, forward and backward; rate of windows relative to whole
# layers. FlashAttention 4 on an H100; FlashAttention 2 reaches about these shares on an A100 (arXiv:2307.08691), and
# 0.62 of them on an H100.
FORWARD, BACKWARD, WINDOWS = 0.51, 0.45, 0.7
TILE = 128  # queries and keys of a computed block of scores
FP8_GPUS = "H100", "H200", "GH200", "B200", "GB200"  # where it pays, from nanochat/model/fp8.py's MIN_WIDTH on
# Counted in the code compiled for an H100, with 32 rows: residual streams that a block reads or writes between its
# products, and more of them in 8 bits; passes over the logits; bytes of a parameter's gradient in a micro-step;
# launches of a block. UPDATE is in bytes of a parameter; over a third of it is waiting for launches.
STREAMS, CASTS, LOGITS, GRADIENT, UPDATE, LAUNCHES = 58, 24, 4, 20, 120, 60
LAUNCH = 1.5e-6  # seconds between two kernels


class StepTime(NamedTuple):
    """Seconds of a step on each GPU, without waiting for others."""

    products: float
    attention: float
    passes: float       # over memory, between the products
    launches: float
    muon: float         # orthogonalizes its matrices

    @property
    def seconds(self) -> float:
        return sum(self)


def step_time(
    config: GPTConfig, rows: int, micro_steps: int, ranks: int, gpu: Gpu, fp8: bool = False
) -> StepTime:
    """A step with `rows` rows on each rank and micro-step. fp8: blocks and head."""
    model = counted(config)
    tokens = rows * config.sequence_len
    rate = PRODUCTS * gpu.peak
    products = 6 * tokens * shaped(config).count_parameters("matrix", "head") / (2 * rate if fp8 else rate)
    attention = 0.0
    for layer in range(config.n_layer):
        kernel = 1 if config.window(layer) == config.sequence_len else WINDOWS
        # Two products for each score forward, five backward.
        attention += config.n_embd * scores(config, layer) * rows * (4 / FORWARD + 10 / BACKWARD) / (kernel * gpu.peak)
    stream = gpu.dtype.itemsize * tokens * config.n_embd
    logits = gpu.dtype.itemsize * tokens * config.padded_vocab_size
    parameters = sum(model.units)
    streams = STREAMS + CASTS if fp8 else STREAMS
    moved = streams * config.n_layer * stream + LOGITS * logits + GRADIENT * parameters
    passes = (micro_steps * moved + UPDATE * parameters / ranks) / (MEMORY * gpu.bandwidth)
    return StepTime(micro_steps * products, micro_steps * attention, passes,
                    micro_steps * LAUNCHES * config.n_layer * LAUNCH, sum(model.products) / ranks / rate)


def scores(config: GPTConfig, layer: int) -> int:
    """Products of a query and a key that attention computes in a row and head: whole blocks of TILE x TILE."""
    behind = math.ceil((config.window(layer) - 1) / TILE)  # blocks before a query's own that a window reaches
    return TILE**2 * sum(min(i, behind) + 1 for i in range(math.ceil(config.sequence_len / TILE)))
