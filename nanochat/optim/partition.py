"""
How a model is cut: into units, whose parameters travel together; and each flattened parameter into ranges, one for
each rank that keeps a part of it. Every stage of ZeRO is a list of such ranges, also FSDP's rows.
"""
from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import Parameter

from nanochat.runtime.errors import UserError

# A rank's part begins at a multiple of so many elements: in bfloat16 these are the 16 bytes that a GPU reads at once.
ALIGNMENT = 8


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
    shape: tuple[int, ...]  # the whole parameter's
    start: int
    end: int
    master: Tensor
    grad: Tensor | None = None


def equal_ranges(shapes: dict[str, tuple[int, ...]], ranks: int) -> tuple[int, dict[str, list[ShardRange]]]:
    """
    Lay parameters end to end and cut them into equal parts, one for each rank. A cut may go through a parameter.

    Returns (elements of a part, {name: its ranges}). Padding behind the last parameter is in no range.
    """
    part_size = ALIGNMENT * ceil(sum(map(prod, shapes.values())) / (ranks * ALIGNMENT))
    ranges: dict[str, list[ShardRange]] = {}
    offset = 0  # where the parameter begins
    for name, shape in shapes.items():
        ranges[name] = cut(prod(shape), part_size, ranks, offset)
        offset += prod(shape)
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


def partition(model: nn.Module, units: list[nn.Module]) -> list[tuple[nn.Module, dict[str, Parameter]]]:
    """
    (unit, its parameters by name) in the order of the forward pass; units without parameters are left out. Every
    parameter must belong to exactly one unit. UserError for tied and frozen parameters: a tied one would be summed and
    updated twice, a frozen one would still decay.

    A unit's largest parameters come first: laid end to end, its matrices then begin at multiples of ALIGNMENT. Behind
    a scalar they would not, and an H100 takes twice as long for a product with such a matrix (docs/tried.md).
    """
    names: dict[Parameter, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if p in names:
            raise UserError(f"{name} and {names[p]} are tied: sharding needs a parameter of its own for each name")
        if not p.requires_grad:
            raise UserError(f"{name} is frozen (requires_grad=False): sharding trains every parameter it is given")
        names[p] = name
    parts = []
    for unit in units:
        params = {names[p]: p for p in sorted(unit.parameters(), key=Parameter.numel, reverse=True)}
        if params:
            parts.append((unit, params))
    assert sum(len(params) for _, params in parts) == len(names), "every parameter belongs to exactly one unit"
    return parts


def place_in_pipeline(rank: int, world_size: int, pipeline_stages: int) -> tuple[int, int, int]:
    """
    (pipeline stage of a rank, its number within the stage, the stage's number of ranks). The ranks of a stage are
    neighbours and share a gradient; ranks of the same number form one pipeline.
    """
    dp_ranks = world_size // pipeline_stages
    pipeline_stage, dp_rank = divmod(rank, dp_ranks)
    return pipeline_stage, dp_rank, dp_ranks
