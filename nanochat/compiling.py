"""
torch.compile where it pays, in one place: hot functions are called as `compiled(function)(...)`, blocks of the
model by `Module.compile`. `set_compile(False)` turns all of it into plain eager code.
"""
import functools
from collections.abc import Callable

import torch

from nanochat.distributed import print0


@functools.cache
def compiled(function: Callable) -> Callable:
    """`function` compiled on its first call for each shape; the compiler is not even imported before that."""
    return torch.compile(function, dynamic=False)


def set_compile(wanted: bool, device_type: str) -> bool:
    """
    Switch compilation on or off for this process. Returns whether it is on: generated code needs a compiler and
    Python's headers, so it is tried once, and a machine without them trains eagerly rather than not at all.
    """
    on = wanted and device_type in ("cpu", "cuda")
    torch.compiler.set_stance("default")
    if on:
        try:
            compiled(probe)(torch.zeros(64, device=device_type))
        except Exception as error:  # whatever keeps it from working, eager code does not need it
            print0(f"not compiling: {(str(error).strip() or repr(error)).splitlines()[0]}")
            on = False
    torch.compiler.set_stance("default" if on else "force_eager")
    return on


def probe(x: torch.Tensor) -> torch.Tensor:
    """Something to compile."""
    return x.exp() + 1


def eagerly():
    """Context for code whose shapes change from call to call (sampling, single documents)."""
    return torch.compiler.set_stance("force_eager")
