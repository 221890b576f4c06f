"""
ZeRO: what each rank keeps, and what travels when. Rajbhandari et al. 2020, arXiv:1910.02054; stage 3 stands on
PyTorch's fully_shard.

    stage   parameters                    gradients                                                 optimizer state
    0       whole                         whole, all-reduced                                        whole
    1       whole                         whole while accumulating, then reduce-scattered           1/N
    2       whole                         1/N: reduce-scattered as soon as a unit's are computed    1/N
    3       1/N, gathered unit by unit    1/N                                                       1/N

A unit is the embedding, a block or the head. N is the size of a shard group; several groups hold replicas of each
other. Stage 0 is stage 1 with shard groups of one rank, and one rank is any stage with nothing to send.
"""
import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Parameter

from nanochat.distributed import SETUP_TIMEOUT, all_gather_single, reduce_scatter, set_timeout, sum_dtype
from nanochat.errors import UserError
from nanochat.ownership import Piece, Slice, equal_pieces, row_pieces

MAX_IN_FLIGHT = 2  # units whose whole gradients are on their way at once


@dataclass
class StepStats:
    """What all ranks agree on about a step, on the device: nobody has to wait for it."""

    ok: Tensor      # 1.0, or 0.0 where some rank saw a loss or gradient that is not finite: nothing may change then
    values: Tensor  # (5,) float32: mean loss, norm of the averaged gradient before clipping, ok, Σ stop, Σ save


class Bucket:
    """
    The parameters of one unit, end to end in one flat tensor of the compute dtype (parameters are views of it), cut
    into one equal slice for each rank of the shard group. What a rank keeps beyond that is of its own slice.
    """

    def __init__(self, params: dict[str, Parameter], dtype: torch.dtype, ranks: int, rank: int):
        self.params = params
        self.slice_size, self.pieces = equal_pieces({name: tuple(p.shape) for name, p in params.items()}, ranks)
        weights = [p.data.flatten().float() for p in params.values()]  # masters are float32, whatever the model came in
        self.padding = weights[0].new_zeros(ranks * self.slice_size - sum(map(len, weights)))
        weights = torch.cat([*weights, self.padding])
        self.own = slice(rank * self.slice_size, (rank + 1) * self.slice_size)
        self.flat = weights.to(dtype)
        self.master = self.flat[self.own] if dtype == torch.float32 else weights[self.own].clone()
        offset = 0
        self.slices: list[Slice] = []
        self.offsets: list[int] = []  # of each slice in the rank's part of the bucket
        for name, p in params.items():
            p.data = self.flat[offset : offset + p.numel()].view(p.shape)
            p.grad_dtype = torch.float32  # autograd sums micro-steps in float32, whatever the dtype of the products
            for piece in self.pieces[name]:
                if piece.rank == rank:
                    at = offset + piece.start - self.own.start
                    self.offsets.append(at)
                    self.slices.append(make_slice(name, p, piece, self.master[at : at + piece.end - piece.start]))
            offset += p.numel()
        self.computed = 0                        # parameters whose gradient the backward pass has produced
        self.grad: Tensor | None = None          # (slice_size,) float32, summed over ranks and micro-steps
        self.pending: list = []                # works that `flat` or `grad` waits for, and what they read

    def take_gradients(self, dtype: torch.dtype) -> Tensor:
        """The whole gradients, flat, in the dtype they are sent in; the parameters let go of them."""
        parts = [self.flat.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in self.params.values()]
        parts = [part.to(dtype) for part in (*parts, self.padding) if len(part)]
        for p in self.params.values():
            p.grad = None
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def wait(self, *_) -> None:
        """Until the parameters are whole again."""
        for work, _source in self.pending:
            work.wait()
        self.pending.clear()


def make_slice(name: str, p: Parameter, piece: Piece, master: Tensor) -> Slice:
    multipliers = {key: getattr(p, key, 1.0) for key in ("lr_mul", "wd_mul")}
    return Slice(name, tuple(p.shape), piece.start, piece.end, master, **multipliers)


