"""
How long a GPU computes for an optimizer step: counted work over rates that are assumed. docs/gpus.md compares it with
published steps, to which nothing here was fitted; bench/gpu_first_hour.py measures the rates on a GPU.
"""
import math
from typing import NamedTuple

from nanochat.model.gpt_config import GPTConfig
from nanochat.plan.memory import shaped, split_into_stages
from nanochat.runtime.flops import Gpu

# Products: a training step lowers an H100's clock to about 70% of the datasheet's rate, and incomplete rounds of tiles
# cost a tenth of that at widths of 1,280 to 1,536.
PRODUCTS = 0.63
# Kernels between the products: part of the memory's bandwidth.
MEMORY = 0.85
# Attention: part of the peak for the scores that it computes, forward and backward, by cuDNN or FlashAttention 4.
FORWARD, BACKWARD = 0.45, 0.37
# The rate of windows beside that: FlashAttention 2's on an H100 (arXiv:2407.08608, figure 5). That whole layers have
# it, too, without FlashAttention 4, is as much as documents apart save (docs/gpus.md).
WINDOWS = 0.7
TILE = 128  # queries and keys of the blocks of scores that are computed
# The time of a step in bfloat16 over that of one with products in 8 bits: 1.17 at depth 26, 1.22 at 24 (nanochat).
FP8 = 1.2
FP8_GPUS = "H100", "H200", "GH200", "B200", "GB200"  # where it pays, from nanochat/model/fp8.py's MIN_WIDTH on
# Counted in the code compiled for an H100, with 16 and 32 rows: residual streams that a block reads or writes between
# its products; passes over the logits; bytes of a parameter's gradient in a micro-step; launches of a block.
STREAMS, LOGITS, GRADIENT, LAUNCHES = 63, 4, 20, 60
LAUNCH = 1.5e-6  # seconds between two kernels


class StepTime(NamedTuple):
    """Seconds of a step on each GPU, without what it waits for others (nanochat/plan/machines.py)."""

    products: float
    attention: float
    passes: float       # over memory, between the products
    launches: float
    muon: float         # orthogonalizes its matrices
    gain: float         # of 8 bits

    @property
    def seconds(self) -> float:
        return sum(self[:5]) / self.gain


def step_time(
    config: GPTConfig, rows: int, micro_steps: int, ranks: int, gpu: Gpu, fp8: bool = False, windows: float = WINDOWS
) -> StepTime:
    """A step in bfloat16 with `rows` rows on each rank and micro-step. windows: see WINDOWS."""
    (model,) = split_into_stages(config)
    tokens = rows * config.sequence_len
    rate = PRODUCTS * gpu.peak
    products = 6 * tokens * shaped(config).count_parameters("matrix", "head") / rate
    attention = 0.0
    for layer in range(config.n_layer):
        kernel = 1.0 if config.window(layer) == config.sequence_len else windows
        # Two products for each score forward, five backward.
        attention += config.n_embd * scores(config, layer) * rows * (4 / FORWARD + 10 / BACKWARD) / (kernel * gpu.peak)
    stream = 2 * tokens * config.n_embd
    logits = 2 * tokens * config.padded_vocab_size
    moved = STREAMS * config.n_layer * stream + LOGITS * logits + GRADIENT * sum(model.units)
    passes = moved / (MEMORY * gpu.bandwidth)
    return StepTime(micro_steps * products, micro_steps * attention, micro_steps * passes,
                    micro_steps * LAUNCHES * config.n_layer * LAUNCH, sum(model.products) / ranks / rate,
                    FP8 if fp8 else 1.0)


def scores(config: GPTConfig, layer: int) -> int:
    """Products of a query and a key that attention computes in a row and head: whole blocks of TILE x TILE."""
    behind = math.ceil((config.window(layer) - 1) / TILE)  # blocks before a query's own that a window reaches
    return TILE**2 * sum(min(i, behind) + 1 for i in range(math.ceil(config.sequence_len / TILE)))
