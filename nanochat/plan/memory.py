"""
Formulas for the memory of a training run on GPUs, in bytes per rank. docs/zero.md compares `state_bytes` with
measurements, docs/memory.md `step_bytes`. What fits on a machine that is here is tried instead (step_trial.py).

Rajbhandari et al. 2020, arXiv:1910.02054, sections 5 and 7; here with gradients accumulated in float32 and with Muon,
which has one moment where AdamW has two. `ranks` share one copy of the sharded states (one shard group, no replicas).
"""
import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch

from nanochat.model.gpt import GPT, model_without_memory
from nanochat.model.gpt_config import LARGE_DEPTH, GPTConfig
from nanochat.model.loss import chunk_rows
from nanochat.runtime.flops import Gpu

FLOAT32 = 4  # bytes: masters, moments and accumulated gradients, for any compute dtype
GIB = 2**30


class StateBytes(NamedTuple):
    """What a rank keeps between two micro-steps. A master that is the parameter's own memory counts as parameter."""

    parameters: float
    gradients: float
    optimizer: float  # masters and moments


def state_bytes(
    zero_stage: int, ranks: int, dtype: torch.dtype, adamw: int, muon: int, ema_nesterov: bool = False
) -> StateBytes:
    """
    adamw, muon: parameters that each updates. Bytes per parameter of AdamW, in bfloat16 and in float32:

        stage 0    18           16
        stage 1    6 + 12/N     8 + 8/N
        stage 2    2 + 16/N     4 + 12/N
        stage 3    16/N         16/N

    Muon's optimizer state has 4 bytes less: 14, 6 + 8/N, 2 + 12/N, 12/N; 12, 8 + 4/N, 4 + 8/N, 12/N. ema_nesterov adds
    4 bytes to both optimizer states.
    The paper's 16, 4 + 12/N, 2 + 14/N and 16/N have gradients of 2 bytes: here micro-steps are summed in float32.
    """
    total = adamw + muon
    share = 1 if zero_stage == 0 else 1 / ranks
    parameters = FLOAT32 * share if zero_stage == 3 else dtype.itemsize  # fully_shard keeps the masters' float32 rows
    gradients = FLOAT32 * share if zero_stage >= 2 else FLOAT32
    masters = FLOAT32 if zero_stage < 3 and dtype != torch.float32 else 0
    moments = FLOAT32 * (2 * adamw + muon + ema_nesterov * total)
    return StateBytes(parameters * total, gradients * total, (masters * total + moments) * share)


# ---- A training step

shaped = cache(model_without_memory)  # one for each config, never changed


class Counts(NamedTuple):
    """Parameters of a model, or of a part of one."""

    units: list[int]        # of each unit: embedding, blocks, head, if present
    adamw: int              # that AdamW updates
    muon: int
    products: list[int]     # FLOPs of orthogonalizing each matrix: five steps of three products


def count(model: GPT) -> Counts:
    products, roles = [], model.roles()
    for name, parameter in model.named_parameters():
        if roles[name] == "matrix":
            m, n = sorted(parameter.shape)
            products.append(5 * (4 * m * m * n + 2 * m**3))
    units = [sum(p.numel() for p in unit.parameters()) for unit in model.units()]
    muon = model.count_parameters("matrix")
    return Counts([size for size in units if size], sum(units) - muon, muon, products)


@cache
def counted(config: GPTConfig) -> Counts:
    return count(shaped(config))


class PassBytes(NamedTuple):
    """Tensors of the forward and backward pass of a micro-step."""

    stream: float       # a tensor (B, T, C)
    block: float        # what a block computes for its backward pass
    kept: float         # of that until the backward pass begins: less if activations are computed twice
    working: float      # on top, in the backward pass of a block
    loss: float


def pass_bytes(config: GPTConfig, rows: int, dtype: torch.dtype, checkpointing: bool, compiled: bool) -> PassBytes:
    tokens = rows * config.sequence_len
    vocab_size = config.padded_vocab_size
    stream = dtype.itemsize * tokens * config.n_embd
    # A block saves the inputs of two norms and their results, 4; queries, and inputs and output of attention, 2; relu²,
    # 4; and keys and values, with a value embedding in every second block, and copies of keys that are offset.
    block = (10 + 3 * config.n_kv_head / config.n_head) * stream
    # At most 10 streams in code compiled for an H100, 12 in eager code.
    working = 12 * stream + block * checkpointing
    # The loss: two streams; the head's gradient; logits, their gradient, and the previous chunk's.
    logits = vocab_size * chunk_rows(tokens, vocab_size, "cuda")
    per_logit = dtype.itemsize + (dtype.itemsize if compiled else 4 * FLOAT32)
    if tokens * vocab_size > logits:
        per_logit += dtype.itemsize
    loss = 2 * stream + FLOAT32 * vocab_size * config.n_embd + per_logit * logits
    return PassBytes(stream, block, stream if checkpointing else block, working, loss)


