"""
Stage 3 of ZeRO with PyTorch's fully_shard: a rank keeps rows of every parameter, and a unit is gathered when it runs.
Zhao et al. 2023, arXiv:2304.11277. Everything here only calls PyTorch.
"""
import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from nanochat.model.gpt import model_without_memory
from nanochat.optim.partition import Shard, row_ranges
from nanochat.optim.sharding import Sharding
from nanochat.runtime.collectives import reduce_scatter


class FullyShard(Sharding):
    """Parameters and gradients are PyTorch's DTensors. The float32 rows of this rank are the masters."""

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
            shape = tuple(p.shape)
            self.ranges[name] = row_ranges(shape, self.shard_count)
            for r in self.ranges[name]:
                if r.rank == self.shard_rank:
                    self.shards.append(Shard(name, shape, r.start, r.end, p.detach().to_local().view(-1)))

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
    def accumulate(self, last: bool, passes: int = 1) -> Iterator[None]:
        """Gradients travel in every micro-step, between replicas only in the last one."""
        self.last = last
        if self.replicas > 1:
            self.model.set_requires_all_reduce(last)
        yield

    def local_shard(self, tensor: Tensor) -> Tensor:
        return tensor.to_local()

    def gathered(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype).full_tensor()

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
