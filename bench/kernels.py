"""Inductor's kernels for an H100, compiled for sm_90 by Triton; nothing runs. For bench.gpu_dry_run."""
import contextlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import sympy
import torch
import triton
from torch._inductor import config as inductor
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import NoneAsConstantBuffer, ReinterpretView
from torch._inductor.runtime import triton_helpers
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

from bench.dry_step import PRODUCTS, Product, short

TRITON_SOURCE = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'", re.S)


class Graph(NamedTuple):
    """What inductor made of a function's forward or backward pass."""

    code: str             # Python, with the sources of the kernels in it
    operations: Counter   # what it launches, by name
    products: Counter
    moved: int            # bytes that its own kernels read and write, products and attention not counted
    passes: list[tuple[str, int]]  # of them each: its name, bytes


class Kernel(NamedTuple):
    name: str
    registers: int   # of a thread; those of the first configuration, as the spills
    spills: int      # bytes
    shared: int      # bytes of a block
    configurations: int


def read_graph(lowering: GraphLowering, code: str) -> Graph:
    operations, products, moved = Counter(), Counter(), []
    for node in lowering.scheduler.nodes:
        if isinstance(node, ExternKernelSchedulerNode):
            name = (getattr(node.node, "python_kernel_name", None) or type(node.node).__name__).split(".")[-1]
            if name in PRODUCTS:
                (*stack, m, k), (*_, n) = ([int(size) for size in x.get_size()] for x in node.node.inputs[-2:])
                products[Product(stack[0] if stack else 1, m, k, n, short(node.node.inputs[-1].get_dtype()))] += 1
        else:
            name = "template" if node.is_template() else "kernel"
            moved += [] if isinstance(node, NopKernelSchedulerNode) else [
                0 if node.is_template() else node.get_read_write_buffers_sizes()]
        operations[name] += 1
    names = re.findall(r"^ +(triton_\w+)\.run\(", code, re.M)
    assert len(names) == len(moved), "the code has one launch for each node of the graph, in their order"
    return Graph(code, operations, products, sum(moved), list(zip(names, moved)))


@contextlib.contextmanager
def no_execution(called: Callable[[Graph], None]) -> Iterator[list[Graph]]:
    """
    The graphs that are compiled meanwhile. Where one would run, `called` gets it, and its results are new tensors of
    the right shapes.
    """
    graphs: list[Graph] = []
    original = GraphLowering.compile_to_module

    def compile_to_module(lowering: GraphLowering) -> SimpleNamespace:
        wrapper, _ = lowering.codegen()
        graph = read_graph(lowering, wrapper.value)
        graphs.append(graph)
        symbols = {name: kind for name, kind in lowering.graph_inputs.items() if isinstance(kind, sympy.Symbol)}

        def call(arguments: list) -> list:
            given = dict(zip(lowering.graph_inputs, arguments))
            arguments.clear()
            lengths = {symbol: given[name] for name, symbol in symbols.items()}
            buffers = dict(given)
            results = [result(out, lowering, buffers, lengths) for out in lowering.graph_outputs]
            if symbols:  # of any length, and in one pass: what is given is read once, what changes is written once
                written = [given[name] for name in lowering.mutated_inputs] + results
                moved = sum(t.nbytes for t in (*given.values(), *written) if isinstance(t, torch.Tensor))
            called(graph._replace(moved=moved) if symbols else graph)
            return results

        return SimpleNamespace(call=call, __file__="", runner=None)

    GraphLowering.compile_to_module = compile_to_module
    # Both would compute something on the device: constants, and whether padding narrow matrices pays.
    with inductor.patch(joint_graph_constant_folding=False, shape_padding=False):
        yield graphs
    GraphLowering.compile_to_module = original


def result(out, graph: GraphLowering, buffers: dict[str, torch.Tensor], lengths: dict) -> torch.Tensor | None:
    """What a graph returns for one of its outputs: nothing, or all or a view of a buffer: an input, or a new one."""
    if isinstance(out, NoneAsConstantBuffer):
        return None

    def numbers(expressions) -> list[int]:
        return [int(sympy.sympify(number).subs(lengths)) for number in expressions]

    name = out.get_name()
    if name not in buffers:
        made = graph.get_buffer(name)
        buffers[name] = torch.empty_strided(
            numbers(made.get_size()), numbers(made.get_stride()), dtype=made.get_dtype(), device=made.get_device())
    if not isinstance(out, ReinterpretView):
        return buffers[name]
    return buffers[name].as_strided(*map(numbers, (out.layout.size, out.layout.stride)), *numbers([out.layout.offset]))


def compile_for_sm90(graphs: list[Graph]) -> list[Kernel]:
    """Every Triton kernel of the graphs, once. What Triton or ptxas refuses raises."""
    triton_helpers.set_driver_to_gpu = lambda: None
    inductor.use_static_triton_launcher = False
    sources = {name: source for graph in graphs for name, source in TRITON_SOURCE.findall(graph.code)}
    kernels = []
    for name, source in sources.items():
        autotuner = getattr(PyCodeCache.load(source), name)
        autotuner.precompile(warm_cache_only=True)
        binaries = [made.kernel for made in autotuner.compile_results]
        kernels.append(Kernel(name, *assembled(binaries[0].asm["ptx"]), binaries[0].metadata.shared, len(binaries)))
    return kernels


def assembled(ptx: str) -> tuple[int, int]:
    """(registers, bytes of spills) of a kernel, as NVIDIA's assembler says."""
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [assembler, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    return int(registers[1]), int(spills[1])