def partition(model: nn.Module, units: list[nn.Module]) -> list[tuple[list[nn.Module], dict[str, Parameter]]]:
    """
    (modules, trainable parameters by name) of each unit, in the order of the forward pass. Units that share a parameter
    (tied weights) become one; parameters outside every unit belong to the model as a whole; units without are left out.
    """
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    parts: list[tuple[list[nn.Module], dict[str, Parameter]]] = []
    for unit in units:
        modules, params = [unit], {names[p]: p for p in unit.parameters() if p in names}
        tied = [i for i, (_, earlier) in enumerate(parts) if earlier.keys() & params.keys()]
        for i in reversed(tied):
            modules, params = parts[i][0] + modules, parts[i][1] | params
            del parts[i]
        if params:
            parts.insert(tied[0] if tied else len(parts), (modules, params))
    rest = {name: p for p, name in names.items() if not any(name in params for _, params in parts)}
    return ([([model], rest)] if rest else []) + parts


def require_same_weights(model: nn.Module) -> None:
    """UserError on every rank, naming the first rank whose parameters are not those of rank 0. COLLECTIVE; waits for the device."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = {name: p.detach().flatten().view(bits[p.itemsize]).sum(dtype=torch.int64).item() for name, p in model.named_parameters()}
    everyone: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, sums)
    for rank, theirs in enumerate(everyone):
        if different := [name for name in everyone[0] | theirs if everyone[0].get(name) != theirs.get(name)]:
            raise UserError(f"rank {rank} starts from other weights than rank 0 (the first is {different[0]}); "
                            "every rank must draw them from one seed, or load one checkpoint")


class Sharding:
    """
    Takes over a model whose weights are drawn (the same on every rank, on `device`): casts it to `dtype`, and from then
    on gives each rank its `slices` to update, brings their gradients and shares what became of them. Masters are
    float32. Parameters with requires_grad=False stay whole on every rank: they are never sent and never updated.

    units: the modules whose parameters travel together, in the order of the forward pass. A rank may leave out units,
    or the body of a micro-step: their gradients are zero. On stage 3 every rank must run all units, in this order.
    shard_size: ranks of a shard group, -1 for all; the others are replicas. reduce_dtype: of gradients on their way.
    overlap=False sends only when nothing computes (to measure what overlapping is worth).
    UserError for ranks that start from different weights, and for a dtype without the range of float32.
    """

    def __init__(
        self, model: nn.Module, units: list[nn.Module], device: torch.device, dtype: torch.dtype, stage: int,
        shard_size: int = -1, reduce_dtype: torch.dtype = torch.float32, overlap: bool = True,
    ):
        self.model, self.model_class, self.device = model, type(model), device
        self.dtype, self.reduce_dtype, self.stage, self.overlap = dtype, reduce_dtype, stage, overlap
        if dtype not in (torch.float32, torch.bfloat16):
            raise UserError(f"dtype={str(dtype).removeprefix('torch.')} would need its losses scaled; expected float32 or bfloat16")
        if stage == 3 and not dist.is_initialized():  # fully_shard wants a process group, be it of one
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.shards = 1 if stage == 0 else shard_size if shard_size > 0 else self.world_size
        if shard_size != -1 and (shard_size < 1 or stage == 0) or self.world_size % self.shards:
            raise UserError(f"shard_size={shard_size} does not divide the {self.world_size} ranks, or shards nothing on stage 0; -1 is all ranks")
        self.replicas, (self.replica, self.shard_rank) = self.world_size // self.shards, divmod(self.rank, self.shards)
        self.mesh = self.shard_group = self.replica_group = None
        if dist.is_initialized():
            self.mesh = init_device_mesh(device.type, (self.replicas, self.shards), mesh_dim_names=("replica", "shard"))
            self.shard_group, self.replica_group = self.mesh.get_group("shard"), self.mesh.get_group("replica")
            set_timeout(SETUP_TIMEOUT, self.shard_group, self.replica_group)
        self.masters_apart = dtype != torch.float32  # else a master is the parameter's own memory
        self.last, self.reduced = False, False  # in the last micro-step; past it
        self.unsent: deque[Bucket] = deque()  # in this micro-step, in the order in which every rank sends
        self.in_flight: deque = deque()  # (bucket, work, what it fills and reads, last micro-step?): referenced until it is done
        self.ran = len(units)            # stage 3: units that have run in this micro-step
        self.buckets: list[Bucket] = []
        self.slices: list[Slice] = []
        self.pieces: dict[str, list[Piece]] = {}
        if self.world_size > 1 and dist.get_backend() != "fake":  # a dry run has no other ranks
            require_same_weights(model)
        self.frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        for p in self.frozen.values():
            p.data = p.data.to(dtype)
        parts = partition(model, units)
        if stage == 3:
            self.shard_fully([modules for modules, _ in parts if modules != [model]], units[-1])
        else:
            for modules, params in parts:
                self.add_bucket(modules, params)

    # --- setting up

    def add_bucket(self, modules: list[nn.Module], params: dict[str, Parameter]) -> None:
        bucket = Bucket(params, self.dtype, self.shards, self.shard_rank)
        self.buckets.append(bucket)
        self.slices += bucket.slices
        self.pieces |= bucket.pieces
        if self.world_size > 1:
            for module in modules:
                module.register_forward_pre_hook(bucket.wait)
            for p in params.values():
                p.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self.gradient_is_there(bucket))

    def shard_fully(self, units: list[list[nn.Module]], last: nn.Module) -> None:
        """Stage 3. The float32 rows that fully_shard keeps are the masters; it gathers them in the compute dtype."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        before = dict(self.model.named_parameters())  # fully_shard makes new parameters
        for name, p in before.items():
            p.data = p.data if name in self.frozen else p.data.float()
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=self.reduce_dtype, cast_forward_inputs=False)
        settings = dict(mesh=self.mesh if self.replicas > 1 else self.mesh["shard"], mp_policy=policy, ignored_params=set(self.frozen.values()))
        for unit in units:  # the last one's backward follows its forward: it stays whole in between
            fully_shard(unit, reshard_after_forward=last not in unit, **settings)
        fully_shard(self.model, **settings)
        self.units = [unit[0] for unit in units]  # any module of a unit stands for it
        for i, unit in enumerate(self.units if self.world_size > 1 else ()):  # before the hook that gathers it
            unit.register_forward_pre_hook(lambda *_, i=i: self.require_order(i), prepend=True)
        for unit, following in zip(self.units, self.units[1:]):
            unit.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([unit])
        for unit in (*self.units, self.model):
            unit.set_gradient_divide_factor(1.0)  # sums here too: dividing is the stats's business
            unit.set_force_sum_reduction_for_comms(True)
            if self.device.type == "cpu" and self.shards > 1:
                unit.set_custom_reduce_scatter(GlooReduceScatter())
        self.model._set_unshard_async_op(self.device.type == "cpu" and self.overlap)
        for name, p in self.model.named_parameters():
            if name not in self.frozen:
                self.pieces[name] = row_pieces(tuple(p.shape), self.shards)
                for piece in self.pieces[name]:
                    if piece.rank == self.shard_rank:
                        self.slices.append(make_slice(name, before[name], piece, p.detach().to_local().view(-1)))

    # --- during a step

    @contextlib.contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """
        Around forward and backward pass, equally often on every rank; the last one of a step lets gradients travel as
        they appear. Buckets are sent from the last unit to the first, on every rank: a rank's own backward pass may
        complete them in another order, and collectives that start in different orders would mix units.
        """
        self.last, self.reduced = last, last
        if self.world_size > 1 and (last or self.stage == 2 and self.shards > 1):
            self.unsent.extend(reversed(self.buckets))
        if self.stage == 3 and self.replicas > 1:
            self.model.set_requires_all_reduce(last)
        self.ran = 0
        yield
        while self.unsent:  # what did not go by itself: parameters that took no part have a gradient of zero
            self.send(self.unsent.popleft())
        for bucket in self.buckets:
            bucket.computed = 0
        while self.in_flight and (last or not self.overlap):
            self.receive()
        if self.stage == 3 and self.world_size > 1:
            self.require_order(len(self.units))

    def require_order(self, unit: int) -> None:
        """Stage 3: the next to run is `unit`. UserError where one before it has not run: ranks would gather different units."""
        if unit > self.ran:
            raise UserError(f"rank {self.rank} left out unit {self.ran} of {len(self.units)} in a micro-step; "
                            "zero_stage=3 runs all of them in order on every rank, stages 0 to 2 do not need to")
        self.ran = max(self.ran, unit + 1)

    def gradient_is_there(self, bucket: Bucket) -> None:
        """Called by the backward pass for each parameter."""
        bucket.computed += 1
        assert bucket.computed <= len(bucket.params), "one backward pass in a micro_step"
        while self.overlap and self.unsent and self.unsent[0].computed == len(self.unsent[0].params):
            self.send(self.unsent.popleft())

    def send(self, bucket: Bucket) -> None:
        """Start the sum over ranks of a bucket's gradients: over the shard group, where each rank gets its own slice."""
        while self.shards > 1 and len(self.in_flight) >= MAX_IN_FLIGHT:
            self.receive()
        whole = bucket.take_gradients(self.reduce_dtype)
        if self.shards > 1:
            own = whole.new_empty(bucket.slice_size)
            self.in_flight.append((bucket, reduce_scatter(own, whole, self.shard_group), own, whole, self.last))
        elif self.replicas > 1:
            work = dist.all_reduce(whole, group=self.replica_group, async_op=True)
            self.in_flight.append((bucket, work, whole, whole, self.last))

    def receive(self) -> None:
        """Add the oldest gradients on their way to what this rank keeps; the last ones go on to the replicas."""
        bucket, work, own, _whole, last = self.in_flight.popleft()
        work.wait()
        bucket.grad = own.float() if bucket.grad is None else bucket.grad.add_(own)
        if last and self.shards > 1 and self.replicas > 1:
            bucket.pending.append((dist.all_reduce(bucket.grad, group=self.replica_group, async_op=True), bucket.grad))

    def summed_gradients(self) -> None:
        """Every slice's `grad`: summed over all ranks and micro-steps. The parameters' own gradients are let go."""
        if not self.reduced:  # a rank without a micro-batch: the others wait for its gradients of zero
            with self.accumulate(last=True):
                pass
        self.reduced = False
        for bucket in self.buckets if self.world_size > 1 else ():
            bucket.wait()
            for s, at in zip(bucket.slices, bucket.offsets):
                s.grad = bucket.grad[at : at + s.end - s.start]
            bucket.grad = None
        params = dict(self.model.named_parameters())
        for s in self.slices if self.world_size == 1 or self.stage == 3 else ():
            grad = params[s.name].grad
            grad = grad.to_local() if self.stage == 3 and grad is not None else grad
            s.grad = torch.zeros_like(s.master) if grad is None else grad.reshape(-1)
        for p in params.values():
            p.grad = None

    def reduce_and_clip(self, loss: Tensor, count: Tensor | float = 1.0, grad_clip: float = 0.0,
                        stop: bool = False, save: bool = False) -> StepStats:
        """
        The one small collective of a step, after its last backward pass; then every slice has its averaged gradient.

        loss, count: of this rank's part of the batch; the mean loss is Σ loss / Σ count, and the gradient is divided
        by Σ count as well. count 1 with a mean loss averages over ranks; where ranks have unequally many targets,
        back-propagate sums and count the targets. grad_clip: largest norm of the averaged gradient, 0 for no limit.
        stop, save: what this rank asks all ranks for; they are summed over the ranks.
        """
        self.summed_gradients()
        # Slices tile the gradient once per shard group: replicas would count it again. Where clipping depends on it, the
        # norm is summed in float64: in float32 its last digits, and so the run, would depend on how the gradient is cut.
        exact = sum_dtype(self.device)
        norms = [torch.linalg.vector_norm(s.grad, dtype=exact if grad_clip > 0 else torch.float32) for s in self.slices]
        squared = sum((norm.to(exact).square() for norm in norms), torch.zeros((), dtype=exact, device=self.device)) / self.replicas
        # Filled on the device: a number copied there would wait for the whole backward pass.
        count = count.to(exact) if isinstance(count, Tensor) else squared.new_full((), count)
        sums = torch.stack([loss.detach().to(exact), count, squared])
        bad = (~sums.isfinite().all()).to(exact)  # NaN and Inf anywhere in the gradient make its norm so
        sums = torch.cat([sums, torch.stack([bad, bad.new_full((), float(stop)), bad.new_full((), float(save))])])
        if self.world_size > 1:
            dist.all_reduce(sums)
        loss, count, squared, bad, stops, saves = sums.unbind()
        norm = squared.sqrt() / count
        ok = ((bad == 0) & norm.isfinite() & loss.isfinite()).float()
        divisor = count * (norm / grad_clip).clamp(min=1) if grad_clip > 0 else count
        for s in self.slices:
            # A product with zero would keep NaN: bad gradients are replaced, not scaled away.
            s.grad = torch.where(ok > 0, s.grad / divisor, 0.0)
        return StepStats(ok, torch.stack([loss / count, norm, ok, stops, saves]).float())

    def all_gather_params(self) -> None:
        """
        Start sharing the updated slices; each unit waits for its own parameters just before its next forward pass.
        On stage 3 the units gather by themselves.
        """
        for s in self.slices:
            s.grad = None
        for bucket in self.buckets:
            if self.shards > 1:
                own = bucket.master.to(self.dtype, copy=True)
                bucket.pending.append((all_gather_single(bucket.flat, own, self.shard_group, async_op=True), own))
                if not self.overlap:
                    bucket.wait()
            elif self.masters_apart:
                bucket.flat.copy_(bucket.master)

    # --- whole again

    @torch.no_grad()
    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole parameter in the compute dtype), one at a time, on every rank; every rank must go through all."""
        for bucket in self.buckets:
            bucket.wait()
        for unit in self.units if self.stage == 3 else ():  # the last one stays whole after a forward pass without a backward
            unit.reshard()
        for name, p in self.model.named_parameters():
            whole = self.stage < 3 or name in self.frozen
            yield name, p.detach() if whole else p.detach().to(self.dtype).full_tensor()

    def load_whole(self, name: str, tensor: Tensor) -> None:
        """Put a whole parameter in place (stages 0 to 2, and frozen ones); in float32 that is its master as well."""
        for bucket in self.buckets:
            bucket.wait()
        for params in (self.frozen, *(bucket.params for bucket in self.buckets)):
            if name in params:
                params[name].data.copy_(tensor)

    def whole_model(self, everywhere: bool = False) -> nn.Module | None:
        """On rank 0, or on every rank, a model that computes without the other ranks, to sample from. Every rank must call it."""
        wanted = everywhere or self.rank == 0
        if self.stage < 3:
            for bucket in self.buckets:
                bucket.wait()
            return self.model if wanted else None
        tensors = {name: tensor for name, tensor in self.whole_tensors() if wanted}  # every rank goes through all
        if not wanted:
            return None
        with torch.device("meta"):
            model = self.model_class(self.model.config)
        model.load_state_dict(tensors, assign=True)
        return model


class GlooReduceScatter:
    """nanochat.distributed.reduce_scatter as fully_shard wants it."""

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group, op, async_op: bool = False) -> None:
        reduce_scatter(output_tensor, input_tensor, group).wait()
