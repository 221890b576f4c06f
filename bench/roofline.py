"""
Seconds that a counted step would take on a GPU: an estimate from rates that are assumed, for bench.gpu_dry_run.

Nothing here was measured by this repo. A large product of 8192³ in bfloat16 runs at about 800 TFLOP/s on an H100 for
some milliseconds, and a copy at 3.0 TB/s (both seen on one H100, torch 2.11). Under a training step's load the clock
falls, hence 70% of the datasheet's peak. The rates of attention are guesses for head size 128, causal,
2,048 tokens.
"""
import math
from typing import NamedTuple

from bench.dry_step import PHASES, Collective, Count, Product
from nanochat.flops import datasheet_peak
from nanochat.gpt_config import GPTConfig
from nanochat.plan.machines import Link

MEMORY = {"H100": 3.35e12, "H200": 4.8e12}  # bytes/s, NVIDIA's datasheets
PROCESSORS = 132        # of either; they share out the tiles of a product
PER_HOST = 8            # GPUs
PRODUCT_SHARE = 0.70    # of the datasheet's peak that large products reach
COPY_SHARE = 0.85       # of the datasheet's bandwidth that kernels between the products reach
LINK_SHARE = 0.80       # of a link's bandwidth that collectives reach
TILES = (128, 256, 1.0), (128, 128, 0.85), (64, 128, 0.7)  # rows, columns, rate relative to the first
START = 160             # columns' worth of time that a tile takes to begin and to end
ATTENTION = {"forward": 0.45, "backward": 0.37}  # of the peak, for the scores that are computed
FLEX = 0.7              # FlexAttention's rate beside that
GAP = 1.5e-6            # s between two kernels on the device
HOST_OPERATION, HOST_CALL, HOST_KERNEL = 6e-6, 50e-6, 4e-6  # s of the host: eager operation, compiled call, its kernels


class Estimate(NamedTuple):
    """Seconds of an optimizer step. The parts of the device add up, with `exposed`, to what it takes."""

    products: float
    attention: float
    kernels: float   # memory passes between the products
    gaps: float
    exposed: float   # communication that nothing hides
    host: float      # what the host takes to launch all of it; more than the others together: the device waits

    def step(self) -> float:
        return max(sum(self[:5]), self.host)


def product_seconds(p: Product, gpu: str) -> float:
    """
    The best of three tiles and of up to 8 parts that a long K is cut into: processors without a tile of the last round
    wait. Not less than its operands and its result take to travel.
    """
    if not p.flops():
        return 0.0
    peak = datasheet_peak(gpu) * {"bfloat16": 1.0}.get(p.dtype, 2.0 if p.dtype.startswith("float8") else 0.06)
    best = 0.0
    for rows, columns, rate in TILES:
        for parts in (1, 2, 4, 8):
            if parts == 1 or p.k // parts >= 1024:
                tiles = p.count * math.ceil(p.m / rows) * math.ceil(p.n / columns) * parts
                filled = p.m * p.n * p.count * parts / (tiles * rows * columns)
                rounds = tiles / PROCESSORS
                best = max(best, rate * filled * rounds / math.ceil(rounds) * (p.k / parts) / (p.k / parts + START))
    moved = 2 * p.count * (p.m * p.k + p.k * p.n + p.m * p.n)
    return max(p.flops() / (PRODUCT_SHARE * peak * best), moved / (COPY_SHARE * MEMORY[gpu]))


def attention_seconds(config: GPTConfig, rows: int, gpu: str) -> float:
    """Of a micro-step, forward and backward: of full layers half of the scores, of windows blocks of 128 x 128."""
    seconds, T = 0.0, config.sequence_len
    for layer in range(config.n_layer):
        window, peak = config.window(layer), datasheet_peak(gpu)
        blocks = [min(i, math.ceil((window - 1) / 128)) + 1 for i in range(T // 128)]
        scores = T * T / 2 if window >= T else 128 * 128 * sum(blocks)
        for phase, times in (("forward", 4), ("backward", 10)):  # two and five products
            share = ATTENTION[phase] * (1 if window >= T else FLEX)
            seconds += times * config.n_embd * scores * rows / (share * peak)
    return seconds


def sent_seconds(c: Collective, ranks: int, within: Link, between: Link) -> float:
    """A ring leaves each host at one of its ranks; the owners of matrices are sent to directly."""
    away = 0.0 if ranks <= PER_HOST else (ranks - PER_HOST) / (ranks - 1) if "alltoall" in c.name else 1 / PER_HOST
    return c.sent * ((1 - away) / within.bandwidth + away / between.bandwidth) / LINK_SHARE


def estimate(
    count: Count, config: GPTConfig, rows: int, counted: int, micro_steps: int, gpu: str, within: Link, between: Link
) -> Estimate:
    """counted: micro-steps that `count` has; micro_steps: those of a whole optimizer step; links: of hosts of 8."""
    products = kernels = gaps = host = 0.0
    for phase in PHASES:
        times = micro_steps / counted if phase in ("forward", "backward") else 1
        compiled = sum(count.compiled[phase].values())
        launched = sum(count.operations[phase].values())
        products += times * sum(n * product_seconds(p, gpu) for p, n in count.products[phase].items())
        kernels += times * count.moved[phase] / (COPY_SHARE * MEMORY[gpu])
        gaps += times * launched * GAP
        host += times * (HOST_OPERATION * (launched - compiled) + HOST_KERNEL * compiled
                         + HOST_CALL * count.calls[phase])
    sent = {phase: [sent_seconds(c, count.ranks, within, between) for c in count.collectives[phase]]
            for phase in PHASES}
    # Gradients travel behind the backward pass but for those of the last unit; of Muon's matrices the first shape's way
    # there and the last one's back have nothing to hide behind; of the parameters the first unit's.
    exposed = sum(phase_sent[index] for phase_sent, index in (
        (sent["backward"], -1), (sent["muon"], 0), (sent["muon"], -1), (sent["gather"], 0)) if phase_sent)
    attention = micro_steps * attention_seconds(config, rows, gpu)
    return Estimate(products, attention, kernels, gaps, exposed, host)
