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

from nanochat.model.gpt import model_without_memory
from nanochat.model.gpt_config import LARGE_DEPTH, GPTConfig
from nanochat.model.loss import chunk_rows
from nanochat.optim.pipeline import stage_layers
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


class PipelineStage(NamedTuple):
    """The part of a model that a pipeline stage has; with one stage, the model."""

    layers: range
    units: list[int]    # parameters of each unit: embedding, blocks, head, if present
    adamw: int          # parameters that AdamW updates
    muon: int
    flops: int          # per token, forward and backward; sum of all stages: GPT.estimate_flops
    products: list[int]     # FLOPs of orthogonalizing each matrix: five steps of three products


@cache
def split_into_stages(config: GPTConfig, pipeline_stages: int = 1) -> tuple[PipelineStage, ...]:
    """UserError for more stages than layers."""
    stages = []
    for layers in stage_layers(config, pipeline_stages):
        model = model_without_memory(config)
        model.keep_layers(layers)
        roles = model.roles()
        counts = [sum(p.numel() for p in unit.parameters()) for unit in model.units()]
        muon = model.count_parameters("matrix")
        flops = 6 * model.count_parameters("matrix", "head") + 12 * config.n_embd * sum(map(config.window, layers))
        products = []
        for name, parameter in model.named_parameters():
            if roles[name] == "matrix":
                m, n = sorted(parameter.shape)
                products.append(5 * (4 * m * m * n + 2 * m**3))
        stages.append(PipelineStage(
            layers, [count for count in counts if count], sum(counts) - muon, muon, flops, products))
    return tuple(stages)


def step_bytes(
    config: GPTConfig, rows: int, dtype: torch.dtype, ranks: int = 1, checkpointing: bool = False, zero_stage: int = 2,
    micro_steps: int = 2, pipeline_stages: int = 1, compiled: bool = True,
) -> float:
    """
    The most bytes of tensors that a GPU holds at any moment of a training step, with `rows` rows per micro-step, in the
    pipeline stage that holds most. `ranks` share one copy of the states.

    Within 6% of the tensors that eager steps hold, counted without a GPU (tests/test_gpu_dry_run.py). Compiled steps on
    an H100 held 0.2% more in bfloat16, and 6% more in 8 bits (docs/memory.md).
    """
    itemsize = dtype.itemsize
    shards = 1 if zero_stage == 0 else ranks
    tokens = rows * config.sequence_len
    vocab_size = config.padded_vocab_size
    stream = itemsize * tokens * config.n_embd  # a tensor (B, T, C)
    # A block saves the inputs of two norms and their results, 4; queries, and inputs and output of attention, 2; relu²,
    # 4; and keys and values, with a value embedding in every second block, and copies of keys that are offset.
    block = (10 + 3 * config.n_kv_head / config.n_head) * stream
    # The loss: two streams; the head's gradient; logits, their gradient, and the previous chunk's.
    logits = vocab_size * chunk_rows(tokens, vocab_size, "cuda")
    per_logit = itemsize + (itemsize if compiled else 4 * FLOAT32)
    if tokens * vocab_size > logits:
        per_logit += itemsize
    loss = 2 * stream + FLOAT32 * vocab_size * config.n_embd + per_logit * logits

    peaks = []
    for number, part in enumerate(split_into_stages(config, pipeline_stages)):
        is_last = number == pipeline_stages - 1
        # As in a run of LONG steps; a shorter one has no EMA-Nesterov.
        ema_nesterov = config.n_layer >= LARGE_DEPTH
        states = state_bytes(zero_stage, shards, dtype, part.adamw, part.muon, ema_nesterov)
        gradients = FLOAT32 * (part.adamw + part.muon)

        # Activations, in a pipeline of all micro-batches whose backward pass is still to come. The smear: two tensors.
        saved = len(part.layers) * (stream if checkpointing else block) + 2 * config.smear * stream
        activations = saved * min(pipeline_stages - number, micro_steps)
        if pipeline_stages > 1:  # buffers for the streams of each micro-batch, there and back, for each neighbour
            neighbours = (number > 0) + (not is_last)
            activations += neighbours * micro_steps * config.streams * stream
        # On top, in the backward pass of a block: at most 10 streams in code compiled for an H100, 12 in eager code.
        working = 12 * stream + block * checkpointing

        # Gradients when the last backward pass begins, and when it ends.
        begin = end = gradients
        if micro_steps == 1:
            begin = 0
        if shards > 1 and pipeline_stages == 1:
            # Two neighbouring units, being computed and sent, are whole; on stage 3 so are two units' weights.
            neighbours = max(map(sum, pairwise([0, *part.units])))
            gathered = itemsize * neighbours if zero_stage == 3 else 0
            end = gradients / shards + FLOAT32 * neighbours + gathered
            if zero_stage == 3:
                begin = gradients / shards + gathered
            elif zero_stage == 2 and micro_steps > 1:
                begin = gradients / shards + FLOAT32 * sum(part.units[:2])  # last units of the micro-step before
        # The update: all of Muon's, and one shape's products of Newton-Schulz.
        update = (gradients + 3.7 * itemsize * part.muon) / shards
        step = max(begin + activations + max(loss * is_last, working), end + block + working, update)
        peaks.append(states.parameters + states.optimizer + step)
    return max(peaks)


# Guessed, for GPUs that were not at hand: what allocators waste; context, cuBLAS and kernels' code; NCCL's buffers.
WASTE = 1.15
GPU_PROCESS = 1.0 * GIB
NCCL = 0.5 * GIB


def needed_bytes(config: GPTConfig, rows: int, dtype: torch.dtype, ranks: int = 1, *args, **settings) -> float:
    """Bytes of a GPU's memory that training needs, margins included. Arguments as `step_bytes`."""
    process = GPU_PROCESS + NCCL if ranks > 1 else GPU_PROCESS
    return process + WASTE * step_bytes(config, rows, dtype, ranks, *args, **settings)


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
    (model,) = split_into_stages(config)
    states = state_bytes(2, ranks, gpu.dtype, model.adamw, model.muon)
    cache = 2 * config.n_layer * config.n_kv_head * config.head_dim * SLOTS * gpu.dtype.itemsize
    free = (gpu.memory * GIB - GPU_PROCESS - NCCL) / WASTE - states.parameters - states.optimizer
    return max(largest_rows(256, lambda rows: rows * cache <= free), 16)
