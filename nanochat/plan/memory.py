"""
Formulas for the memory of a training run, in bytes per rank. docs/zero.md compares `state_bytes` with measurements,
docs/memory.md `RankMemory`.

Rajbhandari et al. 2020, arXiv:1910.02054, sections 5 and 7; here with gradients accumulated in float32 and with Muon,
which has one moment where AdamW has two. `ranks` share one copy of the sharded states (one shard group, no replicas).
"""
import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from nanochat.model.attention import BLOCKWISE_MAX_LENGTH, query_blocks
from nanochat.model.gpt import model_without_memory
from nanochat.model.gpt_config import LARGE_DEPTH, GPTConfig
from nanochat.model.loss import chunk_rows
from nanochat.optim.pipeline import stage_layers

FLOAT32 = 4  # bytes: masters, moments and accumulated gradients, for any compute dtype
GIB = 2**30


class StateBytes(NamedTuple):
    """What a rank keeps between two micro-steps. A master that is the parameter's own memory counts as parameter."""

    parameters: float
    gradients: float
    optimizer: float  # masters and moments


def state_bytes(
    zero_stage: int, ranks: int, dtype: torch.dtype, adamw: int, muon: int, look_ahead: bool = False
) -> StateBytes:
    """
    adamw, muon: parameters that each updates. Bytes per parameter of AdamW, in bfloat16 and in float32:

        stage 0    18           16
        stage 1    6 + 12/N     8 + 8/N
        stage 2    2 + 16/N     4 + 12/N
        stage 3    16/N         16/N

    Muon's optimizer state has 4 bytes less: 14, 6 + 8/N, 2 + 12/N, 12/N; 12, 8 + 4/N, 4 + 8/N, 12/N. look_ahead adds
    4 bytes to both optimizer states.
    The paper's 16, 4 + 12/N, 2 + 14/N and 16/N have gradients of 2 bytes: here micro-steps are summed in float32.
    """
    total = adamw + muon
    share = 1 if zero_stage == 0 else 1 / ranks
    parameters = FLOAT32 * share if zero_stage == 3 else dtype.itemsize  # fully_shard keeps the masters' float32 rows
    gradients = FLOAT32 * share if zero_stage >= 2 else FLOAT32
    masters = FLOAT32 if zero_stage < 3 and dtype != torch.float32 else 0
    moments = FLOAT32 * (2 * adamw + muon + look_ahead * total)
    return StateBytes(parameters * total, gradients * total, (masters * total + moments) * share)


# ---- A training step, moment by moment

shaped = cache(model_without_memory)  # one for each config, never changed


class PipelineStage(NamedTuple):
    """The part of a model that a pipeline stage has; with one stage, the model."""

    layers: range
    units: list[int]    # parameters of each unit: embedding, blocks, head, if present
    largest: int        # parameters of the largest tensor
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
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        counts = [sum(p.numel() for p in unit.parameters()) for unit in model.units()]
        muon = model.count_parameters("matrix")
        flops = 6 * model.count_parameters("matrix", "head") + 12 * config.n_embd * sum(map(config.window, layers))
        products = []
        for name, shape in shapes.items():
            if roles[name] == "matrix":
                m, n = sorted(shape)
                products.append(5 * (4 * m * m * n + 2 * m**3))
        largest = max(map(math.prod, shapes.values()))
        stages.append(PipelineStage(
            layers, [count for count in counts if count], largest, sum(counts) - muon, muon, flops, products))
    return tuple(stages)


