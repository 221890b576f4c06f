"""
What a training run keeps, in bytes per rank: the formulas. Beside measurements, docs/zero.md shows `state_bytes`,
docs/memory.md `step_bytes`.

Rajbhandari et al. 2020, arXiv:1910.02054, sections 5 and 7; here with gradients accumulated in float32 and with Muon,
which has one moment where AdamW has two. `ranks` share one copy of the sharded states (one shard group, no replicas).
"""
import math
from functools import cache
from typing import NamedTuple

import torch

from nanochat.attention import BLOCKWISE_MAX_LENGTH, query_blocks
from nanochat.gpt import GPT, GPTConfig
from nanochat.loss import chunk_rows
from nanochat.pipeline import stage_layers, stream_count

FLOAT32 = 4  # bytes: masters, moments and accumulated gradients, whatever the compute dtype
GIB = 2**30


class StateBytes(NamedTuple):
    """What a rank keeps between two micro-steps. A master that is the parameter's own memory counts as parameter."""

    parameters: float
    gradients: float
    optimizer: float  # masters and moments


def state_bytes(stage: int, ranks: int, dtype: torch.dtype, adamw: int, muon: int) -> StateBytes:
    """
    For so many parameters in AdamW's and in Muon's care. Per parameter of AdamW, in bfloat16 and in float32:

        stage 0    18           16
        stage 1    6 + 12/N     8 + 8/N
        stage 2    2 + 16/N     4 + 12/N
        stage 3    16/N         16/N

    Muon's are 4 less in what optimizer states share: 14, 6 + 8/N, 2 + 12/N, 12/N; 12, 8 + 4/N, 4 + 8/N, 12/N.
    The paper's 16, 4 + 12/N, 2 + 14/N and 16/N have gradients of 2 bytes: here micro-steps are summed in float32.
    """
    total, share = adamw + muon, 1 if stage == 0 else 1 / ranks
    parameters = FLOAT32 * share if stage == 3 else dtype.itemsize  # fully_shard keeps rows of float32: the masters
    gradients = FLOAT32 * share if stage >= 2 else FLOAT32
    masters = FLOAT32 if stage < 3 and dtype != torch.float32 else 0
    return StateBytes(parameters * total, gradients * total, (masters * total + FLOAT32 * (2 * adamw + muon)) * share)


# ---- A training step at its fullest moment


class StepBytes(NamedTuple):
    """Bytes that a rank holds on its device at the fullest moment of a training step; without the process itself."""

    state: float        # parameters, gradients, masters and moments
    activations: float  # what the forward pass saves for the backward pass
    transient: float    # the largest of: logits in flight, a block's backward pass, the optimizers' temporaries
    in_flight: float    # gradients and parameters on their way between ranks, and buffers of a pipeline
    saving: float       # on a CPU: the copies of a checkpoint being written while training goes on


@cache
def shaped(config: GPTConfig) -> GPT:
    """A model without memory."""
    with torch.device("meta"):
        return GPT(config)


class Part(NamedTuple):
    """What a pipeline stage has of a model; with one stage, the model."""

    layers: range
    units: list[int]    # parameters of embedding, blocks and head, as far as it has them
    largest: int        # of a tensor
    adamw: int          # parameters in its care
    muon: int
    flops: int          # per token, forward and backward; of all parts: GPT.estimate_flops
    shapes: int         # of its matrices: Muon sends those of one shape together
    products: list[int]     # FLOPs of orthogonalizing each matrix: five steps of three products


@cache
def parts(config: GPTConfig, pipeline_stages: int = 1) -> tuple[Part, ...]:
    """What each pipeline stage has. UserError for more stages than layers."""
    model, found = shaped(config), []
    roles = dict(zip(model.parameters(), model.roles().values(), strict=True))
    for layers in stage_layers(config, pipeline_stages):
        first, last = layers.start == 0, layers.stop == config.n_layer
        units = [list(unit.parameters()) for unit in model.units()[layers.start + (not first) : layers.stop + 1 + last]]
        matrices = [tuple(p.shape) for unit in units for p in unit if roles[p] == "matrix"]
        muon, counts = sum(map(math.prod, matrices)), [sum(p.numel() for p in unit) for unit in units]
        flops = 6 * (muon + last * counts[-1]) + 12 * config.n_embd * sum(map(config.window, layers))
        products = [5 * (4 * m * m * n + 2 * m**3) for m, n in map(sorted, matrices)]
        largest = max(p.numel() for unit in units for p in unit)
        found.append(Part(layers, counts, largest, sum(counts) - muon, muon, flops, len(set(matrices)),
                          products))
    return tuple(found)


