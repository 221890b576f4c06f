"""
What all stages of ZeRO share: which rank keeps what, the one small collective of a step, and whole parameters. The
stages themselves are in zero.py; begin reading there.

A model is cut into units, whose parameters travel together, and each flattened parameter into ranges, one for each rank
that keeps a part of it. Every stage of ZeRO is a list of such ranges, also FSDP's rows.
"""
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Parameter

from nanochat.runtime.collectives import gather_objects, rank_and_size
from nanochat.runtime.compiling import in_one_pass
from nanochat.runtime.devices import sum_dtype
from nanochat.runtime.distributed import SETUP_TIMEOUT, set_timeout
from nanochat.runtime.errors import UserError

# A rank's part begins at a multiple of so many elements: in bfloat16 these are the 16 bytes that a GPU reads at once.
ALIGNMENT = 8
# A rank is (pipeline stage, replica, rank of its shard group).
DIMENSIONS = "pipeline", "replica", "shard"


class ShardRange(NamedTuple):
    """Elements [start, end) of a flattened parameter, kept and updated by `rank` of the shard group."""

    start: int
    end: int
    rank: int

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass
class Shard:
    """
    This rank's part of one parameter, its elements [start, end) when flattened: the float32 master and, from
    `reduce_and_clip` to `all_gather_params`, the averaged float32 gradient, each (end − start,).
    """

    name: str
    start: int
    end: int
    master: Tensor
    grad: Tensor | None = None


def equal_ranges(sizes: dict[str, int], ranks: int) -> tuple[int, dict[str, list[ShardRange]]]:
    """
    Lay parameters end to end and cut them into equal parts, one for each rank. A cut may go through a parameter.

    sizes: elements of each parameter. Returns (elements of a part, {name: its ranges}). Padding behind the last
    parameter is in no range.
    """
    part_size = ALIGNMENT * ceil(sum(sizes.values()) / (ranks * ALIGNMENT))
    ranges: dict[str, list[ShardRange]] = {}
    offset = 0  # where the parameter begins
    for name, size in sizes.items():
        ranges[name] = cut(size, part_size, ranks, offset)
        offset += size
    return part_size, ranges


def row_ranges(shape: tuple[int, ...], ranks: int) -> list[ShardRange]:
    """FSDP's cut: whole rows, like torch.chunk; 5 rows on 4 ranks are 2, 2, 1 and none."""
    rows = ceil(shape[0] / ranks)
    return cut(prod(shape), rows * prod(shape[1:]), ranks)


def cut(
    size: int,
    part_size: int,
    ranks: int,
    offset: int = 0,
) -> list[ShardRange]:
    """The ranges of a parameter of `size` elements, which begins `offset` elements after the first rank's part does."""
    ranges = []
    for rank in range(ranks):
        start = max(rank * part_size - offset, 0)
        end = min((rank + 1) * part_size - offset, size)
        if start < end:
            ranges.append(ShardRange(start, end, rank))
    return ranges


def partition(model: nn.Module, units: list[nn.Module]) -> list[tuple[nn.Module, list[str]]]:
    """
    (unit, names of its parameters) in the order of the forward pass; units without parameters are left out. Every
    parameter must belong to exactly one unit, and none may be frozen: one that units share would be summed and updated
    twice, a frozen one would still decay.

    A unit's largest parameters come first: laid end to end, its matrices then begin at multiples of ALIGNMENT. Behind
    a scalar they would not, and an H100 takes twice as long for a product with such a matrix (docs/tried.md).
    """
    names = {p: name for name, p in model.named_parameters()}
    assert all(p.requires_grad for p in names), "no parameter is frozen"
    parts = []
    for unit in units:
        params = sorted(unit.parameters(), key=Parameter.numel, reverse=True)
        if params:
            parts.append((unit, [names[p] for p in params]))
    assert sorted(name for _, part in parts for name in part) == sorted(names.values()), "each is in exactly one unit"
    return parts


@dataclass
class StepStats:
    """A step's numbers, equal on every rank, on the device: reading them on the host waits for the step."""

    ok: Tensor      # 1.0; 0.0 if a loss or gradient of any rank is not finite: then no rank may change anything
    values: Tensor  # (5,) float32: mean loss, gradient norm before clipping, ok, ranks that ask to stop, to save