@dataclass
class RankMemory:
    """
    What one rank of a pipeline stage holds on its device during a training step: states from step to step, and at each
    moment gradients, activations (saved for the backward pass) and temporaries. All in bytes.

    Derived from the code, tensor by tensor, and within 2% of the tensors' bytes (tests/test_doctor.py,
    tests/test_gpu_dry_run.py).
    """

    config: GPTConfig
    rows: int               # of config.sequence_len tokens, per rank and micro-step
    dtype: torch.dtype
    device_type: str
    compiled: bool = True
    ranks: int = 1          # that share one copy of the states
    checkpointing: bool = False
    zero_stage: int = 2
    micro_steps: int = 2
    pipeline_stages: int = 1
    number: int = 0         # of this rank's pipeline stage

    def __post_init__(self):
        self.stage = split_into_stages(self.config, self.pipeline_stages)[self.number]
        self.is_first = self.number == 0
        self.is_last = self.number == self.pipeline_stages - 1
        self.on_cpu = self.device_type == "cpu"
        self.share = 1 if self.zero_stage == 0 else self.ranks
        self.tokens = self.rows * self.config.sequence_len
        self.itemsize = self.dtype.itemsize
        self.stream = self.tokens * self.config.n_embd * self.itemsize  # a residual stream
        # An eager norm on a CPU keeps its input in float32, whatever the dtype.
        self.norm_itemsize = FLOAT32 if self.on_cpu and not self.compiled else self.itemsize
        self.blocks = [self.saved_by_block(layer) for layer in self.stage.layers]

    def states(self) -> float:
        """Kept between steps: parameters, masters, moments; on a CPU also copies for a checkpoint being written."""
        stage = self.stage
        # As in a run of LONG steps; a shorter one does not look ahead.
        look_ahead = self.config.n_layer >= LARGE_DEPTH
        state = state_bytes(self.zero_stage, self.ranks, self.dtype, stage.adamw, stage.muon, look_ahead)
        copies = self.itemsize * (stage.adamw + stage.muon) + state.optimizer if self.on_cpu else 0
        # PyTorch's pipeline has a buffer for the streams of each micro-batch, there and back, for each neighbour.
        neighbours = 2 - self.is_first - self.is_last
        buffers = self.stream * self.config.streams * self.micro_steps * neighbours
        return state.parameters + state.optimizer + copies + buffers

    def saved_by_block(self, layer: int) -> float:
        """
        What autograd saves in a block's forward pass. Per token, in elements of width C: the inputs of the two norms
        and their results, 4; inputs and output of attention; rotated queries and keys where attention copies them;
        relu², 4; with value embeddings the rows looked up, and the values; with scales the stream before scaling, which
        code compiled for a GPU scales again instead.
        """
        config = self.config
        b = self.itemsize
        C = config.n_embd
        kv_width = config.n_kv_head * config.head_dim
        qkv = b * (C + 2 * kv_width)  # queries, keys and values of each head
        per_token = 2 * self.norm_itemsize * C + 7 * b * C + FLOAT32 * (2 + config.n_head + config.n_kv_head) + qkv
        if shaped(config).transformer.h[layer].values is not None:
            per_token += b * (kv_width + 2 * config.n_kv_head)
        if config.stream_scales and (self.on_cpu or not self.compiled):
            per_token += b * C
        scores = 0
        if self.on_cpu and config.sequence_len <= BLOCKWISE_MAX_LENGTH:
            if config.n_kv_head > 1:
                per_token += b * (C + kv_width)
            # Probabilities: a block of queries sees the keys from `first` on.
            blocks = query_blocks(config.sequence_len, config.window(layer))
            scores = sum((end - start) * (end - first) for start, end, first in blocks)
        else:  # scaled_dot_product_attention saves one float32 per query and head, and no probabilities
            per_token += b * kv_width * config.offsets_keys(layer) + FLOAT32 * config.n_head
        concatenated = C * qkv  # the matrix of queries, keys and values: once, not per token
        return self.tokens * per_token + self.rows * b * scores * config.n_head + concatenated

    def activations(self, layers: int) -> float:
        """Saved for one micro-batch while these first layers of the stage still wait for the backward pass."""
        # Besides the blocks: the norms at both ends; two tensors of the smear; a stage's output, sent to the next one.
        ends = (self.is_first + self.is_last) * self.norm_itemsize / self.itemsize
        if self.is_first:
            ends += 2 * self.config.smear
        if not self.is_last:
            ends += self.config.streams
        rotations = FLOAT32 * self.config.sequence_len * self.config.head_dim
        blocks = layers * self.stream if self.checkpointing else sum(self.blocks[:layers])
        return ends * self.stream + rotations + blocks

    def gradients(self, done: int) -> float:
        """In the last micro-step, when the backward pass has finished units[done:]."""
        units = self.stage.units
        finished = units[done:]
        several = self.micro_steps > 1
        summed = units if several else finished  # earlier micro-steps have left a sum of every unit
        if self.pipeline_stages > 1:
            return FLOAT32 * sum(units)
        if self.share == 1:
            return FLOAT32 * sum(summed)
        # The two units finished last still hold whole gradients, which are being sent (`zero.MAX_IN_FLIGHT`).
        travelling = finished[:2]
        more = 0
        if self.zero_stage == 1:  # the sums of earlier micro-steps wait for the last one, whole
            summed = finished
            more = FLOAT32 * sum(units[:done]) if several else 0
        elif self.zero_stage == 2 and several:  # units of the micro-step before may still be travelling
            travelling = (finished + units)[:2]
        elif self.zero_stage == 3:
            # Only one unit is being sent. Gathered parameters count, too: those of the next two units of the backward
            # pass.
            travelling = finished[:1]
            gathered = units[max(done - 2, 0) : done] if finished else units[-1:]
            more = self.itemsize * sum(gathered)
        return FLOAT32 / self.ranks * sum(summed) + FLOAT32 * (1 + 1 / self.ranks) * sum(travelling) + more

    def moment(self, units: int, layers: int, temporary: float) -> float:
        """The sum while these first units and layers still wait for the backward pass."""
        # In a pipeline, later micro-batches have done their forward passes: one for each stage from here to the end.
        waiting = min(self.pipeline_stages - self.number, self.micro_steps) - 1
        activations = self.activations(layers) + waiting * self.activations(len(self.blocks))
        return self.gradients(units) + activations + temporary

    def loss_temporaries(self) -> float:
        """Gradients of the loss's input and of the head, and logits, also the previous chunk's, if any."""
        V = self.config.padded_vocab_size
        b = self.itemsize
        head = V * self.config.n_embd
        logits = V * chunk_rows(self.tokens, V, self.device_type)
        before = b * logits if self.tokens * V > logits else 0
        if self.compiled:
            chunks = 2 * b * logits + max(before, b * head)
        else:
            chunks = (b + 4 * FLOAT32) * logits + before
        return FLOAT32 * head + 2 * self.stream + chunks

    def block_temporaries(self, index: int) -> float:
        """Temporaries of a block's backward pass, or its gradients before their sum."""
        # 10 streams: the most, counted in the code compiled for an H100. 26: measured on a CPU (docs/memory.md); it is
        # not known which tensors these are. 12: counted.
        if self.compiled and not self.on_cpu:
            streams = 10
        else:
            streams = 26 if self.compiled and self.itemsize < FLOAT32 else 12
            streams += self.config.streams - 1  # sums of gradients of the first block's input and of the middle
        again = self.blocks[index] if self.checkpointing else 0
        return max(streams * self.stream + again, self.itemsize * self.stage.units[index + self.is_first])

    def update(self) -> float:
        """At the update: sums of gradients, and the optimizers' temporaries."""
        stage = self.stage
        # Muon: all updates, and one shape's products of Newton-Schulz. AdamW: two temporaries of a shard.
        updates = 3.7 if self.share > 1 else 2.7
        shard = min(stage.largest, max(stage.units) / self.share)
        temporary = max(updates * self.itemsize * stage.muon / self.share, 2 * FLOAT32 * shard)
        return FLOAT32 * (stage.adamw + stage.muon) / self.share + temporary

    def moments(self) -> dict[str, float]:
        """Bytes besides the states at each moment at which memory use can peak, in order."""
        units = len(self.stage.units)
        layers = self.stage.layers
        moments = {}
        if self.is_last:
            head = FLOAT32 * self.config.padded_vocab_size * self.config.n_embd
            moments["loss"] = self.moment(units, len(layers), self.loss_temporaries())
            # Two gradients of the head: it is scaled into a second tensor.
            moments["backward, head"] = self.moment(units, len(layers), 2 * head + 3 * self.stream)
        for i in reversed(range(len(layers))):
            moments[f"backward, block {layers[i]}"] = self.moment(
                i + self.is_first + 1, i + 1, self.block_temporaries(i))
        return moments | {"update": self.update()}