def parameter_counts(config: GPTConfig) -> tuple[int, int]:
    """(AdamW's, Muon's) parameters."""
    (model,) = parts(config)
    return model.adamw, model.muon


def block_bytes(
    config: GPTConfig, layer: int, rows: int, dtype: torch.dtype, device_type: str, compiled: bool
) -> float:
    """
    What autograd saves of a block's forward pass. Per token, in elements of width C: the inputs of the two norms and
    their results, 4; what attention reads and writes; rotated queries and keys where it reads copies of them; relu and
    relu², 8; with residual scales the block's input, with gates of heads what they multiply; with value embeddings what
    was looked up, and the values. Besides the concatenated matrix of queries, keys and values. Eager norms on a CPU
    keep their inputs in float32.
    """
    b, T, C, kv_width = dtype.itemsize, config.sequence_len, config.n_embd, config.n_kv_head * config.head_dim
    tokens, heads, window = rows * T, config.n_head + config.n_kv_head, config.window(layer)
    values = shaped(config).transformer.h[layer].values is not None
    wide = FLOAT32 if device_type == "cpu" and not compiled else b
    saved = tokens * (wide * 2 * C + b * 11 * C + FLOAT32 * (2 + heads)) + b * C * (C + 2 * kv_width)
    saved += tokens * b * ((config.residual_scales + config.head_gates) * C + values * kv_width)
    saved += tokens * b * 2 * (config.head_gates * config.n_head + values * config.n_kv_head)
    whole = tokens * (C + 2 * kv_width)  # queries, keys and values of each head
    blockwise = device_type == "cpu" and T <= BLOCKWISE_MAX_LENGTH
    if blockwise and config.n_kv_head > 1 or config.qk_scale != 1:
        saved += b * tokens * (C + kv_width)
    if not blockwise:
        return saved + b * whole + tokens * FLOAT32 * config.n_head  # scaled_dot_product_attention
    scores = sum((end - start) * (end - first) for start, end, first in query_blocks(T, window))
    return saved + b * (whole + scores * rows * config.n_head)  # and the probabilities


def step_bytes(
    config: GPTConfig, rows: int, dtype: torch.dtype, device_type: str, compiled: bool = True,
    checkpointing: bool = False, stage: int = 2, ranks: int = 1, pipeline_stages: int = 1, micro_steps: int = 1,
) -> StepBytes:
    """
    Of `rows` rows of config.sequence_len tokens per rank and micro-step, on a rank of the pipeline stage that holds
    most. From reading what is saved and what is alive: the sum is within a few percent of the tensors'
    (tests/test_doctor.py); what the allocator wastes and what the process itself needs comes on top (`needed_bytes`).
    """
    settings = config, rows, dtype, device_type, compiled, checkpointing, stage, ranks
    every = [part_bytes(part, min(pipeline_stages - number, micro_steps), micro_steps, *settings)
             for number, part in enumerate(parts(config, pipeline_stages))]
    return max(every, key=sum)


