"""
ZeRO: what each rank keeps, and what travels when. Rajbhandari et al. 2020, arXiv:1910.02054.

    stage   parameters                   gradients                                                  optimizer state
    0       whole                        whole; all-reduced in the last micro-step                  whole
    1       whole                        whole; reduce-scattered in the last micro-step             1/N
    2       whole                        1/N; reduce-scattered in every micro-step                  1/N
    3       1/N; gathered unit by unit   1/N; reduce-scattered in every micro-step                  1/N

A unit is the embedding, a block or the head. Its gradients start to travel as soon as the backward pass has computed
all of them. With one micro-step per optimizer step, stages 1 and 2 are the same.

N is the number of ranks in a shard group, `shard_size`. Several groups are replicas: they keep the same and add up
their gradients once per optimizer step. Stage 0 is stage 1 with groups of one rank. One rank sends nothing. In a
pipeline all this holds for the ranks of each of its stages, which keep other layers than those of the others.

Optimizer state is float32: masters and moments. On stages 0 to 2 the masters are copies of this rank's part of the
parameters, but with dtype float32 they are the parameters' own memory. Stage 3 is PyTorch's fully_shard: the masters
are the float32 rows that it keeps.
"""
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Parameter

from nanochat.optim.partition import Shard, ShardRange, equal_ranges, partition, row_ranges
from nanochat.runtime.collectives import all_gather_single, gather_objects, rank_and_size, reduce_scatter, require_same
from nanochat.runtime.compiling import in_one_pass
from nanochat.runtime.devices import sum_dtype
from nanochat.runtime.distributed import SETUP_TIMEOUT, set_timeout
from nanochat.runtime.errors import UserError

MAX_IN_FLIGHT = 2  # units whose whole gradients are being sent at once


@dataclass
class StepStats:
    """A step's numbers, the same on every rank and on the device: reading them on the host waits for the step."""

    ok: Tensor      # 1.0, or 0.0 where a loss or gradient of some rank is not finite: then no rank may change anything
    values: Tensor  # (5,) float32: mean loss, gradient norm before clipping, ok, ranks that ask to stop, to save


class Bucket:
    """
    The trainable parameters of one unit on stages 0 to 2, end to end in `flat`: a tensor of the compute dtype, of which
    the parameters are views. It is cut into one equal part for each rank of the shard group. A rank keeps the masters
    and the summed gradients of its own part.
    """

    def __init__(
        self, params: dict[str, Parameter], dtype: torch.dtype, shard_count: int, shard_rank: int, summed: bool
    ):
        self.params = params
        self.part_size, self.ranges = equal_ranges({name: tuple(p.shape) for name, p in params.items()}, shard_count)
        device = next(iter(params.values())).device
        self.flat = torch.zeros(shard_count * self.part_size, dtype=dtype, device=device)
        self.padding = torch.zeros(len(self.flat) - sum(p.numel() for p in params.values()), device=device)
        if dtype == torch.float32:
            self.master = self.flat[shard_rank * self.part_size : (shard_rank + 1) * self.part_size]
        else:
            self.master = torch.zeros(self.part_size, device=device)
        kept = [(name, r) for name, ranges in self.ranges.items() for r in ranges if r.rank == shard_rank]
        self.sizes = [r.end - r.start for _, r in kept]
        self.shards: list[Shard] = []
        for (name, r), master in zip(kept, self.split(self.master)):
            master.copy_(params[name].data.flatten()[r.start : r.end])  # float32, whatever the model came in
            self.shards.append(Shard(name, tuple(params[name].shape), r.start, r.end, master))
        offset = 0
        for p in params.values():
            view = self.flat[offset : offset + p.numel()].view(p.shape)
            p.data = view.copy_(p.data)  # frees what the model came in
            # Autograd sums micro-steps in float32, whatever dtype products have. What is sent at once keeps its own.
            p.grad_dtype = torch.float32 if summed else None
            offset += p.numel()
        self.computed = 0                # parameters whose gradient the backward pass of this micro-step has computed
        self.grad: Tensor | None = None  # (part_size,) float32, summed over ranks and micro-steps
        self.pending: list = []          # (work, what it reads): collectives that fill `flat` or `grad`

    def split(self, part: Tensor) -> tuple[Tensor, ...]:
        """Views of (part_size,) elements of this rank's part, one for each of its shards, without the padding."""
        return part[: sum(self.sizes)].split(self.sizes)

    def take_gradients(self) -> Tensor:
        """The whole gradients end to end in float32, zero for parameters without one; all release theirs."""
        parts = [self.flat.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in self.params.values()]
        for p in self.params.values():
            p.grad = None
        if len(parts) == 1 and not len(self.padding):
            return parts[0].float()
        return torch.cat([*parts, self.padding], out=self.flat.new_empty(len(self.flat), dtype=torch.float32))

    def wait(self, *_) -> None:
        """Until `flat` and `grad` are complete. As a hook: before each forward pass of the unit."""
        for work, _source in self.pending:
            work.wait()
        self.pending.clear()


