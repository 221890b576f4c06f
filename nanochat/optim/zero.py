"""
ZeRO: what each rank keeps, and what travels when. Rajbhandari et al. 2020, arXiv:1910.02054.

    zero_stage   parameters                   gradients                                        optimizer state
    0            whole                        whole; all-reduced in the last micro-step        whole
    1            whole                        whole; reduce-scattered in the last micro-step   1/N
    2            whole                        1/N; reduce-scattered in every micro-step        1/N
    3            1/N; gathered unit by unit   1/N; reduce-scattered in every micro-step        1/N

On stages 1 to 3 Muon's matrices travel besides: once per step to the rank that orthogonalizes each, and back
(`MatrixExchange` in muon.py). AdamW needs no communication.

A unit is the embedding, a block or the head. Its gradients start to travel as soon as the backward pass has computed
all of them. With one micro-step per optimizer step, stages 1 and 2 send the same, but they keep gradients in different
dtypes: on stages 0 and 1 a parameter's gradient is float32, the sum of its micro-steps; on stage 2 it has the dtype in
which it was computed, and only the sum over ranks is float32.

N is the number of ranks in a shard group, `shard_size`. Several groups are replicas: they keep the same and add up
their gradients once per optimizer step. Stage 0 is stage 1 with groups of one rank. One rank sends nothing. In a
pipeline all this holds for the data-parallel ranks of each pipeline stage, which keep other layers than the other
stages.

Optimizer state is float32: masters and moments. On stages 0 to 2 the masters are copies of this rank's part of the
parameters, but with dtype float32 they are the parameters' own memory. Stage 3 is PyTorch's fully_shard: the masters
are the float32 rows that it keeps.
"""
import contextlib
from collections import deque
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Parameter

from nanochat.model.gpt import model_without_memory
from nanochat.optim.partition import Shard, ShardRange, equal_ranges, partition, place_in_pipeline, row_ranges
from nanochat.runtime.collectives import all_gather_single, gather_objects, rank_and_size, reduce_scatter, require_same
from nanochat.runtime.compiling import in_one_pass
from nanochat.runtime.devices import sum_dtype
from nanochat.runtime.distributed import SETUP_TIMEOUT, set_timeout
from nanochat.runtime.errors import UserError
from nanochat.runtime.step_stats import StepStats

MAX_IN_FLIGHT = 2  # units whose whole gradients are being sent at once


class Bucket:
    """
    The parameters of one unit on stages 0 to 2, end to end in `flat`, a tensor of the compute dtype; the parameters are
    views into it. `flat` is cut into N equal parts. A rank keeps the masters and the summed gradients of its own part.
    """

    def __init__(
        self,
        params: dict[str, Parameter],
        dtype: torch.dtype,
        shard_count: int,
        shard_rank: int,
        sum_in_float32: bool,
    ):
        self.params = params
        shapes = {name: tuple(p.shape) for name, p in params.items()}
        self.part_size, self.ranges = equal_ranges(shapes, shard_count)
        device = next(iter(params.values())).device
        self.flat = torch.zeros(shard_count * self.part_size, dtype=dtype, device=device)
        if dtype == torch.float32:
            self.master = self.flat[shard_rank * self.part_size : (shard_rank + 1) * self.part_size]
        else:
            self.master = torch.zeros(self.part_size, device=device)

        # The shards of this rank lie one after the other in its part.
        kept = [(name, r) for name, ranges in self.ranges.items() for r in ranges if r.rank == shard_rank]
        self.sizes = [r.end - r.start for _, r in kept]
        self.shards: list[Shard] = []
        for (name, r), master in zip(kept, self.split(self.master)):
            master.copy_(params[name].data.flatten()[r.start : r.end])  # before the weights are rounded to dtype
            self.shards.append(Shard(name, shapes[name], r.start, r.end, master))

        offset = 0
        for p in params.values():
            view = self.flat[offset : offset + p.numel()].view(p.shape)
            p.data = view.copy_(p.data)  # frees the memory that the weights came in
            # Autograd sums micro-steps in float32, also where products are bfloat16. None: the gradient's own dtype,
            # for a gradient that is sent before the next one comes.
            p.grad_dtype = torch.float32 if sum_in_float32 else None
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
            return parts[0].float()  # embedding and head: no copy of the largest gradients
        parts.append(self.flat.new_zeros(self.padding))
        return torch.cat(parts, out=torch.empty_like(self.flat, dtype=torch.float32))

    def wait(self, *_) -> None:
        """Until `flat` and `grad` are complete. Also a hook: it runs before each forward pass of the unit."""
        for work, _source in self.pending:
            work.wait()
        self.pending.clear()


