"""
ZeRO: what each rank keeps, and what travels when. Rajbhandari et al. 2020, arXiv:1910.02054.

    zero_stage   parameters                   gradients                                        optimizer state
    0            whole                        whole; all-reduced in the last micro-step        whole
    1            whole                        whole; reduce-scattered in the last micro-step   1/N
    2            whole                        1/N; reduce-scattered in every micro-step        1/N
    3            1/N; gathered unit by unit   1/N; reduce-scattered in every micro-step        1/N

On stages 1 to 3 Muon's matrices travel, too: each one's gradient, mixed with its momentum, once per step to the rank
that orthogonalizes it, and back (`MatrixExchange` in muon.py). AdamW needs no communication.

A unit is the embedding, a block or the head. Its gradients start to travel as soon as the backward pass has computed
all of them. With one micro-step per optimizer step, stages 1 and 2 send the same, but they keep gradients in different
dtypes: on stages 0 and 1 a parameter's gradient is float32, the sum of its micro-steps; on stage 2 it has the dtype in
which it was computed (the head's is float32 at once), and the sums over ranks and micro-steps are float32. "Waits"
means: on a GPU the stream of its kernels waits, on a CPU the process.

N is the number of ranks in a shard group, `shard_size`. Several groups are replicas: they keep the same shards and add
up their gradients once per optimizer step. Stage 0 is stage 1 with groups of one rank. One rank sends nothing. In a
pipeline all this holds for the data-parallel ranks of each pipeline stage; each stage keeps its own layers.

Optimizer state is float32: masters and moments. On stages 0 to 2 the masters are copies of this rank's part of the
parameters, but with dtype float32 they are the parameters' own memory. Stage 3 is PyTorch's fully_shard (Zhao et al.
2023, arXiv:2304.11277): the masters are the float32 rows that it keeps.
"""
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from nanochat.model.gpt import model_without_memory
from nanochat.optim.sharding import Shard, Sharding, equal_ranges, row_ranges
from nanochat.runtime.collectives import all_gather_single, reduce_scatter

# Units whose whole gradients are in flight at once. More would take memory. (On stage 0 the sums of a step need it all
# the same.)
MAX_IN_FLIGHT = 2


def shard_model(
    model: nn.Module,
    units: list[nn.Module],
    device: torch.device,
    dtype: torch.dtype,
    zero_stage: int,
    shard_size: int = -1,
    pipeline_stages: int = 1,
    weights: Callable[[str], Tensor] | None = None,
) -> Sharding:
    """
    Shard a model with the same weights on every rank, on `device`, and cast it to `dtype`.

    weights: for a model on the meta device, returns the whole weights of a parameter by its name. Units get their
    weights and are sharded one by one, so no rank ever holds more than one whole unit in float32.
    units: the modules whose parameters travel together, in the order of the forward pass. On stages 0 to 2 a rank may
    leave out units in a micro-step: their gradients are zero. On stage 3 every rank must run all units, in this order.
    shard_size: ranks of a shard group, -1 for all. pipeline_stages: groups of neighbouring ranks, each with layers of
    its own; see nanochat.optim.pipeline.
    UserError for ranks that start from different weights, and for a shard_size that does not divide the ranks.
    COLLECTIVE.
    """
    kind = FullyShard if zero_stage == 3 else Buckets
    sharding = kind(model, device, dtype, zero_stage, shard_size, pipeline_stages)
    sharding.add_units(units, weights)
    return sharding


