"""
A pipeline: the layers are cut into stages, each on ranks of its own, and the micro-batches of an optimizer step follow
one another through them. Huang et al. 2019, arXiv:1811.06965.

The schedule is PyTorch's 1F1B (Narayanan et al. 2019, arXiv:1806.03377): as soon as a stage can, it alternates one
forward and one backward pass, so that stage s of P keeps the activations of at most P − s micro-batches. Stages are
idle while the pipeline fills and drains: (P − 1)/(m + P − 1) of the time with m micro-batches.

Ranks [s · N/P, (s + 1) · N/P) are stage s. They are neighbours, because they exchange whole gradients, while rank r
only sends the result of GPT.blocks to rank r + N/P, and receives its gradient. All ranks of a pipeline read the same
rows.
"""
import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nanochat.model.gpt import GPT, Streams, model_without_memory, norm
from nanochat.model.gpt_config import GPTConfig
from nanochat.optim.sharding import Sharding, partition
from nanochat.runtime.errors import UserError


def stage_layers(config: GPTConfig, pipeline_stages: int) -> list[range]:
    """
    The layers of each stage, so that the largest stage has as few FLOPs as possible: the last stage, which has the
    head, may have fewer layers. UserError for more stages than layers.
    """
    layers = config.n_layer
    if not 1 <= pipeline_stages <= layers:
        raise UserError(f"pipeline_stages={pipeline_stages} of a model with {layers} layers; expected 1 to {layers}")
    if pipeline_stages == 1:
        return [range(layers)]

    # FLOPs of a token in an average block and in the head, divided by six.
    windows = sum(map(config.window, range(layers))) / layers
    kv_width = config.n_kv_head * config.head_dim
    block = config.n_embd * (10 * config.n_embd + 2 * kv_width + 2 * windows)
    head = config.padded_vocab_size * config.n_embd
    others = pipeline_stages - 1

    def largest_stage(last: int) -> float:
        """FLOPs of the largest stage, if the last one has this many layers and the others share the rest."""
        return max(math.ceil((layers - last) / others) * block, last * block + head)

    last = min(range(1, layers - others + 1), key=largest_stage)
    size, extra = divmod(layers - last, others)
    starts = [stage * size + min(stage, extra) for stage in range(pipeline_stages)]
    return [range(start, end) for start, end in itertools.pairwise([*starts, layers])]


