"""
Who keeps what. A parameter is one flat run of elements; a piece of it is a range that one rank of the shard group
keeps, and updates for all. Every stage of ZeRO, and FSDP's rows as well, is a list of such pieces.
"""
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

from torch import Tensor


class Piece(NamedTuple):
    """Elements [start, end) of a flattened parameter, kept by `rank` of the shard group."""

    start: int
    end: int
    rank: int


@dataclass
class Slice:
    """
    What this rank keeps of one parameter: master (end − start,) float32, and during a step the averaged gradient of
    the same shape. `shape` is the whole parameter's. The multipliers scale its learning rate and weight decay.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    end: int
    master: Tensor
    grad: Tensor | None = None
    lr_mul: float = 1.0
    wd_mul: float = 1.0


def equal_pieces(shapes: dict[str, tuple[int, ...]], ranks: int) -> tuple[int, dict[str, list[Piece]]]:
    """
    Cut parameters laid end to end into one equal slice for each rank, whatever their shapes.

    Returns (elements per slice, {name: its pieces}); the last slice may be partly padding, which is nobody's piece.
    """
    total = sum(map(prod, shapes.values()))
    per_rank = ceil(total / ranks)
    pieces: dict[str, list[Piece]] = {}
    offset = 0
    for name, shape in shapes.items():
        end = offset + prod(shape)
        pieces[name] = [
            Piece(max(rank * per_rank, offset) - offset, min((rank + 1) * per_rank, end) - offset, rank)
            for rank in range(ranks) if max(rank * per_rank, offset) < min((rank + 1) * per_rank, end)
        ]
        offset = end
    return per_rank, pieces


def row_pieces(shape: tuple[int, ...], ranks: int) -> list[Piece]:
    """FSDP's cut: whole rows, as torch.chunk deals them out; 5 rows on 4 ranks are 2, 2, 1 and none."""
    rows, row = shape[0], prod(shape[1:])
    height = ceil(rows / ranks)
    cuts = ((rank * height, min((rank + 1) * height, rows), rank) for rank in range(ranks))
    return [Piece(start * row, end * row, rank) for start, end, rank in cuts if start < end]


def balance(costs: Iterable[float], loads: list[float]) -> list[int]:
    """The rank for each cost in turn: the one with the least load so far, the first of equals. Adds to `loads`."""
    owners = []
    for cost in costs:
        owner = min(range(len(loads)), key=loads.__getitem__)
        loads[owner] += cost
        owners.append(owner)
    return owners
