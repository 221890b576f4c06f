"""
Best-fit packing: the algorithm that packs both documents and conversations into rows of tokens.

A row begins with the item that has waited longest, so no item waits for ever. Then the longest waiting item that
still fits is added, again and again. When none fits, pretraining cuts the longest item (dataloader.py);
conversations are never cut, so the row ends (conversation_loader.py).
"""
import sys
from bisect import bisect_left, insort


class WaitingItems:
    """Tuples that begin with a length in tokens. Among equally long items the largest key is taken first."""

    def __init__(self) -> None:
        self.items: dict[int, tuple] = {}           # by key, the oldest first
        # A sorted list, not a tree or a heap: with a few hundred items, shifting the rest of a list costs nothing.
        self.by_length: list[tuple[int, int]] = []  # (length, key), ascending

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
