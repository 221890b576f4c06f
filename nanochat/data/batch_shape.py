"""How the rows of an optimizer step are split into micro-steps and over ranks, for both loaders and rollouts."""
import itertools
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def chunks(items: list[T], size: int) -> list[list[T]]:
    """Consecutive items, `size` at a time; the last chunk may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def document_offsets(rows: Sequence[Sequence[int]], places: int, length: int) -> Tensor:
    """
    Where documents begin in `places` rows of `length` tokens, as GPT.forward takes it. rows: for each row the lengths
    of its documents. A place without a row is one document; padding belongs to the row's last document.
    """
    begins: list[int] = []
    for place in range(places):
        before = rows[place][:-1] if place < len(rows) else ()
        begins += itertools.accumulate(before, initial=place * length)
    return torch.tensor([*begins, places * length], dtype=torch.int32)


class BatchShape(NamedTuple):
    """The shape of one rank's batches. It is the same on all ranks, except for rank and device."""

    device_batch_size: int      # rows of one rank in one micro-step; some of them may be empty
    max_seq_len: int            # inputs per row; a row has one token more, because targets are one position ahead
    rank: int = 0               # data-parallel rank: the stages of a pipeline read the same rows
    world_size: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def rows_per_micro_step(self) -> int:
        """Rows over all ranks."""
        return self.device_batch_size * self.world_size

    def micro_steps(self, rows: list[T]) -> list[list[T]]:
        """A step's rows by micro-step, over all ranks. At least one micro-step: all ranks take part in every step."""
        return chunks(rows, self.rows_per_micro_step) or [[]]

    def of_this_rank(self, rows: list[T]) -> list[T]:
        """This rank's rows of a micro-step: fewer than device_batch_size if the step has too few rows."""
        # Consecutive rows stay together: if rows are sorted by length, all ranks compute about equally much padding.
        start = self.rank * self.device_batch_size
        return rows[start : start + self.device_batch_size]
