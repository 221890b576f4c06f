"""
Formulas for the memory of a training run, in bytes per rank. docs/zero.md compares `state_bytes` with measurements,
docs/memory.md `moments`.

Rajbhandari et al. 2020, arXiv:1910.02054, sections 5 and 7; here with gradients accumulated in float32 and with Muon,
which has one moment where AdamW has two. `ranks` share one copy of the sharded states (one shard group, no replicas).
"""
import itertools
import math
from functools import cache
from typing import NamedTuple

import torch

from nanochat.model.attention import BLOCKWISE_MAX_LENGTH, query_blocks
from nanochat.model.gpt import model_without_memory
from nanochat.model.gpt_config import GPTConfig
from nanochat.model.loss import chunk_rows
from nanochat.optim.pipeline import stage_layers

FLOAT32 = 4  # bytes: masters, moments and accumulated gradients, for any compute dtype
GIB = 2**30


class StateBytes(NamedTuple):
    """What a rank keeps between two micro-steps. A master that is the parameter's own memory counts as parameter."""

    parameters: float
    gradients: float
    optimizer: float  # masters and moments


def state_bytes(zero_stage: int, ranks: int, dtype: torch.dtype, adamw: int, muon: int) -> StateBytes:
    """
    adamw, muon: parameters in the optimizers' care. Bytes per parameter of AdamW, in bfloat16 and in float32:

        stage 0    18           16
        stage 1    6 + 12/N     8 + 8/N
        stage 2    2 + 16/N     4 + 12/N
        stage 3    16/N         16/N

    Muon's are 4 less in what optimizer states share: 14, 6 + 8/N, 2 + 12/N, 12/N; 12, 8 + 4/N, 4 + 8/N, 12/N.
    The paper's 16, 4 + 12/N, 2 + 14/N and 16/N have gradients of 2 bytes: here micro-steps are summed in float32.
    """
    total = adamw + muon
    share = 1 if zero_stage == 0 else 1 / ranks
    parameters = FLOAT32 * share if zero_stage == 3 else dtype.itemsize  # fully_shard keeps the masters' float32 rows
    gradients = FLOAT32 * share if zero_stage >= 2 else FLOAT32
    masters = FLOAT32 if zero_stage < 3 and dtype != torch.float32 else 0
    moments = FLOAT32 * (2 * adamw + muon)
    return StateBytes(parameters * total, gradients * total, (masters * total + moments) * share)


# ---- A training step, moment by moment

shaped = cache(model_without_memory)  # one for each config: it is looked at only


class PipelineStage(NamedTuple):
    """The part of a model that a pipeline stage has; with one stage, the model."""

    layers: range
    units: list[int]    # parameters of embedding, blocks and head, as far as it has them
    largest: int        # of a tensor
    adamw: int          # parameters in its care
    muon: int
    flops: int          # per token, forward and backward; of all stages: GPT.estimate_flops
    products: list[int]     # FLOPs of orthogonalizing each matrix: five steps of three products


@cache
def split_into_stages(config: GPTConfig, pipeline_stages: int = 1) -> tuple[PipelineStage, ...]:
    """UserError for more stages than layers."""
    model = shaped(config)
    roles = dict(zip(model.parameters(), model.roles().values(), strict=True))
    stages = []
    for layers in stage_layers(config, pipeline_stages):
        # model.units(): the embedding, the blocks, the head
        first = 0 if layers.start == 0 else layers.start + 1
        last = layers.stop + 2 if layers.stop == config.n_layer else layers.stop + 1
        units = [list(unit.parameters()) for unit in model.units()[first:last]]
        parameters = list(itertools.chain.from_iterable(units))
        matrices = [tuple(p.shape) for p in parameters if roles[p] == "matrix"]
        muon = sum(map(math.prod, matrices))
        counts = [sum(p.numel() for p in unit) for unit in units]
        head = counts[-1] if layers.stop == config.n_layer else 0
        flops = 6 * (muon + head) + 12 * config.n_embd * sum(map(config.window, layers))
        products = [5 * (4 * m * m * n + 2 * m**3) for m, n in map(sorted, matrices)]
        largest = max(p.numel() for p in parameters)
        stages.append(PipelineStage(layers, counts, largest, sum(counts) - muon, muon, flops, products))
    return tuple(stages)


