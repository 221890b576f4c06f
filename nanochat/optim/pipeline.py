"""
A pipeline: the layers are cut into stages, each on ranks of its own, and the micro-batches of an optimizer step follow
one another through them. Huang et al. 2019, arXiv:1811.06965.

The schedule is PyTorch's 1F1B (Narayanan et al. 2019, arXiv:1806.03377): as soon as a stage can, it alternates one
forward and one backward pass, so that stage s of P keeps the activations of at most P − s micro-batches. A stage waits
while the first micro-batch comes and the last one goes, for (P − 1)/(m + P − 1) of the time with m micro-batches.

Ranks [s · N/P, (s + 1) · N/P) are stage s: neighbours, since they send one another whole gradients, while rank r sends
only the residual stream to rank r + N/P, and receives its gradient. All ranks of a pipeline read the same rows.
"""
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import GPTConfig
from nanochat.model.layers import norm
from nanochat.optim.schedule import accumulation_steps
from nanochat.optim.zero import Sharding
from nanochat.runtime.errors import UserError


def stage_layers(config: GPTConfig, stages: int) -> list[range]:
    """
    The layers of each stage, so that the one with the most FLOPs has as few as possible: the last stage, which has the
    head, may have fewer layers. UserError for more stages than layers.
    """
    layers = config.n_layer
    if not 1 <= stages <= layers:
        raise UserError(f"pipeline_stages={stages} of a model with {layers} layers; expected 1 to {layers}")
    if stages == 1:
        return [range(layers)]
    windows = sum(map(config.window, range(layers))) / layers
    kv = config.n_kv_head * config.head_dim
    block = config.n_embd * (10 * config.n_embd + 2 * kv + 2 * windows)  # a sixth of a token's FLOPs, as is the head
    head = config.padded_vocab_size * config.n_embd
    most = {last: max(-(-(layers - last) // (stages - 1)) * block, last * block + head)
            for last in range(1, layers - stages + 2)}  # FLOPs of the largest stage, by layers of the last one
    last = min(most, key=most.__getitem__)
    few, more = divmod(layers - last, stages - 1)
    sizes = [few + (stage < more) for stage in range(stages - 1)] + [last]
    ends = [sum(sizes[: stage + 1]) for stage in range(stages)]
    return [range(end - size, end) for size, end in zip(sizes, ends)]


def stream_count(config: GPTConfig, layer: int) -> int:
    """How many tensors (B, T, C) enter a layer; the middle of the model is one from there on."""
    return 1 + config.residual_scales + (config.backout and layer > config.n_layer // 2)


class Pipeline:
    """
    Which layers of a model are this rank's: `model.keep(pipeline.layers)`. Then, once the model has its weights and a
    Sharding, `connect`; then `step`. UserError for stages that do not divide the ranks, for more than
    there are layers, and for a zero_stage that sends gradients in each backward pass.
    """

    def __init__(self, model: GPT, stages: int, zero_stage: int, rank: int, world_size: int):
        if stages < 1 or world_size % stages:
            divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
            raise UserError(f"pipeline_stages={stages} does not divide the {world_size} rank(s); expected {divisors}, "
                            "or more ranks: torchrun --nproc_per_node=…")
        if stages > 1 and zero_stage > 1:
            raise UserError(f"zero_stage={zero_stage} with pipeline_stages={stages}: a pipeline sums gradients of all "
                            "micro-batches before it sends them; expected zero_stage 0 or 1")
        self.model, self.stages = model, stages
        self.all_layers = stage_layers(model.config, stages)
        self.ranks = world_size // stages           # of a stage: so many pipelines work side by side, on other rows
        self.stage, self.rank = divmod(rank, self.ranks)
        self.layers, self.is_last = self.all_layers[self.stage], self.stage == stages - 1

    def accumulation_steps(
        self, total_batch_size: int, device_batch_size: int, max_seq_len: int, uneven: bool = False
    ) -> tuple[int, int]:
        """
        (micro-batches of a micro-step, micro-steps of an optimizer step): a pipeline has them all in flight in one.
        UserError for a batch that does not divide (unless `uneven`, without a pipeline), and for fewer micro-batches
        than stages.
        """
        uneven = uneven and self.stages == 1
        micro_steps = accumulation_steps(total_batch_size, device_batch_size, max_seq_len, self.ranks, uneven)
        if self.stages == 1:
            return 1, micro_steps
        if micro_steps < self.stages:
            raise UserError(f"total_batch_size={total_batch_size} makes {micro_steps} micro-step(s), fewer than "
                            f"pipeline_stages={self.stages}; raise it, lower device_batch_size, or use fewer stages")
        return micro_steps, 1

    def describe(self) -> str:
        cuts = ", ".join(f"{layers.start}-{layers.stop - 1}" for layers in self.all_layers)
        return f" in {self.stages} stages of layers {cuts}" if self.stages > 1 else ""

    def connect(self, sharding: Sharding, micro_batches: int, rows: int) -> None:
        """Make the schedule of an optimizer step: micro_batches of `rows` rows each."""
        if self.stages == 1:
            return
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # takes seconds to import

        config = self.model.config

        def example(count: int) -> tuple[Tensor, ...]:  # of what travels, without memory
            stream = torch.empty(rows, config.sequence_len, config.n_embd, dtype=sharding.dtype, device="meta")
            return (stream.requires_grad_(),) * count

        def loss(hidden: Tensor, targets: Tensor) -> Tensor:
            return self.model.lm_head(hidden, targets) / micro_batches

        tokens = torch.empty(rows, config.sequence_len, dtype=torch.int64, device="meta")
        received = example(stream_count(config, self.layers.start)) if self.stage else (tokens,)
        sent = example(1 if self.is_last else stream_count(config, self.layers.stop))
        part = PipelineStage(Part(self.model, self.layers), self.stage, self.stages, sharding.device, received, sent,
                             group=sharding.pipeline_group)
        self.schedule = Schedule1F1B(part, micro_batches, loss, scale_grads=False)

    def whole_model(self, sharding: Sharding) -> GPT:
        """
        A model for evaluations, which all ranks must run together: the pipeline stage that keeps a unit sends its
        weights to the others just before the unit runs, and they are freed after it. With one stage: the model itself.
        """
        if self.stages == 1:
            return self.model
        sharding.wait_for_params()
        with torch.device("meta"):
            model = GPT(self.model.config)
        names = {p: name for name, p in model.named_parameters()}

        def fill(of_unit: list[str], weights: Callable[[str], Tensor]) -> None:
            for name in of_unit:
                module, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(module), leaf, nn.Parameter(weights(name), requires_grad=False))

        def nothing(name: str) -> Tensor:  # of the right shape, but in the memory of one element
            shape = sharding.homes[name][1]
            return torch.empty((), dtype=sharding.dtype, device=sharding.device).expand(shape)

        for unit in model.units():
            of_unit = [names[p] for p in unit.parameters()]
            fill(of_unit, nothing)
            unit.register_forward_pre_hook(lambda *_, of_unit=of_unit: fill(of_unit, sharding.whole_tensor))
            unit.register_forward_hook(lambda *_, of_unit=of_unit: fill(of_unit, nothing))
        return model

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """
        Forward and backward passes of this rank's stage for all micro-batches. inputs, targets: (micro_batches · rows,
        T). Returns the mean loss over them on the last stage, zero on the others.
        """
        self.model.check_first(inputs, targets)
        losses: list[Tensor] = []
        self.schedule.step(*(() if self.stage else (inputs,)), tokens=inputs, target=targets, losses=losses,
                           return_outputs=False)
        return sum(losses, torch.zeros((), device=inputs.device))  # in the order in which one rank adds them


class Part(nn.Module):
    """The layers of a stage: takes and returns streams of the model, each (B, T, C), at the last stage what the head
    reads. The first stage begins with tokens, which all stages get, since some layers look up vectors of their own."""

    def __init__(self, model: GPT, layers: range):
        super().__init__()
        self.model, self.layers = model, layers

    def forward(self, *received: Tensor, tokens: Tensor) -> Tensor | tuple[Tensor, ...]:
        streams = self.model.embed(tokens) if self.layers.start == 0 else received
        streams = self.model.blocks(self.layers, tokens, streams)
        return norm(streams[0]) if self.layers.stop == self.model.config.n_layer else streams
