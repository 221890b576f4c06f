"""Runs Python on several cores."""
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

inherited: list[Callable] = []  # in a copy of the process: the work, which need not be picklable


def in_processes(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """
    [work(item) for item in items], each in a forked copy of this process. A copy has no threads, so `work` must be pure
    Python, without torch. A single item, and all on other systems than Linux, are done here.
    """
    if sys.platform != "linux" or len(items) < 2:
        return [work(item) for item in items]
    with warnings.catch_warnings(), ProcessPoolExecutor(len(items), get_context("fork"), begin, (work,)) as pool:
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, see above
        return list(pool.map(call, items))


def begin(work: Callable) -> None:
    os.environ["RANK"] = "1"  # prints nothing and shows no bar: the parent does
    inherited.append(work)


def call(item: Any) -> Any:
    return inherited[-1](item)