def step_bytes(
    config: GPTConfig, rows: int, dtype: torch.dtype, ranks: int = 1, checkpointing: bool = False,
    micro_steps: int = 2, compiled: bool = True,
) -> float:
    """
    The most bytes of tensors that a GPU holds at any moment of a training step on ZeRO's stage 2, with `rows` rows per
    micro-step. `ranks` share one copy of the states.

    Within 6% of the tensors that eager steps hold, counted without a GPU (tests/test_gpu_dry_run.py). Compiled steps on
    an H100 held 0.2% more in bfloat16, and 6% more in 8 bits (docs/memory.md).
    """
    model = counted(config)
    # As in a run of LONG steps; a shorter one has no EMA-Nesterov.
    states = state_bytes(2, ranks, dtype, model.adamw, model.muon, ema_nesterov=config.n_layer >= LARGE_DEPTH)
    passes = pass_bytes(config, rows, dtype, checkpointing, compiled)
    activations = config.n_layer * passes.kept + 2 * config.smear * passes.stream  # the smear: two tensors

    # Gradients when the last backward pass begins, and when it ends.
    gradients = FLOAT32 * sum(model.units)
    begin, end = gradients, gradients
    if ranks > 1:
        begin = gradients / ranks + FLOAT32 * sum(model.units[:2])  # last units of the micro-step before
        # Two neighbouring units, being computed and sent, are whole.
        end = gradients / ranks + FLOAT32 * max(map(sum, pairwise([0, *model.units])))
    if micro_steps == 1:
        begin = 0
    # The update: all of Muon's, and one shape's products of Newton-Schulz.
    update = (gradients + 3.7 * dtype.itemsize * model.muon) / ranks
    step = max(begin + activations + max(passes.loss, passes.working), end + passes.block + passes.working, update)
    return states.parameters + states.optimizer + step


# Guessed, for GPUs that were not at hand: what allocators waste; context, cuBLAS and kernels' code; NCCL's buffers.
WASTE = 1.15
GPU_PROCESS = 1.0 * GIB
NCCL = 0.5 * GIB


def with_margins(tensors: float, ranks: int) -> float:
    """Bytes of a GPU's memory that a step with this many bytes of tensors needs."""
    process = GPU_PROCESS + NCCL if ranks > 1 else GPU_PROCESS
    return process + WASTE * tensors


def needed_bytes(
    config: GPTConfig, rows: int, dtype: torch.dtype, ranks: int = 1, checkpointing: bool = False
) -> float:
    """Bytes of a GPU's memory that training needs, margins included."""
    return with_margins(step_bytes(config, rows, dtype, ranks, checkpointing), ranks)


def largest_rows(most: int, fit: Callable[[int], bool]) -> int:
    """The largest power of two of rows up to `most` that fits; 0: none."""
    rows = 2 ** int(math.log2(most))
    while rows and not fit(rows):
        rows //= 2
    return rows


# Tokens of a prompt and its answer for which RL's cache sets memory aside: gsm8k's longest, and 256 new ones.
SLOTS = 512


def samples_at_once(config: GPTConfig, ranks: int, gpu: Gpu) -> int:
    """
    Answers that each rank samples at a time in RL, 16 to 256: states on ZeRO's stage 2 and the engine's cache fit. Its
    logits and copies of some weights are left to the margin. Not measured.
    """
    model = counted(config)
    states = state_bytes(2, ranks, gpu.dtype, model.adamw, model.muon)
    cache = 2 * config.n_layer * config.n_kv_head * config.head_dim * SLOTS * gpu.dtype.itemsize
    free = (gpu.memory * GIB - GPU_PROCESS - NCCL) / WASTE - states.parameters - states.optimizer
    return max(largest_rows(256, lambda rows: rows * cache <= free), 16)
