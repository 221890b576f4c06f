"""Runs Python on several cores."""
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_processes(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """
    [work(item) for item in items]: the first in this process, the others at the same time, each in a forked copy. A
    copy has no threads, so `work` must be pure Python, without torch. On other systems than Linux, items take turns.
    """
    if sys.platform != "linux":
        return [work(item) for item in items]
    pipes = []
    for item in items[1:]:
        read_end, write_end = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads, see above
            child = os.fork()
        if not child:
            write_result(work, item, write_end)
        os.close(write_end)
        pipes.append((child, read_end))
    results = [work(item) for item in items[:1]]
    for child, read_end in pipes:
        with open(read_end, "rb") as pipe:  # to the end
            content = pipe.read()
        _, status = os.waitpid(child, 0)
        result = pickle.loads(content) if not status else RuntimeError(f"a process ended with {status}")
        if isinstance(result, Exception):
            raise result
        results.append(result)
    return results


def write_result(work: Callable[[Any], Any], item: Any, pipe: int) -> None:
    """In a copy of the process: send the result, or the error instead, and end. Nothing else may run in the copy."""
    os.environ["RANK"] = "1"  # prints nothing and shows no bar: the parent does
    try:
        try:
            content = pickle.dumps(work(item))
        except Exception as error:
            content = pickle.dumps(error)
        with open(pipe, "wb") as file:
            file.write(content)
        os._exit(0)
    finally:
        os._exit(1)