class Sharding:
    """
    Takes over a model with the same weights on every rank, on `device`, and casts it to `dtype`. In each step it sums
    gradients over ranks, gives this rank's `shards` their part of them, and sends the updated shards to all ranks.

    weights: for a model on the meta device, returns the whole weights of a parameter by its name. One unit after the
    other gets its weights and is sharded, so that no rank ever holds more than one whole unit beside its own parts.
    units: the modules whose parameters travel together, in the order of the forward pass. On stages 0 to 2 a rank may
    leave out units in a micro-step: their gradients are zero. On stage 3 every rank must run all units, in this order.
    shard_size: ranks of a shard group, -1 for all. pipeline_stages: groups of neighbouring ranks, each with layers of
    its own; see nanochat.optim.pipeline.
    UserError for ranks that start from different weights, for a shard_size that does not divide them, and for frozen or
    tied parameters. COLLECTIVE.

    There is no zero_grad. A parameter's gradient is freed when it is sent (`Bucket.take_gradients`), or in
    `reduce_and_clip` where nothing is sent and on stage 3; a shard's gradient is freed in `all_gather_params`.
    """

    def __init__(
        self,
        model: nn.Module,
        units: list[nn.Module],
        device: torch.device,
        dtype: torch.dtype,
        zero_stage: int,
        shard_size: int = -1,
        pipeline_stages: int = 1,
        weights: Callable[[str], Tensor] | None = None,
    ):
        self.model = model
        self.device = device
        self.dtype = dtype
        self.zero_stage = zero_stage
        if zero_stage == 3 and not dist.is_initialized():  # fully_shard needs a process group, even for one rank
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

        # --- Which ranks share what: a rank is (pipeline_stage, replica, shard_rank)
        self.rank, self.world_size = rank_and_size()
        self.pipeline_stages = pipeline_stages
        self.pipeline_stage, dp_rank, self.dp_ranks = place_in_pipeline(self.rank, self.world_size, pipeline_stages)
        if zero_stage == 0:
            self.shard_count = 1
        else:
            self.shard_count = self.dp_ranks if shard_size == -1 else shard_size  # N of the table above
        if self.dp_ranks % self.shard_count:
            raise UserError(f"shard_size={shard_size} does not divide the {self.dp_ranks} ranks; -1 is all ranks")
        self.replicas = self.dp_ranks // self.shard_count
        self.replica, self.shard_rank = divmod(dp_rank, self.shard_count)
        self.mesh = self.shard_group = self.replica_group = self.pipeline_group = None
        if dist.is_initialized():
            shape = (pipeline_stages, self.replicas, self.shard_count)
            self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pipeline", "replica", "shard"))
            self.pipeline_group = self.mesh.get_group("pipeline")
            self.replica_group = self.mesh.get_group("replica")
            self.shard_group = self.mesh.get_group("shard")
            set_timeout(SETUP_TIMEOUT, *self.groups())

        # --- What this rank keeps
        self.separate_masters = dtype != torch.float32  # else a master is the parameter's own memory
        self.ranges: dict[str, list[ShardRange]] = {}  # of each parameter: which rank keeps which elements
        self.shards: list[Shard] = []      # this rank's own
        self.buckets: list[Bucket] = []    # one of each unit, on stages 0 to 2
        self.units: list[nn.Module] = []   # on stage 3
        # The whole model: by name the pipeline stage that has a parameter, and its shape.
        self.homes = {name: (self.pipeline_stage, tuple(p.shape)) for name, p in model.named_parameters()}
        if pipeline_stages > 1:
            of_ranks = gather_objects(self.homes)
            self.homes = {}
            for homes in of_ranks:  # in one order on every rank: whole_tensors is collective
                self.homes |= homes

        # --- Gradients that travel
        self.last = False                       # the last micro-step of a step has begun
        self.passes = 1                         # backward passes in this micro-step
        self.unsent: deque[Bucket] = deque()    # in this micro-step, in the order in which every rank sends
        self.in_flight: deque[tuple] = deque()  # (bucket, work, its output, its input, sent in the last micro-step)

        self.compared = self.world_size > 1 and dist.get_backend() != "fake"  # a dry run has no other ranks
        sums: dict[str, int] = {}
        for unit, params in partition(model, units):
            sums |= self.add_unit(unit, list(params), weights, is_last=unit is units[-1])
        if zero_stage == 3:
            self.shard_root()
        if self.compared:
            require_same("starts from other weights", sums,
                         "every rank must draw them from one seed, or load one checkpoint", self.dp_ranks)

    # --- Setup

    def groups(self) -> list[dist.ProcessGroup]:
        """The groups in which this rank sends, beside the group of all ranks."""
        return [group for group in (self.shard_group, self.replica_group, self.pipeline_group) if group is not None]

    def add_unit(
        self,
        unit: nn.Module,
        names: list[str],
        weights: Callable[[str], Tensor] | None,
        is_last: bool,
    ) -> dict[str, int]:
        """Shard a unit; its whole weights are freed when this returns. Returns their `sums_of_bits`, to be compared."""
        if weights is not None:
            whole = {name: weights(name).to(self.device) for name in names}
            self.model.load_state_dict(whole, strict=False, assign=True)
            del whole
        params = {name: self.model.get_parameter(name) for name in names}
        sums = sums_of_bits(params) if self.compared else {}
        if self.zero_stage < 3:
            self.add_bucket(unit, params)
        else:
            for p in params.values():
                p.data = p.data.float()  # the rows of it that fully_shard keeps are the masters
            # The last unit's backward pass follows its forward pass at once: its weights stay gathered.
            self.fully_shard(unit, reshard=not is_last)
            self.units.append(unit)
        return sums

    def add_bucket(
        self,
        unit: nn.Module,
        params: dict[str, Parameter],
    ) -> None:
        sum_in_float32 = self.zero_stage < 2 or self.shard_count == 1
        bucket = Bucket(params, self.dtype, self.shard_count, self.shard_rank, sum_in_float32)
        self.buckets.append(bucket)
        self.shards += bucket.shards
        self.ranges |= bucket.ranges
        if self.dp_ranks > 1:
            unit.register_forward_pre_hook(bucket.wait)
            for p in params.values():
                p.register_post_accumulate_grad_hook(lambda _: self.gradient_computed(bucket))

    def fully_shard(self, module: nn.Module, reshard: bool) -> None:
        """Stage 3, in the compute dtype. reshard: free gathered parameters between forward and backward pass."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes a second to import

        policy = MixedPrecisionPolicy(self.dtype, torch.float32, cast_forward_inputs=False)
        mesh = self.mesh["replica", "shard"] if self.replicas > 1 else self.mesh["shard"]
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)

    def shard_root(self) -> None:
        """Stage 3, when all units are sharded: the order in which units are gathered, and how gradients are summed."""
        self.fully_shard(self.model, reshard=True)
        for unit, following in zip(self.units, self.units[1:]):
            unit.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([unit])
        for unit in (*self.units, self.model):
            unit.set_gradient_divide_factor(1.0)  # sums here, too: reduce_and_clip divides
            unit.set_force_sum_reduction_for_comms(True)
            if self.device.type == "cpu" and self.shard_count > 1:
                unit.set_custom_reduce_scatter(GlooReduceScatter())
        self.model._set_unshard_async_op(self.device.type == "cpu")
        # Now: otherwise the first module that runs becomes the root, and in CORE that is the embedding.
        self.model._get_fsdp_state()._lazy_init()
        for name, p in self.model.named_parameters():
            shape = tuple(p.shape)
            self.ranges[name] = row_ranges(shape, self.shard_count)
            for r in self.ranges[name]:
                if r.rank == self.shard_rank:
                    self.shards.append(Shard(name, shape, r.start, r.end, p.detach().to_local().view(-1)))

    # --- Micro-steps

    @contextlib.contextmanager
    def accumulate(self, last: bool, passes: int = 1) -> Iterator[None]:
        """
        Around forward and backward pass of a micro-step, equally often on every rank. Gradients travel during the
        backward pass (of several `passes`, during the last one of each unit): on stages 0 and 1 in the last micro-step
        of a step, on stages 2 and 3 in every one. All ranks send buckets from the last unit to the first: a rank's
        backward pass may complete them in another order, but collectives that start in different orders on different
        ranks would mix units.
        """
        self.last = last
        self.passes = passes
        sends_now = last or (self.zero_stage == 2 and self.shard_count > 1)
        if self.dp_ranks > 1 and sends_now:
            self.unsent.extend(reversed(self.buckets))
        if self.zero_stage == 3 and self.replicas > 1:
            self.model.set_requires_all_reduce(last)
        yield
        while self.unsent:  # buckets with a parameter that took no part in the loss
            self.send(self.unsent.popleft())
        for bucket in self.buckets:
            bucket.computed = 0
        while self.in_flight and last:
            self.receive()

    def gradient_computed(self, bucket: Bucket) -> None:
        """The backward pass calls this for each parameter. Sends all buckets that are complete and whose turn it is."""
        bucket.computed += 1
        assert bucket.computed <= self.passes * len(bucket.params), "one backward pass in a micro-step"
        while self.unsent and self.unsent[0].computed == self.passes * len(self.unsent[0].params):
            self.send(self.unsent.popleft())

    def send(self, bucket: Bucket) -> None:
        """Start the sum of a bucket's gradients over the shard group; each rank gets the sum of its own part."""
        while self.shard_count > 1 and len(self.in_flight) >= MAX_IN_FLIGHT:
            self.receive()
        whole = bucket.take_gradients()  # (N · part_size,)
        if self.shard_count > 1:
            own = whole.new_empty(bucket.part_size)
            work = reduce_scatter(own, whole, self.shard_group)
        else:
            own = whole
            work = dist.all_reduce(whole, group=self.replica_group, async_op=True)
        self.in_flight.append((bucket, work, own, whole, self.last))

    def receive(self) -> None:
        """Wait for the oldest sum and add it to the bucket's; if it is the step's last, start the sum over replicas."""
        bucket, work, own, _whole, last = self.in_flight.popleft()
        work.wait()
        if bucket.grad is None:
            bucket.grad = own.float()
        else:
            bucket.grad.add_(own)
        if last and self.shard_count > 1 and self.replicas > 1:
            work = dist.all_reduce(bucket.grad, group=self.replica_group, async_op=True)
            bucket.pending.append((work, bucket.grad))

    # --- Once per step

    def collect_gradients(self) -> None:
        """Set every shard's `grad` to its sum over all ranks and micro-steps; parameters and buckets free theirs."""
        params = dict(self.model.named_parameters())
        if self.dp_ranks > 1 and self.zero_stage < 3:
            for bucket in self.buckets:
                bucket.wait()
                for shard, grad in zip(bucket.shards, bucket.split(bucket.grad)):
                    shard.grad = grad
                bucket.grad = None
        else:  # one rank, or fully_shard: the sums are the parameters' own gradients
            for shard in self.shards:
                grad = params[shard.name].grad
                if grad is None:
                    shard.grad = torch.zeros_like(shard.master)
                else:
                    shard.grad = (grad.to_local() if self.zero_stage == 3 else grad).reshape(-1)
        for p in params.values():
            p.grad = None

    def reduce_and_clip(
        self,
        loss: Tensor,
        count: Tensor | float = 1.0,
        grad_clip: float = 0.0,
        stop: bool = False,
        save: bool = False,
    ) -> StepStats:
        """
        The one small collective of a step, after its last backward pass. Then every shard has its averaged gradient, or
        zeros where the step is not ok.

        loss, count: of this rank's part of the batch. The mean loss is Σ loss / Σ count over ranks; the summed gradient
        is divided by Σ count, too. With count 1 that is the number of ranks: right where each rank back-propagates a
        mean over equally many targets. Where they have unequally many, back-propagate sums and count the targets.
        grad_clip: largest norm of the averaged gradient, 0 for no limit.
        stop, save: whether this rank asks all to end the run, to save a checkpoint.
        UserError where no backward pass was the last one of `accumulate` since the step before.
        """
        if not self.last:
            raise UserError("reduce_and_clip without a last micro-step: run each backward pass within "
                            "accumulate(last=...), the last one of a step with last=True")
        self.last = False
        self.collect_gradients()
        # Where clipping depends on the norm, it is summed in float64: in float32 its last digits, and so the run, would
        # depend on how the gradient is cut.
        exact = sum_dtype(self.device)
        norm_dtype = exact if grad_clip > 0 else torch.float32
        squared = torch.zeros((), dtype=exact, device=self.device)
        for shard in self.shards:
            squared = squared + torch.linalg.vector_norm(shard.grad, dtype=norm_dtype).to(exact).square()
        squared = squared / self.replicas  # each replica counts the same gradient

        # Filled on the device: copying a number there would wait for the whole backward pass.
        if isinstance(count, Tensor):
            count = count.to(exact)
        else:
            count = squared.new_full((), count)
        sums = torch.stack([loss.detach().to(exact), count, squared])
        bad = (~sums.isfinite().all()).to(exact)  # NaN and Inf anywhere in the gradient make its norm so
        requests = torch.stack([bad, squared.new_full((), stop), squared.new_full((), save)])
        sums = torch.cat([sums, requests])  # (6,)
        if self.world_size > 1:
            dist.all_reduce(sums)
        loss, count, squared, bad, stops, saves = sums.unbind()

        norm = squared.sqrt() / count
        ok = ((bad == 0) & norm.isfinite() & loss.isfinite()).float()
        # The only division by the number of ranks, as part of `count`; it clips, too.
        divisor = count
        if grad_clip > 0:
            divisor = count * (norm / grad_clip).clamp(min=1)
        for shard in self.shards:
            shard.grad = in_one_pass(averaged, shard.grad, divisor.float(), ok)
        return StepStats(ok, torch.stack([loss / count, norm, ok, stops, saves]).float())

    def all_gather_params(self) -> None:
        """
        After the optimizers: start sending the updated shards to all ranks. Each unit waits for its own parameters just
        before its next forward pass. On stage 3 fully_shard gathers each unit before it runs.
        """
        for shard in self.shards:
            shard.grad = None
        for bucket in self.buckets:
            if self.shard_count > 1:
                own = bucket.master.to(self.dtype, copy=True)  # in float32 the master is a view of the output
                work = all_gather_single(bucket.flat, own, self.shard_group, async_op=True)
                bucket.pending.append((work, own))
            elif self.separate_masters:
                bucket.flat.copy_(bucket.master)

    # --- Whole parameters

    def wait_for_params(self) -> None:
        for bucket in self.buckets:
            bucket.wait()

    @torch.no_grad()
    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """
        (name, whole parameter in the compute dtype), one at a time, with the layers of other pipeline stages; every
        rank must iterate over all. COLLECTIVE.
        """
        self.wait_for_params()
        for unit in self.units:  # on stage 3 the last one stays whole after a forward pass without a backward pass
            unit.reshard()
        for name in self.homes:
            yield name, self.whole_tensor(name)

    def whole_tensor(self, name: str) -> Tensor:
        """A whole parameter in the compute dtype, gathered from the ranks that keep it. COLLECTIVE."""
        pipeline_stage, shape = self.homes[name]
        if pipeline_stage != self.pipeline_stage:
            whole = torch.empty(shape, dtype=self.dtype, device=self.device)
        else:
            whole = self.model.get_parameter(name).detach()
            if self.zero_stage == 3:
                whole = whole.to(self.dtype).full_tensor()
        if self.pipeline_stages > 1:
            source = pipeline_stage * self.dp_ranks + self.rank % self.dp_ranks
            dist.broadcast(whole, source, group=self.pipeline_group)
        return whole

    def gather_model(self) -> nn.Module:
        """
        A model with whole parameters, which each rank may run without the others. On stages 0 to 2 it is the model
        itself. On stage 3 it is a copy in the compute dtype, which the next step does not update. Not for a pipeline.
        """
        if self.zero_stage < 3:
            self.wait_for_params()
            return self.model
        model = model_without_memory(self.model.config)
        model.load_state_dict(dict(self.whole_tensors()), assign=True)
        return model


def sums_of_bits(params: dict[str, Parameter]) -> dict[str, int]:
    """A checksum of the weights of each parameter. Waits for the device."""
    sums = {}
    for name, p in params.items():
        bits = p.detach().flatten().view(torch.int16)
        sums[name] = bits.sum(dtype=torch.int64).item()
    return sums


def averaged(grad: Tensor, divisor: Tensor, ok: Tensor) -> Tensor:
    return torch.where(ok > 0, grad / divisor, 0.0)  # a product with zero would keep NaN


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
