"""Random draws for texts that must be the same on every machine: the embedded world and the generated tasks."""
import math
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class StableRandom:
    """
    Draws that depend only on the key. Python promises the same numbers in every version only for
    Random(str).random(), so all other draws are made from it.

    bits: log2 of the number of equally likely outcomes of all draws so far.
    """

    def __init__(self, key: str) -> None:
        self.uniform = random.Random(key).random
        self.bits = 0.0

    def below(self, n: int) -> int:
        """One of 0 … n − 1."""
        self.bits += math.log2(n)
        # Not randrange, whose algorithm has changed between versions of Python.
        return int(self.uniform() * n)

    def choice(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]