class Pipeline:
    """
    This rank's layers, and an optimizer step of all pipeline stages together. The caller removes the other layers from
    its model (`GPT.keep_layers`), shards it, then calls `connect`, then `step`. With one stage there is nothing to
    connect. UserError if the stages do not divide the ranks, for more stages than layers, and for a zero_stage that
    sends gradients in each backward pass.
    """

    def __init__(
        self,
        config: GPTConfig,
        pipeline_stages: int,
        zero_stage: int,
        rank: int,
        world_size: int,
    ):
        if world_size % pipeline_stages:
            raise UserError(f"pipeline_stages={pipeline_stages} does not divide the {world_size} rank(s) of torchrun "
                            "--nproc_per_node=…")
        if pipeline_stages > 1 and zero_stage > 1:
            raise UserError(f"zero_stage={zero_stage} with pipeline_stages={pipeline_stages}: a pipeline sums the "
                            "gradients of all micro-batches before it sends them; expected zero_stage 0 or 1")
        self.config = config
        self.pipeline_stages = pipeline_stages
        self.layers_of_stages = stage_layers(config, pipeline_stages)
        # dp_ranks counts the pipelines that work side by side, on different rows.
        self.dp_ranks = world_size // pipeline_stages
        self.pipeline_stage, self.dp_rank = divmod(rank, self.dp_ranks)
        self.layers = self.layers_of_stages[self.pipeline_stage]
        self.is_last = self.pipeline_stage == pipeline_stages - 1

    def describe(self) -> str:
        if self.pipeline_stages == 1:
            return ""
        cuts = ", ".join(f"{layers.start}-{layers.stop - 1}" for layers in self.layers_of_stages)
        return f" in {self.pipeline_stages} stages of layers {cuts}"

    def connect(
        self,
        model: GPT,
        sharding: Sharding,
        micro_batches: int,
        rows: int,
    ) -> None:
        """Make the schedule of an optimizer step: micro_batches of `rows` rows each."""
        if self.pipeline_stages == 1:
            return
        # Here, because the import takes seconds.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        # Examples, without memory, of the tensors that the stage receives and sends: tokens, streams.
        shape = (rows, self.config.sequence_len)
        self.micro_batches = sharding.passes = micro_batches
        streams = torch.empty(self.config.streams, *shape, self.config.n_embd, dtype=sharding.dtype, device="meta")
        streams.requires_grad_()

        def loss(hidden: Tensor, targets: Tensor) -> Tensor:
            return model.lm_head(hidden, targets) / micro_batches

        received = streams
        if self.pipeline_stage == 0:
            received = torch.empty(shape, dtype=torch.int64, device="meta")  # tokens
        stage = PipelineStage(
            StageLayers(model, self.layers), self.pipeline_stage, self.pipeline_stages, sharding.device,
            input_args=(received,), output_args=(streams[0] if self.is_last else streams,),
            group=sharding.groups["pipeline"],
        )
        self.schedule = Schedule1F1B(stage, micro_batches, loss, scale_grads=False)

    def whole_model(self, model: GPT, sharding: Sharding) -> GPT:
        """
        A model for evaluations, which all ranks must run together: the pipeline stage that keeps a unit sends its
        weights to the others just before the unit runs, and they are freed after it. With one stage: the model itself.
        """
        if self.pipeline_stages == 1:
            return model
        sharding.wait_for_params()
        whole = model_without_memory(self.config)

        def fill(names: list[str], weights: Callable[[str], Tensor]) -> None:
            whole.load_state_dict({name: weights(name) for name in names}, strict=False, assign=True)

        def nothing(name: str) -> Tensor:
            """A tensor of the parameter's shape, but one element's memory."""
            _, shape = sharding.stage_and_shape[name]
            return torch.empty((), dtype=sharding.dtype, device=sharding.device).expand(shape)

        for unit, names in partition(whole, whole.units()):
            fill(names, nothing)
            unit.register_forward_pre_hook(lambda *_, names=names: fill(names, sharding.full_tensor))
            unit.register_forward_hook(lambda *_, names=names: fill(names, nothing))
        return whole

    def step(self, inputs: Tensor, targets: Tensor, cu_seqlens: Tensor) -> Tensor:
        """
        Forward and backward passes of this rank's stage for all micro-batches. inputs, targets: (micro_batches · rows,
        T); cu_seqlens: see GPT.forward. Returns the mean loss of the micro-batches on the last stage, else zero.
        """
        # Each micro-batch's offsets, (micro_batches, N + 1): other micro-batches' documents become empty.
        size = inputs.numel() // self.micro_batches
        first = size * torch.arange(self.micro_batches, device=inputs.device, dtype=torch.int32)[:, None]
        cu_seqlens = (cu_seqlens - first).clamp(0, size)
        losses: list[Tensor] = []
        # The other stages receive streams.
        first_input = (inputs,) if self.pipeline_stage == 0 else ()
        self.schedule.step(*first_input, tokens=inputs, cu_seqlens=cu_seqlens, target=targets, losses=losses,
                           return_outputs=False)
        # In the same order as one rank without a pipeline.
        return sum(losses, torch.zeros((), device=inputs.device))


class StageLayers(nn.Module):
    """
    The layers of a stage: takes and returns streams (config.streams, B, T, C); the last stage returns the head's input.
    All stages get the tokens, because some layers have value embeddings, and cu_seqlens, (1, N + 1).
    """

    def __init__(self, model: GPT, layers: range):
        super().__init__()
        self.model = model
        self.layers = layers

    def forward(self, received: Tensor, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
        positions = self.model.positions(tokens, cu_seqlens[0])
        if self.layers.start == 0:
            streams = self.model.embed(tokens, positions)
        else:
            streams = Streams(*received.unbind())
        streams = self.model.blocks(self.layers, tokens, streams, positions)
        if self.layers.stop == self.model.config.n_layer:
            return norm(streams.x)
        return torch.stack(streams[: self.model.config.streams])