def sums_of_bits(params: dict[str, Parameter]) -> dict[str, int]:
    """A number for the weights of each parameter. Waits for the device."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return {
        name: p.detach().flatten().view(bits[p.itemsize]).sum(dtype=torch.int64).item() for name, p in params.items()
    }


class Sharding:
    """
    Takes over a model with the same weights on every rank, on `device`, and casts it to `dtype`. In each step it sums
    gradients over ranks, gives this rank's `shards` their part of them, and sends the updated shards to all ranks.
    Parameters with requires_grad=False stay whole on every rank; they are never sent and never updated.

    weights: for a model on the meta device, the whole weights of a parameter by its name. One unit after the other gets
    its weights and is sharded, so that no rank ever holds more than one whole unit beside what its stage keeps.
    units: the modules whose parameters travel together, in the order of the forward pass. A rank may leave out units,
    or the body of a micro-step: their gradients are zero. On stage 3 every rank must run all units, in this order.
    shard_size: ranks of a shard group, -1 for all. pipeline_stages: groups of neighbouring ranks, each with layers of
    its own; see nanochat.optim.pipeline.
    UserError for ranks that start from different weights, and for a dtype without the range of float32. COLLECTIVE.

    There is no zero_grad. A parameter's gradient is released when it is sent (`Bucket.take_gradients`), or in
    `reduce_and_clip` where nothing is sent and on stage 3; a shard's gradient is released in `all_gather_params`.
    """

    def __init__(
        self, model: nn.Module, units: list[nn.Module], device: torch.device, dtype: torch.dtype, stage: int,
        shard_size: int = -1, pipeline_stages: int = 1, weights: Callable[[str], Tensor] | None = None,
    ):
        self.model, self.model_class, self.device = model, type(model), device
        self.dtype, self.stage = dtype, stage
        if dtype not in (torch.float32, torch.bfloat16):
            raise UserError(f"dtype={dtype} would need its losses scaled; expected float32 or bfloat16")
        if stage == 3 and not dist.is_initialized():  # fully_shard needs a process group, even for one rank
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        self.rank, self.world_size = rank_and_size()
        assert pipeline_stages == 1 or stage <= 1, "nanochat.optim.pipeline refuses it"
        self.pipeline_stages, self.ranks = pipeline_stages, self.world_size // pipeline_stages  # that have one gradient
        self.pipeline_stage = self.rank // self.ranks
        self.shard_count = 1 if stage == 0 else shard_size if shard_size > 0 else self.ranks  # N of the table
        if shard_size != -1 and (shard_size < 1 or stage == 0) or self.ranks % self.shard_count:
            raise UserError(f"shard_size={shard_size} does not divide the {self.ranks} ranks, "
                            "or shards nothing on stage 0; -1 is all ranks")
        self.replicas = self.ranks // self.shard_count
        self.replica, self.shard_rank = divmod(self.rank % self.ranks, self.shard_count)
        self.mesh = self.shard_group = self.replica_group = self.pipeline_group = None
        if dist.is_initialized():
            shape, names = (pipeline_stages, self.replicas, self.shard_count), ("pipeline", "replica", "shard")
            self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
            self.pipeline_group, self.replica_group, self.shard_group = map(self.mesh.get_group, names)
            set_timeout(SETUP_TIMEOUT, *self.groups())
        self.masters_apart = dtype != torch.float32  # else a master is the parameter's own memory
        self.ranges: dict[str, list[ShardRange]] = {}  # of each trainable parameter, which rank keeps what
        self.shards: list[Shard] = []      # what this rank keeps
        self.buckets: list[Bucket] = []    # of each unit, on stages 0 to 2
        self.units: list[nn.Module] = []   # on stage 3, one module of each unit
        self.units_run = 0                 # on stage 3, of them in this micro-step
        self.last = False                  # the last micro-step of a step has begun
        self.passes = 1                    # backward passes in this micro-step
        self.unsent: deque[Bucket] = deque()  # in this micro-step, in the order in which every rank sends
        self.in_flight: deque[tuple] = deque()  # (bucket, work, its output, its input, sent in the last micro-step)
        self.homes = {name: (self.pipeline_stage, tuple(p.shape)) for name, p in model.named_parameters()}
        if pipeline_stages > 1:  # of the whole model: the stage of the pipeline that has a parameter, and its shape
            self.homes = {name: home for homes in gather_objects(self.homes) for name, home in homes.items()}
        self.frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self.compared = self.world_size > 1 and dist.get_backend() != "fake"  # a dry run has no other ranks
        sums = sums_of_bits(self.frozen) if self.compared else {}
        for p in self.frozen.values():
            p.data = p.data.to(dtype)
        for modules, params in partition(model, units):
            sums |= self.add_unit(modules, params, weights, last=units[-1] in modules)
        if stage == 3:
            self.shard_root()
        if self.compared:
            require_same("starts from other weights", sums,
                         "every rank must draw them from one seed, or load one checkpoint", self.ranks)

    # --- Setup

    def groups(self) -> list[dist.ProcessGroup]:
        """All that this rank sends in, beside the group of all ranks."""
        return [group for group in (self.shard_group, self.replica_group, self.pipeline_group) if group is not None]

    def add_unit(
        self, modules: list[nn.Module], params: dict[str, Parameter], weights: Callable[[str], Tensor] | None,
        last: bool,
    ) -> dict[str, int]:
        """Shard a unit; its whole weights are freed when this returns. Returns their `sums_of_bits`, to be compared."""
        if weights is not None:
            params = {name: Parameter(weights(name).to(self.device)) for name in params}
            for name, p in params.items():
                module, _, leaf = name.rpartition(".")
                setattr(self.model.get_submodule(module), leaf, p)
        sums = sums_of_bits(params) if self.compared else {}
        if self.stage < 3:
            self.add_bucket(modules, params)
            return sums
        for p in params.values():
            p.data = p.data.float()  # the rows of it that fully_shard keeps are the masters
        if modules != [self.model]:  # parameters outside all units are left to the root
            self.fully_shard(modules, reshard=not last)  # the last one's backward pass follows its forward pass at once
            self.units.append(modules[0])
        return sums

    def add_bucket(self, modules: list[nn.Module], params: dict[str, Parameter]) -> None:
        bucket = Bucket(
            params, self.dtype, self.shard_count, self.shard_rank, self.stage < 2 or self.shard_count == 1)
        self.buckets.append(bucket)
        self.shards += bucket.shards
        self.ranges |= bucket.ranges
        if self.ranks > 1:
            for module in modules:
                module.register_forward_pre_hook(bucket.wait)
            for p in params.values():
                p.register_post_accumulate_grad_hook(lambda _: self.gradient_computed(bucket))

    def fully_shard(self, modules: nn.Module | list[nn.Module], reshard: bool) -> None:
        """Stage 3, in the compute dtype. reshard: free gathered parameters between forward and backward pass."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes a second to import

        policy = MixedPrecisionPolicy(self.dtype, torch.float32, cast_forward_inputs=False)
        mesh = self.mesh["replica", "shard"] if self.replicas > 1 else self.mesh["shard"]
        fully_shard(modules, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy,
                    ignored_params=set(self.frozen.values()))

    def shard_root(self) -> None:
        """Stage 3, when all units are sharded: what is left, and the order in which units are gathered."""
        self.fully_shard(self.model, reshard=True)
        if self.world_size > 1:
            for i, unit in enumerate(self.units):  # before the hook that gathers it
                unit.register_forward_pre_hook(lambda *_, i=i: self.require_order(i), prepend=True)
        for unit, following in zip(self.units, self.units[1:]):
            unit.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([unit])
        for unit in (*self.units, self.model):
            unit.set_gradient_divide_factor(1.0)  # sums here, too: reduce_and_clip divides
            unit.set_force_sum_reduction_for_comms(True)
            if self.device.type == "cpu" and self.shard_count > 1:
                unit.set_custom_reduce_scatter(GlooReduceScatter())
        self.model._set_unshard_async_op(self.device.type == "cpu")
        # Now, or it takes the first module that runs for the whole model: in CORE that is the embedding.
        self.model._get_fsdp_state()._lazy_init()
        for name, p in self.model.named_parameters():
            if name not in self.frozen:
                self.ranges[name] = row_ranges(tuple(p.shape), self.shard_count)
                self.shards += [
                    Shard(name, tuple(p.shape), r.start, r.end, p.detach().to_local().view(-1))
                    for r in self.ranges[name] if r.rank == self.shard_rank
                ]

    # --- Micro-steps

    @contextlib.contextmanager
    def accumulate(self, last: bool, passes: int = 1) -> Iterator[None]:
        """
        Around forward and backward pass of a micro-step, equally often on every rank. Gradients travel during the
        backward pass (of several `passes`, during the last one of each unit): in the last micro-step of a step, on
        stages 2 and 3 in every one. All ranks send buckets from the last unit to the first: a rank's backward pass may
        complete them in another order, but collectives that start in different orders on different ranks would mix
        units.
        """
        self.last, self.passes = last, passes
        if self.ranks > 1 and (last or self.stage == 2 and self.shard_count > 1):
            self.unsent.extend(reversed(self.buckets))
        if self.stage == 3 and self.replicas > 1:
            self.model.set_requires_all_reduce(last)
        self.units_run = 0
        yield
        while self.unsent:  # buckets of which some parameter took no part in the loss
            self.send(self.unsent.popleft())
        for bucket in self.buckets:
            bucket.computed = 0
        while self.in_flight and last:
            self.receive()
        if self.stage == 3 and self.world_size > 1:
            self.require_order(len(self.units))

    def require_order(self, unit: int) -> None:
        """Stage 3: unit number `unit` runs next. UserError where this rank has left out one before it."""
        if unit > self.units_run:  # ranks would gather different units
            raise UserError(f"rank {self.rank} left out unit {self.units_run} of {len(self.units)} in a micro-step; "
                            "zero_stage=3 runs all of them in order on every rank, stages 0 to 2 do not need to")
        self.units_run = max(self.units_run, unit + 1)

    def gradient_computed(self, bucket: Bucket) -> None:
        """The backward pass calls this for each parameter. Sends all buckets that are complete and whose turn it is."""
        bucket.computed += 1
        assert bucket.computed <= self.passes * len(bucket.params), "one backward pass in a micro-step"
        while self.unsent and self.unsent[0].computed == self.passes * len(self.unsent[0].params):
            self.send(self.unsent.popleft())

    def send(self, bucket: Bucket) -> None:
        """Start the sum of a bucket's gradients over the shard group, of which each rank gets its own part."""
        while self.shard_count > 1 and len(self.in_flight) >= MAX_IN_FLIGHT:
            self.receive()
        own = whole = bucket.take_gradients()
        if self.shard_count > 1:
            own = whole.new_empty(bucket.part_size)
            work = reduce_scatter(own, whole, self.shard_group)
        else:
            work = dist.all_reduce(whole, group=self.replica_group, async_op=True)
        self.in_flight.append((bucket, work, own, whole, self.last))

    def receive(self) -> None:
        """Wait for the oldest sum and add it to the bucket's; if it is the step's last, start the sum over replicas."""
        bucket, work, own, _whole, last = self.in_flight.popleft()
        work.wait()
        bucket.grad = own.float() if bucket.grad is None else bucket.grad.add_(own)
        if last and self.shard_count > 1 and self.replicas > 1:
            work = dist.all_reduce(bucket.grad, group=self.replica_group, async_op=True)
            bucket.pending.append((work, bucket.grad))

    # --- Once per step

    def collect_gradients(self) -> None:
        """Set every shard's `grad` to its sum over all ranks and micro-steps; parameters and buckets release theirs."""
        if not self.last:  # a rank without a micro-batch: the others wait for its gradients, which are zero
            with self.accumulate(last=True):
                pass
        self.last = False
        for bucket in self.buckets if self.ranks > 1 else ():
            bucket.wait()
            for shard, grad in zip(bucket.shards, bucket.split(bucket.grad)):
                shard.grad = grad
            bucket.grad = None
        params = dict(self.model.named_parameters())
        for shard in self.shards if self.ranks == 1 or self.stage == 3 else ():
            grad = params[shard.name].grad
            grad = grad.to_local() if self.stage == 3 and grad is not None else grad
            shard.grad = torch.zeros_like(shard.master) if grad is None else grad.reshape(-1)
        for p in params.values():
            p.grad = None

    def reduce_and_clip(
        self, loss: Tensor, count: Tensor | float = 1.0, grad_clip: float = 0.0, stop: bool = False, save: bool = False
    ) -> StepStats:
        """
        The one small collective of a step, after its last backward pass. Then every shard has its averaged gradient, or
        zeros where the step is not ok.

        loss, count: of this rank's part of the batch. The mean loss is Σ loss / Σ count over ranks; the summed gradient
        is divided by Σ count, too. With count 1 that is the number of ranks: right where each rank back-propagates a
        mean over equally many targets. Where they have unequally many, back-propagate sums and count the targets.
        grad_clip: largest norm of the averaged gradient, 0 for no limit.
        stop, save: whether this rank asks all to end the run, to save a checkpoint.
        """
        self.collect_gradients()
        # The replicas of a shard group count its gradient again. Where clipping depends on the norm, it is
        # summed in float64: in float32 its last digits, and so the run, would depend on how the gradient is cut.
        exact = sum_dtype(self.device)
        norm_dtype = exact if grad_clip > 0 else torch.float32
        squared = torch.zeros((), dtype=exact, device=self.device)
        for shard in self.shards:
            squared = squared + torch.linalg.vector_norm(shard.grad, dtype=norm_dtype).to(exact).square()
        squared = squared / self.replicas
        # Filled on the device: a number copied there would wait for the whole backward pass.
        count = count.to(exact) if isinstance(count, Tensor) else squared.new_full((), count)
        stop, save = squared.new_full((), stop), squared.new_full((), save)
        sums = torch.stack([loss.detach().to(exact), count, squared])
        bad = (~sums.isfinite().all()).to(exact)  # NaN and Inf anywhere in the gradient make its norm so
        sums = torch.cat([sums, torch.stack([bad, stop, save])])
        if self.world_size > 1:
            dist.all_reduce(sums)
        loss, count, squared, bad, stop, save = sums.unbind()
        norm = squared.sqrt() / count
        ok = ((bad == 0) & norm.isfinite() & loss.isfinite()).float()
        # The only division by the number of ranks, as part of `count`; it clips, too.
        divisor = count * (norm / grad_clip).clamp(min=1) if grad_clip > 0 else count
        for shard in self.shards:
            shard.grad = in_one_pass(averaged, shard.grad, divisor.float(), ok)
        return StepStats(ok, torch.stack([loss / count, norm, ok, stop, save]).float())

    def all_gather_params(self) -> None:
        """
        After the optimizers: start sending the updated shards to all ranks. Each unit waits for its own parameters just
        before its next forward pass. On stage 3 the units gather them by themselves.
        """
        for shard in self.shards:
            shard.grad = None
        for bucket in self.buckets:
            if self.shard_count > 1:
                own = bucket.master.to(self.dtype, copy=True)  # in float32 the master is part of what is written to
                bucket.pending.append((all_gather_single(bucket.flat, own, self.shard_group, async_op=True), own))
            elif self.masters_apart:
                bucket.flat.copy_(bucket.master)

    # --- Whole parameters

    def wait_for_params(self) -> None:
        for bucket in self.buckets:
            bucket.wait()

    @torch.no_grad()
    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """
        (name, whole parameter in the compute dtype), one at a time, those of other stages of a pipeline as well; every
        rank must iterate over all.
        """
        self.wait_for_params()
        for unit in self.units:  # on stage 3 the last one stays whole after a forward pass without a backward pass
            unit.reshard()
        for name in self.homes:
            yield name, self.whole_tensor(name)

    def whole_tensor(self, name: str) -> Tensor:
        """A whole parameter in the compute dtype, from whichever ranks keep it. COLLECTIVE."""
        pipeline_stage, shape = self.homes[name]
        if pipeline_stage != self.pipeline_stage:
            whole = torch.empty(shape, dtype=self.dtype, device=self.device)
        else:
            whole = self.model.get_parameter(name).detach()
            if self.stage == 3 and name not in self.frozen:
                whole = whole.to(self.dtype).full_tensor()
        if self.pipeline_stages > 1:
            source = pipeline_stage * self.ranks + self.rank % self.ranks
            dist.broadcast(whole, source, group=self.pipeline_group)
        return whole

    def load_whole(self, name: str, tensor: Tensor) -> None:
        """Copy a whole parameter in place (stages 0 to 2, and frozen ones); in float32 that is its master as well."""
        self.wait_for_params()
        self.model.get_parameter(name).data.copy_(tensor)

    def gather_model(self) -> nn.Module:
        """
        A model with whole parameters, which each rank may run without the others. On stages 0 to 2 it is the model
        itself. On stage 3 it is a copy in the compute dtype, which the next step does not update. Not for a pipeline.
        """
        if self.stage < 3:
            self.wait_for_params()
            return self.model
        with torch.device("meta"):
            model = self.model_class(self.model.config)
        model.load_state_dict(dict(self.whole_tensors()), assign=True)
        return model


def averaged(grad: Tensor, divisor: Tensor, ok: Tensor) -> Tensor:
    return torch.where(ok > 0, grad / divisor, 0.0)  # a product with zero would keep NaN


class GlooReduceScatter:
    """nanochat.runtime.collectives.reduce_scatter with the interface of fully_shard."""

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group, op, async_op: bool = False) -> None:
        reduce_scatter(output_tensor, input_tensor, group).wait()
