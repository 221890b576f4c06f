"""
What all stages of ZeRO share: which rank keeps what, the one small collective of a step, and whole parameters. The
stages themselves are in zero.py (0 to 2; begin reading there) and in fsdp.py (3).
"""
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Parameter

from nanochat.optim.partition import Shard, ShardRange, partition, place_in_pipeline
from nanochat.runtime.collectives import gather_objects, rank_and_size, require_same
from nanochat.runtime.compiling import in_one_pass
from nanochat.runtime.devices import sum_dtype
from nanochat.runtime.distributed import SETUP_TIMEOUT, set_timeout
from nanochat.runtime.errors import UserError
from nanochat.runtime.step_stats import StepStats

# A rank is (pipeline stage, replica, rank of its shard group).
DIMENSIONS = "pipeline", "replica", "shard"


class Sharding(ABC):
    """
    A model that is cut over the ranks; `shard_model` in zero.py makes one. In each step it sums gradients over ranks,
    gives this rank's `shards` their part of the sums, and sends the updated shards to all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        zero_stage: int,
        shard_size: int,
        pipeline_stages: int,
    ):
        self.model = model
        self.device = device
        self.dtype = dtype
        self.zero_stage = zero_stage

        # --- Which ranks share what
        self.rank, self.world_size = rank_and_size()
        self.pipeline_stages = pipeline_stages
        self.pipeline_stage, dp_rank, self.dp_ranks = place_in_pipeline(self.rank, self.world_size, pipeline_stages)
        # The table in zero.py calls it N.
        self.shard_count = self.dp_ranks if shard_size == -1 else shard_size
        if zero_stage == 0:
            self.shard_count = 1
        if self.dp_ranks % self.shard_count:
            raise UserError(f"shard_size={shard_size} does not divide the {self.dp_ranks} ranks; -1 is all ranks")
        self.replicas = self.dp_ranks // self.shard_count
        self.replica, self.shard_rank = divmod(dp_rank, self.shard_count)
        self.mesh = None
        self.groups: dict[str, dist.ProcessGroup] = {}  # by dimension; one process may have none
        if dist.is_initialized():
            shape = (pipeline_stages, self.replicas, self.shard_count)
            self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=DIMENSIONS)
            self.groups = {name: self.mesh.get_group(name) for name in DIMENSIONS}
            set_timeout(SETUP_TIMEOUT, *self.groups.values())

        # --- What this rank keeps
        # In float32 a master is the parameter's own memory.
        self.separate_masters = dtype != torch.float32
        self.ranges: dict[str, list[ShardRange]] = {}  # which rank keeps which elements of each parameter
        self.shards: list[Shard] = []                  # this rank's own
        # The whole model, by name: the pipeline stage that has a parameter, and its shape.
        self.homes = {name: (self.pipeline_stage, tuple(p.shape)) for name, p in model.named_parameters()}
        if pipeline_stages > 1:
            # The same order on every rank, because whole_tensors is collective.
            homes_by_rank = gather_objects(self.homes)
            self.homes = {name: home for homes in homes_by_rank for name, home in homes.items()}
        # Whether the last micro-step of a step has begun.
        self.last = False

    # --- Setup

    def add_units(self, units: list[nn.Module], weights: Callable[[str], Tensor] | None) -> None:
        """Shard one unit after the other; see `shard_model`. COLLECTIVE."""
        # A dry run has no other ranks.
        compared = self.world_size > 1 and dist.get_backend() != "fake"
        sums: dict[str, int] = {}

        def add(unit: nn.Module, names: list[str]) -> None:
            """A function, so that the whole weights of a unit are freed before the next unit gets its own."""
            if weights is not None:
                whole = {name: weights(name).to(self.device) for name in names}
                self.model.load_state_dict(whole, strict=False, assign=True)
                del whole
            params = {name: self.model.get_parameter(name) for name in names}
            if compared:
                sums.update(sums_of_bits(params))
            self.add_unit(unit, params)

        for unit, params in partition(self.model, units):
            add(unit, list(params))
        if compared:
            require_same("starts from other weights", sums,
                         "every rank must draw them from one seed, or load one checkpoint", self.dp_ranks)

    @abstractmethod
    def add_unit(self, unit: nn.Module, params: dict[str, Parameter]) -> None:
        """Cut a unit's parameters: add to `ranges` and `shards`, and free what other ranks keep."""

    # --- Micro-steps

    @abstractmethod
    def accumulate(self, last: bool, passes: int = 1) -> contextlib.AbstractContextManager[None]:
        """
        Around a micro-step's forward and backward passes, equally often on every rank. last: the last micro-step of the
        optimizer step. passes: backward passes of each unit.
        """

    # --- Once per step

    def collect_gradients(self) -> None:
        """Set every shard's `grad` to its sum over all ranks and micro-steps; parameters free theirs."""
        params = dict(self.model.named_parameters())
        for shard in self.shards:
            grad = params[shard.name].grad
            shard.grad = torch.zeros_like(shard.master) if grad is None else self.own_part(grad).reshape(-1)
        for p in params.values():
            p.grad = None

    def own_part(self, tensor: Tensor) -> Tensor:
        """This rank's part of a parameter or of its gradient."""
        return tensor

    def reduce_and_clip(
        self,
        loss: Tensor,
        count: Tensor | float = 1.0,
        stop: bool = False,
        save: bool = False,
        grad_clip: float = 0.0,
    ) -> StepStats:
        """
        The one small collective of a step, after its last backward pass. After it every shard has its averaged
        gradient, or zeros if the step is not ok.

        loss, count: of this rank's part of the batch. The mean loss is Σ loss / Σ count over ranks; the summed gradient
        is divided by Σ count, too. With count 1 that is the number of ranks: right if each rank back-propagates a mean
        over equally many targets. If their numbers of targets differ, back-propagate sums and count the targets.
        stop, save: whether this rank asks all to end the run, to save a checkpoint.
        grad_clip: largest norm of the averaged gradient, 0 for no limit.
        UserError if `accumulate` was not called with last=True since the previous step.
        """
        if not self.last:
            raise UserError("reduce_and_clip without a last micro-step: run each backward pass within "
                            "accumulate(last=...), the last one of a step with last=True")
        self.last = False
        self.collect_gradients()
        # If clipping depends on the norm, it is summed in float64: in float32 its last digits, and so the run, would
        # depend on how the gradient is cut.
        exact = sum_dtype(self.device)
        norm_dtype = exact if grad_clip > 0 else torch.float32
        squared = torch.zeros((), dtype=exact, device=self.device)
        for shard in self.shards:
            squared = squared + torch.linalg.vector_norm(shard.grad, dtype=norm_dtype).to(exact).square()
        # Each replica counts the same gradient.
        squared = squared / self.replicas

        # Filled on the device: copying a number there would wait for the whole backward pass.
        if isinstance(count, Tensor):
            count = count.to(exact)
        else:
            count = squared.new_full((), count)
        sums = torch.stack([loss.detach().to(exact), count, squared])
        # Any NaN or Inf in the gradient makes its norm non-finite.
        bad = (~sums.isfinite().all()).to(exact)
        requests = torch.stack([bad, squared.new_full((), stop), squared.new_full((), save)])
        sums = torch.cat([sums, requests])  # (6,)
        if self.world_size > 1:
            dist.all_reduce(sums)
        loss, count, squared, bad, stops, saves = sums.unbind()

        norm = squared.sqrt() / count
        ok = ((bad == 0) & norm.isfinite() & loss.isfinite()).float()
        # The only division by the number of ranks, which `count` includes; it also clips.
        divisor = count
        if grad_clip > 0:
            divisor = count * (norm / grad_clip).clamp(min=1)
        for shard in self.shards:
            shard.grad = in_one_pass(averaged, shard.grad, divisor.float(), ok)
        return StepStats(ok, torch.stack([loss / count, norm, ok, stops, saves]).float())

    def all_gather_params(self) -> None:
        """After the optimizers: free the gradients, and start sending the updated shards to all ranks."""
        for shard in self.shards:
            shard.grad = None

    # --- Whole parameters

    @abstractmethod
    def wait_for_params(self) -> None:
        """Return when the parameters are as the last update left them."""

    @torch.no_grad()
    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """
        (name, whole parameter in the compute dtype), one at a time, including layers of other pipeline stages; every
        rank must iterate over all. COLLECTIVE.
        """
        self.wait_for_params()
        for name in self.homes:
            yield name, self.whole_tensor(name)

    def whole_tensor(self, name: str) -> Tensor:
        """A whole parameter in the compute dtype, gathered from the ranks that keep it. COLLECTIVE."""
        pipeline_stage, shape = self.homes[name]
        if pipeline_stage == self.pipeline_stage:
            whole = self.gathered(self.model.get_parameter(name).detach())
        else:
            whole = torch.empty(shape, dtype=self.dtype, device=self.device)
        if self.pipeline_stages > 1:
            source = pipeline_stage * self.dp_ranks + self.rank % self.dp_ranks
            dist.broadcast(whole, source, group=self.groups["pipeline"])
        return whole

    def gathered(self, tensor: Tensor) -> Tensor:
        """A whole parameter of this pipeline stage."""
        return tensor

    def gather_model(self) -> nn.Module:
        """
        A model with whole parameters, which each rank may run without the others. On stages 0 to 2 it is the model
        itself. On stage 3 it is a copy in the compute dtype, which the next step does not update. Not for a pipeline.
        """
        self.wait_for_params()
        return self.model


def sums_of_bits(params: dict[str, Parameter]) -> dict[str, int]:
    """A checksum of the weights of each parameter. Waits for the device."""
    sums = {}
    for name, p in params.items():
        bits = p.detach().flatten().view(torch.int16)
        sums[name] = bits.sum(dtype=torch.int64).item()
    return sums


def averaged(grad: Tensor, divisor: Tensor, ok: Tensor) -> Tensor:
    # Not a product with ok: zero times NaN is NaN.
    return torch.where(ok > 0, grad / divisor, 0.0)