class ShardOptimizer:
    """
    Updates a rank's shards. `state` is cut like the parameters; `owned` is whole, on one rank of the shard group;
    `counters` are alike on every rank. Checkpoints keep all three.
    """

    kind: str  # begins their names there

    def __init__(self, groups: list[dict[str, Any]], *moments: str):
        """groups: [{"shards": [Shard, …], "lr": float, …}, …]. moments: names of the state that begins as zeros."""
        self.param_groups = [{"initial_lr": group["lr"], **group} for group in groups]
        self.shards = [shard for group in groups for shard in group["shards"]]
        self.state: dict[str, dict[str, Tensor]] = {}
        for moment in moments:
            self.state[moment] = {s.name: torch.zeros_like(s.master) for s in self.shards}
        self.owned: dict[str, dict[str, Tensor]] = {}
        self.counters: dict[str, Tensor] = {}


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
        self.dp_ranks = self.world_size // pipeline_stages  # of a pipeline stage: neighbours that share a gradient
        # The table in zero.py calls it N.
        self.shard_count = self.dp_ranks if shard_size == -1 else shard_size
        if zero_stage == 0:
            self.shard_count = 1
        if self.dp_ranks % self.shard_count:
            raise UserError(f"shard_size={shard_size} does not divide the {self.dp_ranks} ranks; -1 is all ranks")
        self.replicas = self.dp_ranks // self.shard_count
        self.pipeline_stage = self.replica = self.shard_rank = 0
        self.mesh = None
        self.groups: dict[str, dist.ProcessGroup] = {}  # by dimension; one process may have none
        if dist.is_initialized():
            shape = (pipeline_stages, self.replicas, self.shard_count)
            self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=DIMENSIONS)
            self.pipeline_stage, self.replica, self.shard_rank = self.mesh.get_coordinate()
            self.groups = {name: self.mesh.get_group(name) for name in DIMENSIONS}
            set_timeout(SETUP_TIMEOUT, *self.groups.values())

        # --- What this rank keeps
        # In float32 a master is the parameter's own memory.
        self.separate_masters = dtype != torch.float32
        self.ranges: dict[str, list[ShardRange]] = {}  # which rank keeps which elements of each parameter
        self.shards: list[Shard] = []                  # this rank's own
        # The pipeline stage that has a parameter, and its shape, by name, of the whole model.
        here = {name: (self.pipeline_stage, tuple(p.shape)) for name, p in model.named_parameters()}
        # The same order on every rank, because full_tensors is collective.
        of_ranks = gather_objects(here) if pipeline_stages > 1 else [here]
        self.stage_and_shape: dict[str, tuple[int, tuple[int, ...]]] = {}
        for of_rank in of_ranks:
            self.stage_and_shape |= of_rank
        self.last = False  # whether the last micro-step of a step has begun
        self.passes = 1    # backward passes of each unit in a micro-step; `Pipeline.connect` sets it

    # --- Setup

    def add_units(self, units: list[nn.Module], weights: Callable[[str], Tensor] | None) -> None:
        """Shard one unit after the other; see `shard_model`. COLLECTIVE."""
        # A dry run has no other ranks.
        compared = self.world_size > 1 and dist.get_backend() != "fake"
        sums: dict[str, int] = {}
        for unit, names in partition(self.model, units):
            if weights is not None:
                # Not a variable: a unit's whole weights must be freed before the next unit gets its own.
                self.model.load_state_dict(
                    {name: weights(name).to(self.device) for name in names}, strict=False, assign=True)
            params = {name: self.model.get_parameter(name) for name in names}
            if compared:
                sums |= {name: sum_of_bits(p) for name, p in params.items()}
            self.add_unit(unit, params)
            del params
        if compared:
            sums_of_ranks = gather_objects(sums)
            for rank, theirs in enumerate(sums_of_ranks):
                first = rank - rank % self.dp_ranks  # of its pipeline stage
                if differing := sums_of_ranks[first].items() - theirs.items():
                    raise UserError(f"rank {rank} starts from other weights than rank {first} (such as "
                                    f"{min(differing)[0]}); every rank must draw them from one seed, or load one "
                                    "checkpoint")

    @abstractmethod
    def add_unit(self, unit: nn.Module, params: dict[str, Parameter]) -> None:
        """Cut a unit's parameters: add to `ranges` and `shards`, and free what other ranks keep."""

    # --- Micro-steps

    @abstractmethod
    def accumulate(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """
        Around a micro-step's forward and backward passes, equally often on every rank. last: the last micro-step of the
        optimizer step.
        """

    # --- Once per step

    def collect_gradients(self) -> None:
        """Set every shard's `grad` to its sum over all ranks and micro-steps; parameters free theirs."""
        params = dict(self.model.named_parameters())
        for shard in self.shards:
            grad = params[shard.name].grad
            if grad is None:
                grad = torch.zeros_like(shard.master)
            elif self.zero_stage == 3:
                grad = grad.to_local()
            shard.grad = grad.reshape(-1)
        for p in params.values():
            p.grad = None

    # ---- reduce: one all-reduce of six numbers; here losses are combined

    def reduce_and_clip(
        self,
        loss: Tensor,
        weight: Tensor | float = 1.0,
        grad_clip: float = 0.0,
        requests: Sequence[bool] = (False, False),
    ) -> StepStats:
        """
        The one small collective of a step, after its last backward pass. After it every shard has its averaged
        gradient, or zeros if the step is not ok.

        loss, weight: of this rank's part of the batch. The mean loss is Σ loss / Σ weight over ranks; the summed
        gradient is divided by Σ weight, too. With weight 1 that is the number of ranks: right if each rank
        back-propagates a mean over equally many targets. If their numbers of targets differ, back-propagate sums; the
        weight is the number of targets.
        grad_clip: largest norm of the averaged gradient, 0 for no limit.
        requests: whether this rank asks all to end the run, and to save a checkpoint.
        """
        assert self.last, "each backward pass runs within accumulate(last=...), the last one of a step with last=True"
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

        # Added on the device: copying a number there would wait for the whole backward pass.
        weight = torch.zeros_like(squared) + weight
        sums = torch.stack([loss.detach().to(exact), weight, squared])
        # Any NaN or Inf in the gradient makes its norm non-finite.
        bad = (~sums.isfinite().all()).to(exact)
        # Filled on the device, too.
        asked = [squared.new_full((), request) for request in requests]
        sums = torch.cat([sums, torch.stack([bad, *asked])])  # (6,)
        if self.world_size > 1:
            dist.all_reduce(sums)
        loss, weight, squared, bad, stops, saves = sums.unbind()

        norm = squared.sqrt() / weight
        ok = ((bad == 0) & norm.isfinite() & loss.isfinite()).float()
        # The only division by the number of ranks, which `weight` includes; it also clips.
        divisor = weight
        if grad_clip > 0:
            divisor = weight * (norm / grad_clip).clamp(min=1)
        for shard in self.shards:
            shard.grad = in_one_pass(averaged, shard.grad, divisor.float(), ok)
        return StepStats(ok, torch.stack([loss / weight, norm, ok, stops, saves]).float())

    def all_gather_params(self) -> None:
        """After the optimizers: free the gradients, and start sending the updated shards to all ranks."""
        for shard in self.shards:
            shard.grad = None

    # --- Whole parameters

    @abstractmethod
    def wait_for_params(self) -> None:
        """Return when the parameters are as the last update left them."""

    @torch.no_grad()
    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """
        (name, whole parameter in the compute dtype), one at a time, including layers of other pipeline stages; every
        rank must iterate over all. COLLECTIVE.
        """
        self.wait_for_params()
        for name in self.stage_and_shape:
            yield name, self.full_tensor(name)

    def full_tensor(self, name: str) -> Tensor:
        """A whole parameter in the compute dtype, gathered from the ranks that keep it. COLLECTIVE."""
        pipeline_stage, shape = self.stage_and_shape[name]
        if pipeline_stage == self.pipeline_stage:
            whole = self.model.get_parameter(name).detach()
        else:
            whole = torch.empty(shape, dtype=self.dtype, device=self.device)
        if self.pipeline_stages > 1:
            dist.broadcast(whole, group=self.groups["pipeline"], group_src=pipeline_stage)
        return whole

    def gather_model(self) -> nn.Module:
        """
        A model with whole parameters, which each rank may run without the others. On stages 0 to 2 it is the model
        itself. On stage 3 it is a copy in the compute dtype, which the next step does not update. Not for a pipeline.
        """
        self.wait_for_params()
        return self.model


def sum_of_bits(weights: Tensor) -> int:
    """A checksum. Waits for the device."""
    return weights.detach().flatten().view(torch.int16).sum(dtype=torch.int64).item()


def averaged(grad: Tensor, divisor: Tensor, ok: Tensor) -> Tensor:
    # Not a product with ok: zero times NaN is NaN.
    return torch.where(ok > 0, grad / divisor, 0.0)