class Bucket:
    """
    The parameters of one unit on stages 0 to 2, end to end in `flat`, a tensor of the compute dtype; the parameters are
    views into it. `flat` is cut into N equal parts. A rank keeps the masters and the summed gradients of its own part.
    With three parameters and N = 2:

        params  | c_fc                        | c_q             | scale |  views into flat; the largest comes first
        flat    | c_fc                        | c_q             | scale | padding |
        parts   | rank 0: part_size elements     | rank 1                         |
        shards  | c_fc                        |  | c_q          | scale |  c_q is cut: ranks 0 and 1 keep one shard each

    Rank 1 keeps `master` and `grad`, each float32 of part_size, for its shards of c_q and scale. In float32 the master
    is that part of `flat` itself. After an update the parts are all-gathered.
    """

    def __init__(
        self,
        params: dict[str, Parameter],
        sharding: Sharding,
    ):
        ranks = sharding.shard_count
        rank = sharding.shard_rank
        self.params = params
        self.part_size, self.ranges = equal_ranges({name: p.numel() for name, p in params.items()}, ranks)
        self.flat = torch.zeros(ranks * self.part_size, dtype=sharding.dtype, device=sharding.device)
        if sharding.separate_masters:
            self.master = torch.zeros(self.part_size, device=sharding.device)
        else:
            self.master = self.flat.view(ranks, -1)[rank]

        # The shards of this rank lie one after the other in its part.
        kept = [(name, r) for name, ranges in self.ranges.items() for r in ranges if r.rank == rank]
        self.sizes = [r.size for _, r in kept]
        self.shards: list[Shard] = []
        for (name, r), master in zip(kept, self.split(self.master)):
            # The master is copied before the weights are rounded to dtype.
            master.copy_(params[name].data.flatten()[r.start : r.end])
            self.shards.append(Shard(name, r.start, r.end, master))

        # On stages 0 and 1 autograd sums micro-steps in float32, even if products are bfloat16. A gradient that is sent
        # in every micro-step keeps its own dtype (None).
        is_summed_here = sharding.zero_stage < 2 or ranks == 1
        offset = 0
        for p in params.values():
            view = self.flat[offset : offset + p.numel()].view(p.shape)
            # This frees the original weights' memory.
            p.data = view.copy_(p.data)
            p.grad_dtype = torch.float32 if is_summed_here else None
            offset += p.numel()
        self.padding = len(self.flat) - offset  # elements at the end
        self.computed = 0                # parameters whose gradient the backward pass of this micro-step has computed
        self.grad: Tensor | None = None  # (part_size,) float32, summed over ranks and micro-steps
        self.pending: list = []          # (work, the tensor it reads): collectives that fill `flat` or `grad`

    def split(self, part: Tensor) -> tuple[Tensor, ...]:
        """(part_size,) elements of this rank's part → views, one for each of its shards, without the padding."""
        return part[: sum(self.sizes)].split(self.sizes)

    def take_gradients(self) -> Tensor:
        """The whole gradients end to end in float32, (N · part_size,), zero for parameters without one; frees them."""
        parts = []
        for p in self.params.values():
            parts.append(self.flat.new_zeros(p.numel()) if p.grad is None else p.grad.flatten())
            p.grad = None
        if len(parts) == 1 and self.padding == 0:
            # The head: its gradient, one of the largest, is float32 and not copied.
            return parts[0].float()
        parts.append(self.flat.new_zeros(self.padding))
        return torch.cat(parts, out=torch.empty_like(self.flat, dtype=torch.float32))

    # ---- forward: a unit waits for its weights

    def wait(self, *_) -> None:
        """Wait until `flat` and `grad` are complete. Also a hook before each forward pass of the unit."""
        for work, _source in self.pending:
            work.wait()
        self.pending.clear()


class Sent(NamedTuple):
    """A bucket's gradients on their way."""

    bucket: Bucket
    work: dist.Work
    part: Tensor   # what arrives: (part_size,), or on stage 0 the whole
    whole: Tensor  # what is sent; its memory must stay until the work is done
    last: bool     # sent in the last micro-step


class Buckets(Sharding):
    """
    Stages 0 to 2.

    There is no zero_grad. A parameter's gradient is freed when it is sent (`Bucket.take_gradients`), or in
    `reduce_and_clip` where nothing is sent; a shard's gradient is freed in `all_gather_params`.
    """

    def __init__(self, *layout):
        super().__init__(*layout)
        self.buckets: list[Bucket] = []         # one per unit
        self.unsent: deque[Bucket] = deque()    # in this micro-step, in the order in which every rank sends
        self.in_flight: deque[Sent] = deque()   # the oldest first

    def add_unit(self, unit: nn.Module, params: dict[str, Parameter]) -> None:
        bucket = Bucket(params, self)
        self.buckets.append(bucket)
        self.shards += bucket.shards
        self.ranges |= bucket.ranges
        if self.dp_ranks > 1:
            unit.register_forward_pre_hook(bucket.wait)
            for p in params.values():
                p.register_post_accumulate_grad_hook(lambda _: self.gradient_computed(bucket))

    # --- Micro-steps

    # ---- backward: a unit's gradients are complete, and travel

    @contextlib.contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """
        Gradients travel during the backward pass (of several `passes`, during the last one of each unit): on stages 0
        and 1 in the last micro-step of a step, on stage 2 in every one. All ranks send buckets from the last unit to
        the first: a rank's backward pass may complete them in another order, but collectives that start in different
        orders on different ranks would mix units.
        """
        self.last = last
        sends_now = last or (self.zero_stage == 2 and self.shard_count > 1)
        if self.dp_ranks > 1 and sends_now:
            self.unsent.extend(reversed(self.buckets))
        yield
        # The remaining buckets have a parameter that took no part in the loss.
        while self.unsent:
            self.send(self.unsent.popleft())
        for bucket in self.buckets:
            bucket.computed = 0
        # In the last micro-step wait for all; in others the last two, block 0 and embedding, travel during the next
        # forward pass.
        while self.in_flight and last:
            self.receive()

    def gradient_computed(self, bucket: Bucket) -> None:
        """The backward pass calls this for each parameter. Sends all buckets that are complete and whose turn it is."""
        bucket.computed += 1
        assert bucket.computed <= self.passes * len(bucket.params), "more backward passes than `passes`"
        while self.unsent and self.unsent[0].computed == self.passes * len(self.unsent[0].params):
            self.send(self.unsent.popleft())

    def send(self, bucket: Bucket) -> None:
        """Start the sum of a bucket's gradients over the shard group; each rank gets the sum of its own part."""
        while self.shard_count > 1 and len(self.in_flight) >= MAX_IN_FLIGHT:
            self.receive()
        whole = bucket.take_gradients()  # (N · part_size,)
        if self.shard_count > 1:
            part = whole.new_empty(bucket.part_size)
            work = reduce_scatter(part, whole, self.groups["shard"])
        else:
            part = whole
            work = dist.all_reduce(whole, group=self.groups["replica"], async_op=True)
        self.in_flight.append(Sent(bucket, work, part, whole, self.last))

    def receive(self) -> None:
        """Wait for the oldest sum and add it to the bucket's; in the last micro-step, start the sum over replicas."""
        bucket, work, part, _, last = self.in_flight.popleft()
        work.wait()
        if bucket.grad is None:
            bucket.grad = part.float()
        else:
            bucket.grad.add_(part)
        if last and self.shard_count > 1 and self.replicas > 1:
            work = dist.all_reduce(bucket.grad, group=self.groups["replica"], async_op=True)
            bucket.pending.append((work, bucket.grad))

    # --- Once per step

    def collect_gradients(self) -> None:
        if self.dp_ranks == 1:
            # Nothing was sent: the parameters have the sums.
            return super().collect_gradients()
        for bucket in self.buckets:
            bucket.wait()
            for shard, grad in zip(bucket.shards, bucket.split(bucket.grad)):
                shard.grad = grad
            bucket.grad = None

    # ---- gather: the new weights go to all

    def all_gather_params(self) -> None:
        """Each unit waits for its own parameters just before its next forward pass."""
        super().all_gather_params()
        for bucket in self.buckets:
            if self.shard_count > 1:
                # A copy, because in float32 the master is a view of the output.
                own = bucket.master.to(self.dtype, copy=True)
                work = all_gather_single(bucket.flat, own, self.groups["shard"], async_op=True)
                bucket.pending.append((work, own))
            elif self.separate_masters:
                bucket.flat.copy_(bucket.master)

    def wait_for_params(self) -> None:
        for bucket in self.buckets:
            bucket.wait()


