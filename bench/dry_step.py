"""
A training step on tensors without memory: what one rank of many would compute, keep and send, counted operation by
operation at PyTorch's dispatcher. The process group is torch's fake one: collectives return at once, there are no other
ranks. Devices are "meta", which every torch has, or the fake "cuda" of bench.fake_gpu.
"""
import contextlib
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.watch import sent_in
from nanochat import gpt, layers, loss, zero
from nanochat.attention import attention
from nanochat.gpt_config import GPTConfig
from nanochat.optimizers import setup_optimizers
from nanochat.zero import Sharding

PHASES = "forward", "backward", "reduce", "adamw", "muon", "gather"
WAITS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2"}  # operations that read the device
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm"}
LOOKUPS = {"embedding", "gather", "index", "index_put_"}  # they read or write few rows of their first argument


class Product(NamedTuple):
    """A stack of matrix products: (count, M, K) times (count, K, N)."""

    count: int
    m: int
    k: int
    n: int
    dtype: str

    def flops(self) -> int:
        return 2 * self.count * self.m * self.k * self.n


class Collective(NamedTuple):
    name: str
    dtype: str
    elements: int  # of the largest tensor: all of what is scattered or gathered
    sent: float    # bytes that this rank sends


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations made while it was on, and their peak; also of tensors without memory."""

    def __init__(self):
        super().__init__()
        self.known, self.now, self.peak = set(), 0, 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # else nothing would be compiled while it is on

    def __torch_dispatch__(self, func: Callable, types, args=(), kwargs=None):
        if TracingContext.try_get():  # the compiler looks at a function
            return func(*args, **(kwargs or {}))
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tree_leaves(result) if isinstance(t, Tensor)):
            if storage._cdata not in self.known | before:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def freed(self, key: int, count: int) -> None:
        self.known.discard(key)
        self.now -= count


class Count(LiveBytes):
    """Live bytes, and in each phase of a step: operations, products, bytes moved by the others, waits, collectives."""

    def __init__(self, rank: int, ranks: int):
        super().__init__()
        self.rank, self.ranks, self.phase = rank, ranks, "setup"
        self.clear()

    def clear(self) -> None:
        """Begin counting anew; what is alive stays counted."""
        self.operations: dict[str, Counter] = defaultdict(Counter)
        self.products: dict[str, Counter] = defaultdict(Counter)
        self.compiled: dict[str, Counter] = defaultdict(Counter)  # of the operations, those of compiled functions
        self.calls: Counter = Counter()  # of compiled functions
        self.moved: Counter = Counter()  # bytes that operations other than products read and write
        self.waits: list[str] = []       # where the host would wait for the device
        self.collectives: dict[str, list[Collective]] = defaultdict(list)
        self.peak, self.peaks = self.now, Counter()  # of the step; of each phase

    def __torch_dispatch__(self, func: Callable, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.peaks[self.phase] = max(self.peaks[self.phase], self.now)
        if not TracingContext.try_get():
            self.count(func, args, kwargs, result)
        return result

    def called(self, graph) -> None:
        """A compiled function runs: a bench.kernels.Graph."""
        self.calls[self.phase] += 1
        self.operations[self.phase] += graph.operations
        self.compiled[self.phase] += graph.operations
        self.products[self.phase] += graph.products
        self.moved[self.phase] += graph.moved

    def count(self, func: Callable, args: tuple, kwargs: dict | None, result) -> None:
        name = func._schema.name.partition("::")[2]
        inputs, outputs = ([t for t in tree_leaves(x) if isinstance(t, Tensor)] for x in ((args, kwargs), result))
        if func.namespace == "c10d":
            largest = max(inputs, key=Tensor.numel)
            sent = sent_in(name, args, self.rank, self.ranks)
            self.collectives[self.phase].append(Collective(name, short(largest.dtype), largest.numel(), sent))
            return
        devices = {t.device.type for t in (*inputs, *outputs)}
        copied = name in ("_to_copy", "copy_") and len(devices) > 1
        if name in WAITS or copied:
            self.waits.append(f"{name} in {self.phase}")
        nothing = func.namespace == "prim" or func.is_view or "empty" in name or name == "_unsafe_view"
        if nothing or not devices - {"cpu"}:
            return
        self.operations[self.phase][name] += 1
        if name in PRODUCTS:
            a, b = [t for t in inputs if t.dim() >= 2 and t.is_floating_point()][-2:]
            stack = a.size(0) if a.dim() == 3 else 1
            self.products[self.phase][Product(stack, a.size(-2), a.size(-1), b.size(-1), short(a.dtype))] += 1
        elif name in LOOKUPS:
            self.moved[self.phase] += sum(t.nbytes for t in (*inputs[1:], *outputs) if t is not inputs[0])
        else:
            self.moved[self.phase] += sum(t.nbytes for t in (*inputs, *outputs))


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def one_rank_of(ranks: int, rank: int) -> Iterator[None]:
    """A process group of so many ranks of which only this one exists; none for one rank."""
    if ranks > 1:
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    yield
    if ranks > 1:
        dist.destroy_process_group()


def fused_attention(q: Tensor, k: Tensor, v: Tensor, window: int, blocks) -> Tensor:
    """What cuDNN's attention allocates and keeps; to choose a kernel, the usual function would ask the device."""
    if blocks is not None and torch.compiler.is_compiling():
        return attention(q, k, v, window, blocks)
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[0]


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """A GPU's attention; on the meta device a GPU's chunks of logits; a mesh of real numbers among fake tensors."""
    layers.attention, zero.init_device_mesh = fused_attention, real_mesh
    loss.CHUNK_LOGITS["meta"] = loss.CHUNK_LOGITS["cuda"]
    yield
    layers.attention, zero.init_device_mesh = attention, init_device_mesh
    del loss.CHUNK_LOGITS["meta"]


def real_mesh(*args, **settings):
    with unset_fake_temporarily():
        return init_device_mesh(*args, **settings)


def dry_step(
    count: Count, config: GPTConfig, rows: int, stage: int, micro_steps: int, device: torch.device, compiled: bool
) -> int:
    """
    Counts an optimizer step as in scripts/base_train.py, in bfloat16, after one that is not counted. stage: 0 to 2.
    Returns the bytes alive between two steps.
    """
    with as_on_a_gpu(), one_rank_of(count.ranks, count.rank), count:
        with device:
            model = gpt.GPT(config)
        sharding = Sharding(model, model.units(), device, torch.bfloat16, stage)
        optimizers = setup_optimizers(model, sharding)
        if compiled:
            model.compile_blocks()
        tokens = torch.empty(rows, config.sequence_len, dtype=torch.int64, device=device)
        for _ in range(2):
            count.clear()
            state = count.now
            for micro_step in range(micro_steps):
                with sharding.accumulate(last=micro_step == micro_steps - 1):
                    count.phase = "forward"
                    mean = model(tokens, tokens)
                    count.phase = "backward"
                    (mean / micro_steps).backward()
            count.phase = "reduce"
            stats = sharding.reduce_and_clip(mean)
            for optimizer in optimizers:
                count.phase = optimizer.kind
                optimizer.step(stats)
            count.phase = "gather"
            sharding.all_gather_params()
    return state
