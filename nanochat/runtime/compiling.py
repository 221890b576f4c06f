"""
torch.compile where it pays, in one place: hot functions are called as `compiled(function)(...)`, and `compile_model`
of model/compile.py compiles the model's blocks. Until `set_compile` switches it on, everything runs eagerly.
"""
import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch.utils._pytree import tree_leaves

from nanochat.runtime.console import print0
from nanochat.runtime.errors import UserError, first_line

# Elements: for fewer, the call of compiled code costs more than it saves.
ONE_PASS = 2**16
# torch's limit is 8, but kinds of blocks times lengths of conversations are more.
RECOMPILE_LIMIT = 64

switch = SimpleNamespace(on=False)


def compiled(function: Callable) -> Callable:
    """`function`, compiled on its first call for each shape if wanted: importing the compiler alone takes seconds."""
    return with_compiler(function) if switch.on else function


def of_any_length(function: Callable) -> Callable:
    """
    A compiled function of tensors (…, T, C). On a CPU it is compiled once for all T (except 0 and 1): as fast as code
    for one T, whose compilation takes longer than many steps of a small model.
    """
    def call(*arguments):
        if switch.on:
            for part in tree_leaves(arguments):
                if isinstance(part, torch.Tensor) and part.dim() > 1 and part.device.type == "cpu":
                    torch._dynamo.maybe_mark_dynamic(part, part.dim() - 2)
        return function(*arguments)

    return call


def by_position(function: Callable) -> Callable:
    """
    A compiled function of each position of contiguous tensors (…, C), compiled once for any number of dimensions and of
    positions (from two on).
    """
    of_rows = of_any_length(function)

    def call(*tensors):
        # No ordinary views: compiled code depends on the shapes of what they are views of.
        rows = [torch.ops.aten._unsafe_view(tensor, (-1, tensor.size(-1))) for tensor in tensors]
        return of_rows(*rows).view_as(tensors[0])

    return call


def mark_dynamic(items: torch.Tensor) -> torch.Tensor:
    """The same tensor, marked so that other lengths (≥ 2) compile nothing again."""
    if switch.on:
        torch._dynamo.maybe_mark_dynamic(items, 0)
    return items


def in_one_pass(function: Callable, flat: torch.Tensor, *others: torch.Tensor | float):
    """
    function(flat, *others), elementwise over long flat tensors: compiled, it reads and writes memory once instead of
    once for each operation. It is compiled once for all lengths; below ONE_PASS elements, compiled code does not pay.
    """
    if switch.on and len(flat) >= ONE_PASS:
        function = with_compiler(function, True)
    return function(flat, *others)


@functools.cache
def with_compiler(function: Callable, dynamic: bool = False) -> Callable:
    return torch.compile(function, dynamic=dynamic)


def set_compile(wanted: bool, device_type: str) -> bool:
    """
    Switch compilation on or off for this process. Returns whether it is on: generated code needs a compiler and
    Python's headers, so it is tried once. Without them a CPU trains eagerly; on a GPU, which would take twice the time,
    it is a UserError.
    """
    switch.on = wanted and device_type in ("cpu", "cuda")
    if switch.on:
        # No tests of vector instructions: the processor reports them, and torch's tests compile three large programs.
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        # Each kernel is compiled under its own lock; another run with the same kernel waits for it, for minutes if
        # this run has a low priority. So a low-priority run has its own cache.
        if os.nice(0) > 0:
            from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # slow to import

            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{default_cache_dir()}-nice")
        if device_type == "cuda":
            # Up to so many reads and operations, a value is computed again where it is used, in all compiled code. With
            # inductor's limits, 4 and 30, a block's backward pass would write two values to memory in float32.
            from torch._inductor import config as inductor  # slow to import

            inductor.realize_reads_threshold, inductor.realize_opcount_threshold = 8, 100
        # Let the cache on disk also hold graphs with our autograd functions, so that a new process need not trace them
        # again. Its key covers what these functions do, as long as they call only torch operations.
        torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
        try:
            compiled(torch.exp)(torch.zeros(64, device=device_type))
        except Exception as error:
            # Any kind of error counts, because eager code does not need a compiler.
            switch.on = False
            why = first_line(error)
            if device_type == "cuda":
                raise UserError("compiling fails; it takes a C compiler and Python's headers (sudo apt install gcc "
                                f"python3-dev), or --compile=False at half the speed: {why}") from None
            print0(f"not compiling: {why}")
        else:
            print0("compiling, which takes a minute or so the first time")
    return switch.on


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Around code whose shapes change from call to call (sampling, single documents): as if compilation were off."""
    if not switch.on:
        yield
        return
    switch.on = False
    try:
        # Functions that are compiled already must run eagerly, too.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        switch.on = True
