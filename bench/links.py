"""
What a link carries: microseconds and bus bandwidth of an all-reduce, by the size of its message. The first thing to
run on a cluster.

    python -m bench.links --write                  # two ranks on this machine, gloo; without --write it is only printed
    torchrun --nproc_per_node=8 -m bench.links     # the GPUs of a host, NCCL; more torchrun flags: many hosts
"""
from configurator import configure

write = False               # put the table into docs/machines.md
configure(globals())

import timeit
from functools import partial

import torch
import torch.distributed as dist

from bench.harness import PageBlock, on_ranks
from nanochat.runtime.collectives import rank_and_size
from nanochat.runtime.devices import synchronize
from nanochat.runtime.distributed import compute_cleanup, compute_init
from nanochat.runtime.tables import cell, markdown_table

block = PageBlock("machines.md", "bench.links", write)

SIZES = [4**n for n in range(5, 14)]  # bytes
REPEATS = 15                # the fastest counts


def measure(rank: int, ranks: int, device: torch.device) -> list[list[str]]:
    def send(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)
        synchronize(device)

    lines = []
    for size in SIZES:
        send_zeros = partial(send, torch.zeros(size // 4, device=device))
        send_zeros()
        seconds = min(timeit.repeat(send_zeros, dist.barrier, number=1, repeat=REPEATS))
        sent = 2 * (ranks - 1) / ranks * size  # bytes, by each rank
        lines.append([f"{size:,}", f"{1e6 * seconds:,.0f}", cell(sent / seconds / 1e9)])
    return lines


device = compute_init("")
rank, ranks = rank_and_size()
lines = measure(rank, ranks, device) if ranks > 1 else on_ranks(2, measure, torch.device("cpu"))
if rank == 0:
    block.show(markdown_table(["bytes", "µs", "GB/s"], lines))
compute_cleanup()
