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
class Verdict:
    """What all ranks agree on about a step, on the device: nobody has to wait for it."""

    ok: Tensor      # 1.0, or 0.0 where some rank saw a loss or gradient that is not finite: nothing may change then
    report: Tensor  # (4,) float32: mean loss, norm of the averaged gradient before clipping, ok, ranks that ask to stop


class Bucket:
    """
    The parameters of one unit, end to end in one flat tensor of the compute dtype (parameters are views of it), cut
    into one equal slice for each rank of the shard group. What a rank keeps beyond that is of its own slice.
    """

    def __init__(self, params: dict[str, Parameter], dtype: torch.dtype, ranks: int, rank: int):
        self.params = params
        self.slice_size, self.pieces = equal_pieces({name: tuple(p.shape) for name, p in params.items()}, ranks)
        weights = [p.data.flatten() for p in params.values()]
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
        self.sent = False                        # in this step
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


class Sharding:
    """
    Takes over a model whose weights are drawn (float32, the same on every rank, on `device`): casts it to `dtype`, and
    from then on gives each rank its `slices` to update, brings their gradients and shares what became of them.

    units: the modules whose parameters travel together, in the order of the forward pass; they hold all parameters.
    shard_size: ranks of a shard group, -1 for all; the others are replicas. reduce_dtype: of gradients on their way.
    overlap=False sends only when nothing computes (to measure what overlapping is worth).
    """

    def __init__(
        self, model: nn.Module, units: list[nn.Module], device: torch.device, dtype: torch.dtype, stage: int,
        shard_size: int = -1, reduce_dtype: torch.dtype = torch.float32, overlap: bool = True,
    ):
        self.model, self.model_class, self.units, self.device = model, type(model), units, device
        self.dtype, self.reduce_dtype, self.stage, self.overlap = dtype, reduce_dtype, stage, overlap
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
        self.sending, self.last = False, False
        self.in_flight: deque = deque()  # (bucket, work, what it fills and reads, last micro-step?): referenced until it is done
        self.buckets: list[Bucket] = []
        self.slices: list[Slice] = []
        self.pieces: dict[str, list[Piece]] = {}
        named = {p: name for name, p in model.named_parameters()}
        of_units = [{named[p]: p for p in unit.parameters()} for unit in units]
        assert sum(map(len, of_units)) == len(named), "every parameter belongs to one unit"
        if stage == 3:
            self.shard_fully(named)
        else:
            for unit, params in zip(units, of_units):
                self.add_bucket(unit, params)

    # --- setting up

    def add_bucket(self, unit: nn.Module, params: dict[str, Parameter]) -> None:
        bucket = Bucket(params, self.dtype, self.shards, self.shard_rank)
        self.buckets.append(bucket)
        self.slices += bucket.slices
        self.pieces |= bucket.pieces
        if self.world_size > 1:
            unit.register_forward_pre_hook(bucket.wait)
            for p in params.values():
                p.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self.gradient_is_there(bucket))

    def shard_fully(self, named: dict[Parameter, str]) -> None:
        """Stage 3. The float32 rows that fully_shard keeps are the masters; it gathers them in the compute dtype."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        multipliers = {name: p for p, name in named.items()}  # fully_shard makes new parameters
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=self.reduce_dtype, cast_forward_inputs=False)
        mesh = self.mesh if self.replicas > 1 else self.mesh["shard"]
        for unit in self.units:  # the last one's backward follows its forward: it stays whole in between
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=unit is not self.units[-1])
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        for unit, following in zip(self.units, self.units[1:]):
            unit.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([unit])
        for unit in (*self.units, self.model):
            unit.set_gradient_divide_factor(1.0)  # sums here too: dividing is the verdict's business
            unit.set_force_sum_reduction_for_comms(True)
            if self.device.type == "cpu" and self.shards > 1:
                unit.set_custom_reduce_scatter(GlooReduceScatter())
        self.model._set_unshard_async_op(self.device.type == "cpu" and self.overlap)
        for name, p in self.model.named_parameters():
            self.pieces[name] = row_pieces(tuple(p.shape), self.shards)
            for piece in self.pieces[name]:
                if piece.rank == self.shard_rank:
                    self.slices.append(make_slice(name, multipliers[name], piece, p.detach().to_local().view(-1)))

    # --- during a step

    @contextlib.contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        """Around forward and backward pass; the last one of a step lets gradients travel as they appear."""
        self.last, sends = last, self.world_size > 1 and (last or self.stage == 2 and self.shards > 1)
        self.sending = sends and self.overlap
        if self.stage == 3 and self.replicas > 1:
            self.model.set_requires_all_reduce(last)
        yield
        for bucket in self.buckets:  # what did not go by itself: parameters that took no part have a gradient of zero
            if sends and not bucket.sent and (last or bucket.computed or not self.overlap):
                self.send(bucket)
        for bucket in self.buckets:
            bucket.sent, bucket.computed = False, 0
        while self.in_flight and (last or not self.overlap):
            self.receive()

    def gradient_is_there(self, bucket: Bucket) -> None:
        """Called by the backward pass for each parameter."""
        bucket.computed += 1
        assert bucket.computed <= len(bucket.params), "one backward pass in a micro_step"
        if self.sending and bucket.computed == len(bucket.params):
            while self.shards > 1 and len(self.in_flight) >= MAX_IN_FLIGHT:
                self.receive()
            self.send(bucket)

    def send(self, bucket: Bucket) -> None:
        """Start the sum over ranks of a bucket's gradients: over the shard group, where each rank gets its own slice."""
        bucket.sent = True
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
        params = dict(self.model.named_parameters())
        for bucket in self.buckets:
            bucket.wait()
            if self.world_size > 1:
                for s, at in zip(bucket.slices, bucket.offsets):
                    s.grad = bucket.grad[at : at + s.end - s.start]
                bucket.grad = None
        for s in self.slices:
            if s.grad is None:
                grad = params[s.name].grad
                grad = grad.to_local() if self.stage == 3 and grad is not None else grad
                s.grad = torch.zeros_like(s.master) if grad is None else grad.reshape(-1)
        for p in params.values():
            p.grad = None

    def agree(self, loss: Tensor, count: Tensor | float = 1.0, grad_clip: float = 0.0, stop: bool = False) -> Verdict:
        """
        The one small collective of a step, after its last backward pass; then every slice has its averaged gradient.

        loss, count: of this rank's part of the batch; the mean loss is Σ loss / Σ count, and the gradient is divided
        by Σ count as well. count 1 with a mean loss averages over ranks; where ranks have unequally many targets,
        back-propagate sums and count the targets. grad_clip: largest norm of the averaged gradient, 0 for no limit.
        stop: this rank was asked to stop.
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
        sums = torch.cat([sums, torch.stack([bad, bad.new_full((), float(stop))])])
        if self.world_size > 1:
            dist.all_reduce(sums)
        loss, count, squared, bad, stops = sums.unbind()
        norm = squared.sqrt() / count
        ok = ((bad == 0) & norm.isfinite() & loss.isfinite()).float()
        divisor = count * (norm / grad_clip).clamp(min=1) if grad_clip > 0 else count
        for s in self.slices:
            # A product with zero would keep NaN: bad gradients are replaced, not scaled away.
            s.grad = torch.where(ok > 0, s.grad / divisor, 0.0)
        return Verdict(ok, torch.stack([loss / count, norm, ok, stops]).float())

    def gather(self) -> None:
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
            yield name, p.detach().to(self.dtype).full_tensor() if self.stage == 3 else p.detach()

    def load_whole(self, name: str, tensor: Tensor) -> None:
        """Put a whole parameter in place (stages 0 to 2); in float32 that is its master as well."""
        for bucket in self.buckets:
            if name in bucket.params:
                bucket.wait()
                bucket.params[name].data.copy_(tensor)

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