# ---- A process on a device: the step, the process itself, and the waste of allocators

# Measured (docs/memory.md): bytes that allocators take for each byte of a tensor. In glibc's heap the many temporaries
# of one size leave holes; an eager step has more of them.
WASTE = 1.15
HEAP_WASTE = {False: 2.3, True: 1.5}    # by whether the model is compiled
HEAP_BLOCK = 2**25
CPU_PROCESS = {False: 400e6, True: 600e6}
# Guessed, for GPUs that were not at hand: context, cuBLAS and kernels' code; NCCL's buffers.
GPU_PROCESS = 1.0 * GIB
NCCL = 0.5 * GIB


def needed_bytes(*args: Any, pipeline_stages: int = 1, **settings: Any) -> float:
    """Bytes that training needs on a rank, margins included. Arguments as `RankMemory`."""
    step = 0.0  # at the peak, in the pipeline stage with the highest peak
    settings["pipeline_stages"] = pipeline_stages
    for settings["number"] in range(pipeline_stages):
        rank = RankMemory(*args, **settings)
        step = max(step, rank.states() + max(rank.moments().values()))
    if not rank.on_cpu:
        process = GPU_PROCESS + NCCL if rank.ranks > 1 else GPU_PROCESS
        return process + WASTE * step
    waste = HEAP_WASTE[rank.compiled] if rank.stream < HEAP_BLOCK else WASTE
    return CPU_PROCESS[rank.compiled] + waste * step


def largest_rows(limit: float, most: int, config: GPTConfig, *args, **settings) -> int:
    """The largest power of two of rows up to `most` that fits into `limit` bytes; 0: none. args as `RankMemory`."""
    rows = 2 ** int(math.log2(most))
    while rows and needed_bytes(config, rows, *args, **settings) > limit:
        rows //= 2
    return rows