def part_bytes(
    part: Part, kept: int, micro_steps: int, config: GPTConfig, rows: int, dtype: torch.dtype, device_type: str,
    compiled: bool, checkpointing: bool, stage: int, ranks: int,
) -> StepBytes:
    """Of a pipeline stage that keeps the activations of `kept` micro-batches of an optimizer step's micro_steps."""
    b, C, V, L = dtype.itemsize, config.n_embd, config.padded_vocab_size, config.n_layer
    tokens, layers = rows * config.sequence_len, part.layers
    first, last = layers.start == 0, layers.stop == L
    width, head = tokens * C * b, FLOAT32 * V * C  # a residual stream; the head's gradient in float32
    state = state_bytes(stage, ranks, dtype, part.adamw, part.muon)
    share = 1 if stage == 0 else ranks

    blocks = [block_bytes(config, layer, rows, dtype, device_type, compiled) for layer in layers]
    wide = FLOAT32 / b if device_type == "cpu" and not compiled else 1
    rotation = FLOAT32 * config.sequence_len * config.head_dim
    # Beside the blocks: the norms at both ends; bigram vectors; what the smear adds; the middle of the model where no
    # block keeps its input. A stage keeps what it sent on, too.
    ends = (first + last) * wide + first * (bool(config.bigrams) + 2 * config.smear) + (not last)
    ends += layers.stop > L // 2 and config.backout and not config.residual_scales
    saved = (len(layers) * width if checkpointing else sum(blocks)) + ends * width + rotation
    activations = kept * saved

    # The loss: gradients of its input and of the head, logits in flight, beside the chunk before if there is one; then
    # the same gradients, scaled.
    logits = V * chunk_rows(tokens, V, device_type)
    before = b * logits if tokens * V > logits else 0
    eager = (b + 4 * FLOAT32) * logits + before
    working = max(2 * b * logits + before, 2 * b * logits + b * V * C) if compiled else eager
    loss = last * (head + 2 * width + max(working, head + width))
    backward = 12 * width + (max(blocks) if checkpointing else 0)
    # The optimizers: all updates of Muon, and of one shape what Newton-Schulz makes of it; AdamW's two temporaries.
    shard = min(part.largest, max(part.units) / share)
    optimizers = max((2.7 + (1 if share > 1 else 0)) * b * part.muon / share, 2 * FLOAT32 * shard) - activations
    transient = max(loss, backward, optimizers)

    three = max(sum(part.units[i : i + 3]) for i in range(max(len(part.units) - 2, 1)))  # two on their way, and one
    whole = FLOAT32 * max(part.units), FLOAT32 * three, 2 * FLOAT32 * three, (2 * FLOAT32 + b) * three  # 2: and buffers
    # Gradients travel when the last micro-batch alone is kept. The schedule has a buffer for each micro-batch's streams
    # and gradients; what the first block keeps is in one of them.
    in_flight = 0 if ranks == 1 else max(whole[stage] - (kept - 1) * saved, 0)
    received = 0 if first else micro_steps * stream_count(config, layers.start) - kept
    in_flight += width * (received + (0 if last else micro_steps * stream_count(config, layers.stop)))
    saving = b * sum(part.units) + state.optimizer if device_type == "cpu" else 0
    return StepBytes(sum(state), activations, transient, in_flight, saving)


# ---- A process on a device: the step, what the process itself needs, and what allocators waste

# Measured (docs/memory.md): what a process needs on a CPU before it has a model, and once it has compiled; and what
# allocators take for each byte of a tensor: in glibc's heap the many temporaries of one size leave holes.
PROCESS, HEAP_BLOCK, HEAP_WASTE, WASTE = {False: 400e6, True: 570e6}, 2**25, {False: 2.3, True: 1.5}, 1.15
# Guesses, for a GPU that is not here: its context, cuBLAS and the code of kernels; NCCL's buffers.
GPU_PROCESS, NCCL = 1.0 * GIB, 0.5 * GIB


def needed_bytes(
    config: GPTConfig, rows: int, dtype: torch.dtype, device_type: str, compiled: bool, ranks: int = 1, **settings
) -> float:
    """What training needs on a rank, margins included. settings: as in `step_bytes`."""
    step = sum(step_bytes(config, rows, dtype, device_type, compiled, ranks=ranks, **settings))
    if device_type != "cpu":
        return GPU_PROCESS + (NCCL if ranks > 1 else 0) + WASTE * step
    in_heap = rows * config.sequence_len * config.n_embd * dtype.itemsize < HEAP_BLOCK
    return PROCESS[compiled] + (HEAP_WASTE[compiled] if in_heap else WASTE) * step


def largest_rows(limit: float, most: int, config: GPTConfig, *args, **settings) -> int:
    """The largest power of two of rows up to `most` that fits into so many bytes; 0: none. args as `needed_bytes`."""
    rows = 2 ** int(math.log2(most))
    while rows and needed_bytes(config, rows, *args, **settings) > limit:
        rows //= 2
    return rows
