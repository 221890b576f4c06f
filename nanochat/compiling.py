"""
torch.compile where it pays, in one place: hot functions are called as `compiled(function)(...)`, blocks of the
model by `Module.compile`. `set_compile(False)` turns all of it into plain eager code.
"""
import functools
import shutil
from collections.abc import Callable

import torch


@functools.cache
def compiled(function: Callable) -> Callable:
    """`function` compiled on its first call for each shape; the compiler is not even imported before that."""
    return torch.compile(function, dynamic=False)


def set_compile(wanted: bool, device_type: str) -> bool:
    """
    Switch compilation on or off for this process. Returns whether it is on: on a CPU generated C++ needs a
    compiler, and a machine without one trains eagerly rather than not at all.
    """
    possible = device_type == "cuda" or device_type == "cpu" and any(map(shutil.which, ("g++", "clang++", "c++")))
    on = wanted and bool(possible)
    torch.compiler.set_stance("default" if on else "force_eager")
    return on


def eagerly():
    """Context for code whose shapes change from call to call (sampling, single documents)."""
    return torch.compiler.set_stance("force_eager")
