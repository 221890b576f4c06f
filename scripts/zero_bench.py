"""
What the stages of ZeRO keep and send, measured beside the formulas: the tables of docs/zero.md.

    python -m scripts.zero_bench            # prints them
    python -m scripts.zero_bench --write    # puts them into the page

It starts its own ranks (gloo, on the CPU) and trains a few steps on random tokens in every stage and dtype. Memory is
the storage of all live tensors; traffic is what every collective sends, and what passes through the network interface.
"""
import ctypes
import fcntl
import gc
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanochat.gpt import GPT, GPTConfig
from nanochat.memory import sent_bytes, state_bytes
from nanochat.zero import Sharding

STAGES, DTYPES = (0, 1, 2, 3), ("bfloat16", "float32")
PAGE = Path(__file__).parent.parent / "docs" / "zero.md"
PRIVATE_NETWORK = ["unshare", "--net", "--map-root-user"]  # a network of its own, in which nobody else sends


# ---- Memory

def local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def storages(tensors: Iterable[Tensor | None]) -> dict[int, int]:
    """{address: bytes} of what the tensors live in, each storage once."""
    found = [local(t).untyped_storage() for t in tensors if t is not None]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def on_their_way(sharding: Sharding) -> Iterable[Tensor]:
    """The buffers of collectives that have started and are not waited for; gloo's sums receive into one of their own."""
    for _bucket, work, own, whole, _last in sharding.in_flight:
        yield from (own, whole, getattr(work, "received", None))
    for bucket in sharding.buckets:
        yield from (source for _work, source in bucket.pending)


def census(model: nn.Module, sharding: Sharding, optimizers: Iterable) -> dict[str, int]:
    """Bytes of every storage alive in this process, by the first of these that has a tensor in it."""
    gc.collect()
    params = list(model.parameters())
    owners = {
        "parameters": params,
        "optimizer": [s.master for s in sharding.slices] + [t for o in optimizers for states in o.state.values() for t in states.values()],
        "gradients": [p.grad for p in params] + [bucket.grad for bucket in sharding.buckets] + [s.grad for s in sharding.slices],
        "in flight": on_their_way(sharding),
        "rest": [t for t in gc.get_objects() if issubclass(type(t), Tensor) and not isinstance(t, DTensor) and t.device.type == "cpu"],
    }
    counted, result = set(), {}
    for owner, tensors in owners.items():
        new = {address: size for address, size in storages(tensors).items() if address not in counted}
        counted |= new.keys()
        result[owner] = sum(new.values())
    return result


class MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2: ten sizes, of which hblkhd (mapped blocks) and uordblks (the others) are in use."""

    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]


def allocated_bytes() -> int | None:
    """What the process has allocated, by whomever, as the C library knows it; None where it cannot tell."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return None
    mallinfo.restype = MallocInfo
    info = mallinfo()
    return info.hblkhd + info.uordblks


# ---- Traffic, and whole gradients

