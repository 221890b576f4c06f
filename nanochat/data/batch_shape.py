"""How the rows of an optimizer step fall into micro-steps and onto ranks, for both loaders and for rollouts."""
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
    Where documents begin in `places` rows of `length` tokens, as GPT.forward takes it. rows: the lengths of the
    documents of each row; a place without a row is one document, and padding belongs to the row's last one.
    """
    begins: list[int] = []
    for place in range(places):
        before = rows[place][:-1] if place < len(rows) else ()
        begins += itertools.accumulate(before, initial=place * length)
    return torch.tensor([*begins, places * length], dtype=torch.int32)


class BatchShape(NamedTuple):
    """The batches of one rank. Every rank of a run has the same shape, but for its rank and device."""

    device_batch_size: int      # rows of one rank in one micro-step; some of them may be empty
    max_seq_len: int            # inputs of a row; a row is one token longer, because targets are one position ahead
    rank: int = 0               # data-parallel rank: the stages of a pipeline read the same rows
    world_size: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def rows_per_micro_step(self) -> int:
        """Rows of all ranks together."""
        return self.device_batch_size * self.world_size

    def micro_steps(self, rows: list[T]) -> list[list[T]]:
        """A step's rows by micro-step, over all ranks. At least one micro-step: every rank takes part in every step."""
        return chunks(rows, self.rows_per_micro_step) or [[]]

    def of_this_rank(self, rows: list[T]) -> list[T]:
        """This rank's rows of a micro-step. There are fewer than device_batch_size where the step has too few rows."""
        # Consecutive rows stay together: with rows sorted by length, no rank computes much more padding than another.
        start = self.rank * self.device_batch_size
        return rows[start : start + self.device_batch_size]