def block_bytes(
    config: GPTConfig, layer: int, rows: int, dtype: torch.dtype, device_type: str, compiled: bool
) -> float:
    """
    Bytes that autograd saves in a block's forward pass. Per token, in elements of width C: the inputs of the two norms
    and their results, 4; inputs and output of attention; rotated queries and keys where it reads copies of them;
    relu², 4; with value embeddings the rows looked up, and the values; with scales the stream before them, which code
    compiled for a GPU scales again instead. Besides the concatenated matrix of queries, keys and values. Eager norms on
    a CPU keep their inputs in float32.
    """
    b = dtype.itemsize
    T = config.sequence_len
    C = config.n_embd
    kv_width = config.n_kv_head * config.head_dim
    tokens = rows * T
    heads = config.n_head + config.n_kv_head
    wide = FLOAT32 if device_type == "cpu" and not compiled else b
    saved = tokens * (wide * 2 * C + b * 7 * C + FLOAT32 * (2 + heads)) + b * C * (C + 2 * kv_width)
    if shaped(config).transformer.h[layer].values is not None:
        saved += tokens * b * (kv_width + 2 * config.n_kv_head)
    if config.stream_scales and (device_type == "cpu" or not compiled):
        saved += tokens * b * C
    whole = tokens * (C + 2 * kv_width)  # queries, keys and values of each head
    blockwise = device_type == "cpu" and T <= BLOCKWISE_MAX_LENGTH
    if blockwise and config.n_kv_head > 1:
        saved += b * tokens * (C + kv_width)
    if not blockwise:
        saved += b * tokens * kv_width * config.offsets_keys(layer)
        return saved + b * whole + tokens * FLOAT32 * config.n_head  # scaled_dot_product_attention
    blocks = query_blocks(T, config.window(layer))
    scores = sum((end - start) * (end - first) for start, end, first in blocks)
    return saved + b * (whole + scores * rows * config.n_head)  # and the probabilities


def gradient_bytes(
    units: list[int], done: int, zero_stage: int, ranks: int, itemsize: int, several: bool
) -> float:
    """
    Bytes of gradients in the last micro-step, when the backward pass has finished units[done:]. several: the step has
    more than one micro-step. With more than one rank, the two units finished last still hold whole gradients, which are
    being sent (`zero.MAX_IN_FLIGHT`); on stage 2 these may be units of the micro-step before. On stage 3 only one
    unit's gradients are being sent, and the gathered parameters count, too: of the unit whose backward pass is next,
    and of the one after it.
    """
    if ranks == 1:
        zero_stage = 0
    kept = sum(units[done:])
    if several and zero_stage != 1:
        kept = sum(units)
    if zero_stage == 0:
        return FLOAT32 * kept
    travelling = units[done : done + 2]
    more = 0
    if zero_stage == 1 and several:
        more = FLOAT32 * sum(units[:done])  # they wait for the last micro-step, whole
    if zero_stage == 2 and several:
        travelling = (units[done:] + units)[:2]
    if zero_stage == 3:
        travelling = units[done : done + 1]
        gathered = units[max(done - 2, 0) : done] if done < len(units) else units[-1:]
        more = itemsize * sum(gathered)
    return FLOAT32 / ranks * kept + FLOAT32 * (1 + 1 / ranks) * sum(travelling) + more