class FullyShard(Sharding):
    """
    Stage 3: fully_shard keeps rows of every parameter, and gathers a unit when it runs. Parameters and gradients are
    DTensors.
    """

    def __init__(self, model: nn.Module, device: torch.device, *layout):
        # fully_shard needs a process group, even for one rank.
        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        super().__init__(model, device, *layout)
        self.units: list[nn.Module] = []

    def add_units(self, *units_and_weights) -> None:
        """Shard all units, then set in which order they are gathered and how gradients are summed."""
        super().add_units(*units_and_weights)
        self.shard_rows(self.model)
        # The last unit's backward pass follows its forward pass at once, so its weights stay gathered.
        self.units[-1].set_reshard_after_forward(False)
        for unit, following in zip(self.units, self.units[1:]):
            unit.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([unit])
        for unit in (*self.units, self.model):
            # Sums, as on the other stages: reduce_and_clip divides.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            if self.device.type == "cpu" and self.shard_count > 1:
                unit.set_custom_reduce_scatter(GlooReduceScatter())
        self.model._set_unshard_async_op(self.device.type == "cpu")
        # Here, because otherwise the first module that runs becomes the root; in CORE, the embedding.
        self.model._get_fsdp_state()._lazy_init()
        for name, p in self.model.named_parameters():
            self.ranges[name] = row_ranges(p.shape, self.shard_count)
            for r in self.ranges[name]:
                if r.rank == self.shard_rank:
                    self.shards.append(Shard(name, r.start, r.end, p.detach().to_local().view(-1)))

    def add_unit(self, unit: nn.Module, params: dict[str, Parameter]) -> None:
        for p in params.values():
            # The rows that fully_shard keeps are the masters.
            p.data = p.data.float()
        self.shard_rows(unit)
        self.units.append(unit)

    def shard_rows(self, module: nn.Module) -> None:
        """The module computes in the compute dtype; gathered parameters are freed between forward and backward."""
        # Here, because the import takes a second.
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(self.dtype, torch.float32, cast_forward_inputs=False)
        mesh = self.mesh["replica", "shard"] if self.replicas > 1 else self.mesh["shard"]
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)

    @contextlib.contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Gradients travel in every micro-step, between replicas only in the last one."""
        self.last = last
        self.model.set_requires_all_reduce(last)
        yield

    def full_tensor(self, name: str) -> Tensor:
        return self.model.get_parameter(name).detach().to(self.dtype).full_tensor()

    def wait_for_params(self) -> None:
        """Nothing is in flight, but the last unit stays whole after a forward pass without a backward pass."""
        for unit in self.units:
            unit.reshard()

    def gather_model(self) -> nn.Module:
        model = model_without_memory(self.model.config)
        model.load_state_dict(dict(self.full_tensors()), assign=True)
        return model


class GlooReduceScatter:
    """nanochat.runtime.collectives.reduce_scatter with the interface of fully_shard."""

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group,
        op,
        async_op: bool = False,
    ) -> None:
        reduce_scatter(output_tensor, input_tensor, group).wait()
