"""What ranks send to each other. Functions marked COLLECTIVE are called by every rank, and raise on all or none."""
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.runtime.console import is_rank0
from nanochat.runtime.errors import UserError

T = TypeVar("T")

# torch 2.13 renamed the collectives on single tensors, and warns of the older names.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def rank_and_size() -> tuple[int, int]:
    """This process's rank, and how many ranks there are."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def collective_device() -> str:
    """Where tensors must be to be sent: NCCL sends from GPUs only."""
    return "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"


# ---- Objects


def from_rank0(function: Callable[..., T], *args) -> T:
    """
    Calls the function on rank 0 and returns its result on every rank, for decisions that must be the same. Its
    UserError, or the system's refusal, is raised on every rank. COLLECTIVE.
    """
    result: list[Any] = [None]
    if is_rank0():
        try:
            result = [function(*args)]
        except (UserError, OSError) as error:
            result = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(result, src=0)
    if isinstance(result[0], (UserError, OSError)):
        raise result[0]
    return result[0]


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The value of each rank, in the order of ranks, on every rank. group: a group of all ranks. COLLECTIVE."""
    values = [value] * rank_and_size()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value, group)
    return values


def first_problem(problem: str | None) -> str | None:
    """The problem of the first rank that has one, on every rank. COLLECTIVE."""
    return next(filter(None, gather_objects(problem)), None)


# ---- Tensors


def all_reduce_sum(tensor: Tensor) -> None:
    """Sum the tensor over the ranks, in place; nothing happens on one rank."""
    if dist.is_initialized():
        dist.all_reduce(tensor)


def reduce_scatter(output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None):
    """
    Start output = this rank's chunk of the sum of all ranks' inputs; returns the work to `wait()` for.

    input: (N · n,), output: (n,); keep both until the wait is over. Gloo's own reduce-scatter is an all-reduce, which
    sends twice the bytes and blocks when it starts: with gloo the chunks are sent to their owners, which add them.
    """
    if dist.get_backend(group) != "gloo":
        return reduce_scatter_single(output, input, group=group, async_op=True)
    received = torch.empty_like(input)
    return SumOfChunks(dist.all_to_all_single(received, input, group=group, async_op=True), received, output)


class SumOfChunks(NamedTuple):
    """Chunks that are being sent to their owner; `wait` adds them in the order of ranks."""

    work: dist.Work
    received: Tensor
    output: Tensor

    def wait(self) -> None:
        self.work.wait()
        torch.sum(self.received.view(-1, len(self.output)), dim=0, out=self.output)
