"""
Best-fit packing, the one algorithm by which documents and conversations become rows of tokens.

A row begins with the item that has waited longest, so that none waits for ever. Then the longest waiting item that
still fits is added, again and again. Where none fits, the policies differ: pretraining cuts the longest
(dataloader.py), a conversation is never cut and the row ends (conversation_loader.py).
"""
import sys
from bisect import bisect_left, insort


class WaitingItems:
    """Tuples that begin with a length in tokens. Among equally long ones the largest key is taken first."""

    def __init__(self) -> None:
        self.items: dict[int, tuple] = {}           # by key, the oldest first
        # A sorted list, not a tree or a heap: among a few hundred items, moving the rest of a list costs nothing.
        self.by_length: list[tuple[int, int]] = []  # (length, key), rising

    def add(self, key: int, item: tuple) -> None:
        self.items[key] = item
        insort(self.by_length, (item[0], key))

    def take_oldest(self) -> tuple:
        """The item that has waited longest."""
        key = next(iter(self.items))
        item = self.items.pop(key)
        del self.by_length[bisect_left(self.by_length, (item[0], key))]
        return item

    def take_longest(self, space: int = sys.maxsize - 1) -> tuple:
        """The longest item of at most `space` tokens; an empty tuple if none fits."""
        index = bisect_left(self.by_length, (space + 1,))
        if index == 0:
            return ()
        _, key = self.by_length.pop(index - 1)
        return self.items.pop(key)