class Watch(TorchDispatchMode):
    """
    While it is on, counts the bytes this rank sends in every collective, by the algorithms of docs/collectives.md. It
    stands where all of PyTorch's collectives come by, whoever calls them, and refuses those it has no formula for.

    And it keeps the peaks of what micro-steps hold on stages 0 to 2, looked at whenever a gradient appears or leaves.
    """

    def __init__(self, ranks: int, rank: int, model: nn.Module):
        super().__init__()
        self.ranks, self.rank, self.params = ranks, rank, list(model.parameters())
        self.sharding: Sharding | None = None  # to be set before a step
        self.in_micro_steps = False
        self.sent: Counter[str] = Counter()  # bytes, by the name of the collective
        self.peaks: Counter[str] = Counter()
        for p in self.params:  # before the model is sharded, so that a gradient is seen before it is sent
            p.register_post_accumulate_grad_hook(lambda _: self.look())

    def __torch_dispatch__(self, func: Callable, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.count(func._schema.name.removeprefix("c10d::"), *args)
        return func(*args, **(kwargs or {}))

    def count(self, name: str, *args) -> None:
        if name == "allreduce_":
            (tensor,), sent = args[0], 2 * (self.ranks - 1) / self.ranks * args[0][0].nbytes
            self.look(sends=tensor)
        elif name == "_allgather_base_":
            sent = (self.ranks - 1) * args[1].nbytes
        elif name == "alltoall_base_":
            output, input, _group, _output_sizes, input_sizes = args[:5]
            sent = input.nbytes - (input_sizes[self.rank] * input.element_size() if input_sizes else input.nbytes / self.ranks)
            self.look(sends=input, receives=output)
        elif name == "barrier":
            sent = 0
        else:
            raise NotImplementedError(f"how many bytes a rank sends in {name}")
        self.sent[name] += sent

    def look(self, sends: Tensor | None = None, receives: Tensor | None = None) -> None:
        if not self.in_micro_steps or self.sharding.stage == 3:
            return
        whole = storages([sends, *(p.grad for p in self.params), *(gradients for _, _, _, gradients, _ in self.sharding.in_flight)])
        buffers = storages([receives, *on_their_way(self.sharding)])
        now = {"whole": sum(whole.values()), "with buffers": sum((whole | buffers).values()), "allocated": allocated_bytes() or 0}
        self.peaks |= now  # the larger of both


def sent_through_lo() -> int:
    """Bytes since the network began, headers and acknowledgements included."""
    with open("/proc/self/net/dev") as lines:
        return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


# ---- A few steps of training, watched

def train_step(model: nn.Module, sharding: Sharding, optimizers: Iterable, rows: Tensor, micro_steps: int, watch: Watch, look: Callable) -> None:
    """One optimizer step as in scripts/base_train.py; look() between micro-steps, when every unit has been through two."""
    watch.in_micro_steps = True
    for micro_step in range(micro_steps):
        with sharding.micro_step(last=micro_step == micro_steps - 1):
            loss = model(rows[:, :-1], rows[:, 1:])
            (loss / micro_steps).backward()
        if micro_step == 1 and micro_steps > 2:
            look()
    watch.in_micro_steps = False
    verdict = sharding.agree(loss)
    for optimizer in optimizers:
        optimizer.step(verdict)
    sharding.gather()
    for bucket in sharding.buckets:
        bucket.wait()  # base_train leaves that to the next forward pass


def measure(rank: int, ranks: int, config: GPTConfig, stage: int, dtype_name: str, accumulate: list[int], on_wire: bool = False) -> dict:
    """
    One stage on this rank: {"memory": census, "peaks": bytes, "sent": {micro-steps: bytes}, "wire": {micro-steps: bytes
    of all ranks}}, and what the formulas need. The largest of `accumulate` must be above 2.
    """
    gc.collect()
    start = allocated_bytes()
    model = GPT(config)
    model.init_weights(seed=0)
    watch = Watch(ranks, rank, model)
    sharding = Sharding(model, model.units(), torch.device("cpu"), getattr(torch, dtype_name), stage)
    optimizers = model.setup_optimizers(sharding)
    watch.sharding = sharding
    rows = torch.randint(config.vocab_size, (1, config.sequence_len + 1), generator=torch.Generator().manual_seed(rank))
    sizes = [sum(p.numel() for p in unit.parameters()) for unit in model.units()]
    result = {"memory": {}, "peaks": {}, "sent": {}, "wire": {}, "start": start}
    for micro_steps in accumulate:
        def look() -> None:
            result["memory"] = census(model, sharding, optimizers)
            result["memory"]["allocated"] = (allocated_bytes() or 0) - (start or 0)

        watch.sent.clear()
        dist.barrier()
        before = sent_through_lo() if on_wire else 0
        dist.barrier()
        with watch:
            train_step(model, sharding, optimizers, rows, micro_steps, watch, look)
        dist.barrier()
        result["wire"][micro_steps] = (sent_through_lo() if on_wire else 0) - before
        result["sent"][micro_steps] = sum(watch.sent.values())
        dist.barrier()
    result["peaks"] = dict(watch.peaks)
    return result
