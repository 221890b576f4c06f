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

from nanochat.model.attention import BLOCKWISE_MAX_LENGTH, query_blocks
from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import GPTConfig
from nanochat.model.loss import chunk_rows
from nanochat.optim.pipeline import stage_layers

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


# ---- A training step, moment by moment


class StepBytes(NamedTuple):
    """Bytes of the tensors that a rank holds on its device at a moment of a training step."""

    kept: float         # parameters, masters and moments; buffers of a pipeline
    gradients: float    # summed so far, on their way between ranks, and stage 3's gathered parameters
    activations: float  # what the forward pass has saved and the backward pass still needs
    temporary: float    # of the loss, of a block's backward pass, or of the optimizers
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
    their results, 4; what attention reads and writes; rotated queries and keys where it reads copies of them; relu², 4;
    with value embeddings what was looked up, and the values. Besides the concatenated matrix of queries, keys and
    values. Eager norms on a CPU keep their inputs in float32.
    """
    b, T, C, kv_width = dtype.itemsize, config.sequence_len, config.n_embd, config.n_kv_head * config.head_dim
    tokens, heads, window = rows * T, config.n_head + config.n_kv_head, config.window(layer)
    values = shaped(config).transformer.h[layer].values is not None
    wide = FLOAT32 if device_type == "cpu" and not compiled else b
    saved = tokens * (wide * 2 * C + b * 7 * C + FLOAT32 * (2 + heads)) + b * C * (C + 2 * kv_width)
    saved += tokens * b * values * (kv_width + 2 * config.n_kv_head)
    whole = tokens * (C + 2 * kv_width)  # queries, keys and values of each head
    blockwise = device_type == "cpu" and T <= BLOCKWISE_MAX_LENGTH
    if blockwise and config.n_kv_head > 1 or config.qk_scale != 1:
        saved += b * tokens * (C + kv_width)
    if not blockwise:
        return saved + b * whole + tokens * FLOAT32 * config.n_head  # scaled_dot_product_attention
    scores = sum((end - start) * (end - first) for start, end, first in query_blocks(T, window))
    return saved + b * (whole + scores * rows * config.n_head)  # and the probabilities


def gradient_bytes(
    units: list[int], done: int, stage: int, ranks: int, itemsize: int, several: bool
) -> float:
    """
    Of gradients when the backward pass has left units[done:] behind it; in the last micro-step of one or `several`. On
    more ranks the last two units' travel whole (`zero.MAX_IN_FLIGHT`); on stage 2 those of the micro-step before still
    do when the backward pass begins. On stage 3 one unit's do, and parameters count that have been gathered: of the
    unit at hand and of the one before it, which is next.
    """
    finished, everything = sum(units[done:]), sum(units)
    if ranks == 1 or stage == 0:
        return FLOAT32 * (everything if several else finished)
    summed = FLOAT32 / ranks * (everything if several and stage > 1 else finished)
    waiting = FLOAT32 * sum(units[:done]) if several and stage == 1 else 0  # for the last micro-step, whole
    sent = [*units[done:], *(units if several and stage == 2 else ())][: 1 if stage == 3 else 2]
    gathered = units[max(done - 2, 0) : done] if done < len(units) else units[-1:]
    return summed + waiting + FLOAT32 * (1 + 1 / ranks) * sum(sent) + (itemsize * sum(gathered) if stage == 3 else 0)


def moments(
    config: GPTConfig, rows: int, dtype: torch.dtype, device_type: str, compiled: bool = True,
    checkpointing: bool = False, stage: int = 2, ranks: int = 1, micro_steps: int = 2,
    pipeline: tuple[int, int] = (0, 1),
) -> dict[str, StepBytes]:
    """
    Of the last micro-step and of the update, in this order, those that can be the fullest: rows of config.sequence_len
    tokens per rank and micro-step. From reading what is saved and what is alive: within 2% of the tensors' bytes
    (tests/test_doctor.py, tests/test_gpu_dry_run.py); what the allocator wastes and what the process itself needs comes
    on top (`needed_bytes`). pipeline: (number of the rank's stage, stages). A stage that keeps several micro-batches is
    fullest before the last one, whose gradients alone travel: as soon as it keeps them.
    """
    number, stages = pipeline
    part, ahead = parts(config, stages)[number], min(stages - number, micro_steps)
    units, layers, first, last = part.units, part.layers, number == 0, number == stages - 1
    b, C, V, L = dtype.itemsize, config.n_embd, config.padded_vocab_size, len(layers)
    tokens, (adamw, muon) = rows * config.sequence_len, (part.adamw, part.muon)
    width, head = tokens * C * b, FLOAT32 * V * C  # a residual stream; the head's gradient in float32
    state = state_bytes(stage, ranks, dtype, adamw, muon)
    # PyTorch's schedule has a buffer for the stream and its gradient of each micro-batch; what the first block keeps of
    # its input is one of them.
    received = 0 if first else micro_steps - ahead
    buffers = width * (received + (0 if last else micro_steps))
    kept, share = state.parameters + state.optimizer + buffers, 1 if stage == 0 else ranks
    saving = b * (adamw + muon) + state.optimizer if device_type == "cpu" else 0

    # Beside what the blocks save: the norms at both ends; what the smear adds; what a stage sent to the next.
    blocks = [block_bytes(config, layer, rows, dtype, device_type, compiled) for layer in layers]
    wide = FLOAT32 / b if device_type == "cpu" and not compiled else 1
    ends = (first + last) * wide + first * 2 * config.smear + (not last)
    around = ends * width + FLOAT32 * config.sequence_len * config.head_dim
    saved = [around + (layer * width if checkpointing else sum(blocks[:layer])) for layer in range(L + 1)]

    def moment(done: int, activations: float, temporary: float) -> StepBytes:
        gradients = gradient_bytes(units, done, stage, ranks, b, micro_steps > 1)
        if ahead > 1:  # at the first backward pass nothing is summed, at the second one micro-batch less is kept
            less = saved[L] if ahead == micro_steps else 0
            gradients = max(FLOAT32 * sum(units) - less, FLOAT32 * sum(units[done:]))
        return StepBytes(kept, gradients, activations + (ahead - 1) * saved[L], temporary, saving)

    # The loss: gradients of its input and of the head, and logits, beside the chunk before if there is one. Then the
    # same gradients, scaled. A block: temporaries of its backward pass, or its gradients before they are summed.
    # The optimizers: all updates of Muon, and of one shape what Newton-Schulz makes of it; AdamW's two temporaries.
    logits = V * chunk_rows(tokens, V, device_type)
    before = b * logits if tokens * V > logits else 0
    fused = max(2 * b * logits + before, 2 * b * logits + b * V * C)
    found = {} if not last else {
        "loss": moment(len(units), saved[L], head + 2 * width
                       + (fused if compiled else (b + 4 * FLOAT32) * logits + before)),
        "backward, head": moment(len(units), saved[L], 2 * head + 3 * width)}
    for layer in reversed(range(L)):
        again = blocks[layer] if checkpointing else 0
        unit = layer + first
        # 26: measured on a CPU (docs/memory.md); which tensors they are has not been looked into.
        temporaries = 26 if device_type == "cpu" and compiled and b < FLOAT32 else 12
        temporary = max(temporaries * width + again, b * units[unit])
        found[f"backward, block {layers[layer]}"] = moment(unit + 1, saved[layer + 1], temporary)
    shard = min(part.largest, max(units) / share)
    update = max((2.7 + (1 if share > 1 else 0)) * b * muon / share, 2 * FLOAT32 * shard)
    whole = FLOAT32 * (adamw + muon) / share
    return found | {"update": StepBytes(kept, whole, 0, update, saving)}


def step_bytes(*args, pipeline_stages: int = 1, **settings) -> StepBytes:
    """The fullest of `moments`, which has the same arguments, in the pipeline stage that has it."""
    found = [moments(*args, pipeline=(number, pipeline_stages), **settings) for number in range(pipeline_stages)]
    return max((moment for of_stage in found for moment in of_stage.values()), key=sum)


# ---- A process on a device: the step, what the process itself needs, and what allocators waste

# Measured (docs/memory.md): what a process needs on a CPU before it has a model, and once it has compiled; and what
# allocators take for each byte of a tensor: in glibc's heap the many temporaries of one size leave holes.
PROCESS, HEAP_BLOCK, HEAP_WASTE, WASTE = {False: 400e6, True: 600e6}, 2**25, {False: 2.3, True: 1.5}, 1.15
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