def moments(
    config: GPTConfig, rows: int, dtype: torch.dtype, device_type: str, compiled: bool = True,
    checkpointing: bool = False, zero_stage: int = 2, ranks: int = 1, micro_steps: int = 2,
    pipeline: tuple[int, int] = (0, 1),
) -> tuple[float, dict[str, float]]:
    """
    Bytes of the tensors that a rank holds on its device: from step to step (parameters, masters and moments; buffers of
    a pipeline; on a CPU the copies of a checkpoint being written), and besides, at the moments of the last micro-step
    and of the update at which memory can be fullest, in their order: gradients, what the forward pass has saved, and
    temporaries. rows: of config.sequence_len tokens, per rank and micro-step. pipeline: (number of the rank's stage,
    stages).

    Derived from the code, tensor by tensor, and within 2% of the tensors' bytes (tests/test_doctor.py,
    tests/test_gpu_dry_run.py). The allocator's waste and the process itself come on top (`needed_bytes`).
    """
    number, stages = pipeline
    stage = split_into_stages(config, stages)[number]
    units = stage.units
    layers = stage.layers
    first = number == 0
    last = number == stages - 1
    b = dtype.itemsize
    V = config.padded_vocab_size
    L = len(layers)
    tokens = rows * config.sequence_len
    width = tokens * config.n_embd * b  # a residual stream
    head = FLOAT32 * V * config.n_embd  # the head's gradient
    state = state_bytes(zero_stage, ranks, dtype, stage.adamw, stage.muon)
    # PyTorch's schedule has a buffer for the streams of each micro-batch, there and back.
    neighbours = 2 - first - last
    kept = state.parameters + state.optimizer + width * config.streams * micro_steps * neighbours
    share = 1 if zero_stage == 0 else ranks
    saving = b * (stage.adamw + stage.muon) + state.optimizer if device_type == "cpu" else 0

    # Besides the blocks: the norms at both ends; two tensors of the smear; a stage's output, sent to the next one.
    blocks = [block_bytes(config, layer, rows, dtype, device_type, compiled) for layer in layers]
    wide = FLOAT32 / b if device_type == "cpu" and not compiled else 1
    ends = (first + last) * wide
    if first:
        ends += 2 * config.smear
    if not last:
        ends += config.streams
    around = ends * width + FLOAT32 * config.sequence_len * config.head_dim
    saved = [around + (layer * width if checkpointing else sum(blocks[:layer])) for layer in range(L + 1)]

    def moment(done: int, activations: float, temporary: float) -> float:
        if stages == 1:
            gradients = gradient_bytes(units, done, zero_stage, ranks, b, micro_steps > 1)
        else:  # activations of the micro-batches whose backward passes are still to come
            gradients = FLOAT32 * sum(units)
            activations += (min(stages - number, micro_steps) - 1) * saved[L]
        return gradients + activations + temporary

    found = {}
    if last:
        # Gradients of the loss's input and of the head, and logits, beside the chunk before if there is one.
        logits = V * chunk_rows(tokens, V, device_type)
        before = b * logits if tokens * V > logits else 0
        if compiled:
            of_loss = 2 * b * logits + max(before, b * V * config.n_embd)
        else:
            of_loss = (b + 4 * FLOAT32) * logits + before
        found["loss"] = moment(len(units), saved[L], head + 2 * width + of_loss)
        found["backward, head"] = moment(len(units), saved[L], 2 * head + 3 * width)  # the same gradients, scaled
    for layer in reversed(range(L)):
        # Temporaries of a block's backward pass, or its gradients before they are summed. 10: at most, counted in the
        # code that is compiled for an H100. 26: measured on a CPU (docs/memory.md); which tensors is not known.
        if compiled and device_type != "cpu":
            widths = 10
        else:
            widths = 26 if compiled and b < FLOAT32 else 12
            widths += config.streams - 1  # sums of gradients of the first block's input and of the middle
        temporary = widths * width
        if checkpointing:
            temporary += blocks[layer]
        unit = layer + first
        found[f"backward, block {layers[layer]}"] = moment(
            unit + 1, saved[layer + 1], max(temporary, b * units[unit]))
    # The optimizers: all updates of Muon, and of one shape the products of Newton-Schulz; AdamW's two temporaries.
    shard = min(stage.largest, max(units) / share)
    updates = 3.7 if share > 1 else 2.7
    temporary = max(updates * b * stage.muon / share, 2 * FLOAT32 * shard)
    found["update"] = FLOAT32 * (stage.adamw + stage.muon) / share + temporary
    return kept + saving, found


# ---- A process on a device: the step, the process itself, and the waste of allocators

# Measured (docs/memory.md): bytes that allocators take for each byte of a tensor. In glibc's heap the many temporaries
# of one size leave holes, of which an eager step has more. Guessed for a GPU that is not here: its context, cuBLAS and
# the code of kernels; NCCL's buffers.
WASTE = 1.15
HEAP_WASTE = {False: 2.3, True: 1.5}    # by whether the model is compiled
HEAP_BLOCK = 2**25
CPU_PROCESS = {False: 400e6, True: 600e6}
GPU_PROCESS = 1.0 * GIB
NCCL = 0.5 * GIB


def needed_bytes(
    config: GPTConfig, rows: int, dtype: torch.dtype, device_type: str, compiled: bool, ranks: int = 1,
    pipeline_stages: int = 1, **settings
) -> float:
    """Bytes that training needs on a rank, margins included. settings: as in `moments`."""
    step = 0.0  # at the fullest moment, in the pipeline stage that has it
    for number in range(pipeline_stages):
        kept, found = moments(config, rows, dtype, device_type, compiled, ranks=ranks,
                              pipeline=(number, pipeline_stages), **settings)
        step = max(step, kept + max(found.values()))
    if device_type != "cpu":
        process = GPU_PROCESS + NCCL if ranks > 1 else GPU_PROCESS
        return process + WASTE * step
    in_heap = rows * config.sequence_len * config.n_embd * dtype.itemsize < HEAP_BLOCK
    return CPU_PROCESS[compiled] + step * (HEAP_WASTE[compiled] if in_heap else WASTE)


def largest_rows(limit: float, most: int, config: GPTConfig, *args, **settings) -> int:
    """The largest power of two of rows up to `most` that fits into `limit` bytes; 0: none. args as `needed_bytes`."""
    rows = 2 ** int(math.log2(most))
    while rows and needed_bytes(config, rows, *args, **settings) > limit:
        rows //= 2
    return rows
