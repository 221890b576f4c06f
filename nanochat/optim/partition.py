"""
How a model is cut: into units, whose parameters travel together; and each parameter, flattened, into ranges, one for
each rank that keeps some of it. Every stage of ZeRO is a list of such ranges, FSDP's rows as well.
"""
from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import Parameter


class ShardRange(NamedTuple):
    """Elements [start, end) of a flattened parameter, kept and updated by `rank` of the shard group."""

    start: int
    end: int
    rank: int


@dataclass
class Shard:
    """
    What this rank keeps of one parameter, elements [start, end) of it, flattened: the float32 master and, from
    `reduce_and_clip` to `all_gather_params`, the averaged float32 gradient, each (end − start,).
    """

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    start: int
    end: int
    master: Tensor
    grad: Tensor | None = None


def equal_ranges(shapes: dict[str, tuple[int, ...]], ranks: int) -> tuple[int, dict[str, list[ShardRange]]]:
    """
    Lay parameters end to end and cut them into one equal part for each rank, whatever their shapes.

    Returns (elements of a part, {name: its ranges}); the last part may end with padding, which is in no range.
    """
    size = ceil(sum(map(prod, shapes.values())) / ranks)
    ranges: dict[str, list[ShardRange]] = {}
    offset = 0
    for name, shape in shapes.items():
        cuts = [(max(r * size - offset, 0), min((r + 1) * size - offset, prod(shape)), r) for r in range(ranks)]
        ranges[name] = [ShardRange(*cut) for cut in cuts if cut[0] < cut[1]]
        offset += prod(shape)
    return size, ranges


def row_ranges(shape: tuple[int, ...], ranks: int) -> list[ShardRange]:
    """FSDP's cut: whole rows, like torch.chunk; 5 rows on 4 ranks are 2, 2, 1 and none."""
    rows, row = shape[0], prod(shape[1:])
    height = ceil(rows / ranks)
    cuts = [(min(r * height, rows), min((r + 1) * height, rows), r) for r in range(ranks)]
    return [ShardRange(start * row, end * row, r) for start, end, r in cuts if start < end]


def partition(model: nn.Module, units: list[nn.Module]) -> list[tuple[list[nn.Module], dict[str, Parameter]]]:
    """
    (modules, trainable parameters by name) of each unit, in the order of the forward pass. Units that share a parameter
    (tied weights) become one; parameters outside all units belong to the whole model; a unit without any is left out.
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
