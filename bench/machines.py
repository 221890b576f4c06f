"""
What links mean for a step, from PCIe to InfiniBand, computed; and this machine's own, measured: the tables of docs/machines.md.

    python -m bench.machines            # prints them
    python -m bench.machines --write    # and puts them into the page
"""
import json
import os
import socket
import tempfile
import time
from pathlib import Path

from configurator import configure

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from nanochat.errors import UserError, require_positive
from nanochat.flops import datasheet_peak, measured_matmul_flops
from nanochat.plan.machines import LINKS, Link, Step, plan_step, shaped
from nanochat.plan.memory import parameter_counts
from bench.pages import put_into_page
from nanochat.report import markdown_table

COLUMNS = ["link", "computes, ms", "sends, ms: stage 1", "stage 2", "stage 3", "latency, ms", "hides stage 2 from", "stage 3 from"]


def measure_link(rank: int, ranks: int, folder: str) -> None:
    """One of two ranks on this machine: gloo's bandwidth in an all-reduce of 64 MB, its latency in one of 4 bytes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if "lo" in dict(socket.if_nameindex()).values() else "lo0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    seconds = {}
    for size in (16 * 2**20, 1):
        tensor, times = torch.zeros(size), []
        for _ in range(6):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - start)
        seconds[size] = min(times)
    if rank == 0:  # with two ranks an all-reduce sends the tensor once, in two messages
        link = Link("this machine, gloo over loopback", 64 * 2**20 / seconds[16 * 2**20], seconds[1] / 2)
        Path(folder, "link.json").write_text(json.dumps([link, measured_matmul_flops(torch.device("cpu"), torch.float32)]))
    dist.barrier()
    dist.destroy_process_group()


def cells(name: str, step: Step) -> list[str]:
    latency = "–" if step.latency is None else f"{1e3 * step.latency:.1f}"
    return [name, f"{1e3 * step.compute:,.0f}", *(f"{1e3 * seconds:,.0f}" for seconds in step.send[1:]), latency, *(f"{tokens:,.0f}" for tokens in step.hides)]


if __name__ == "__main__":
    gpus = 8                    # ranks of the computed tables
    gpu = "H100"                # a name of the table in nanochat/flops.py
    mfu = 0.5                   # part of its bf16 peak that is assumed to be reached
    write = False               # put the tables into docs/machines.md
    config = configure(globals())

    require_positive(config, "gpus")
    if not 0 < mfu <= 1:
        raise UserError(f"mfu={mfu:g} must be above 0 and at most 1")
    peak, parts = datasheet_peak(gpu), []
    for depth in (20, 32):
        model = shaped(depth, 65536, 2048)
        lines = [cells(link.name, plan_step(model, gpus, mfu * peak, link, torch.bfloat16, 2**19, 4)) for link in LINKS.values()]
        parts += [f"**Depth {depth}**, {sum(parameter_counts(model.config)) / 1e6:,.0f} million parameters, {gpus} ranks of {peak / 1e12:,.0f} TFLOP/s at {mfu:.0%} MFU, bfloat16, "
                  f"524,288 tokens in 4 micro-steps of {2**17 // gpus:,} tokens per rank:", markdown_table(COLUMNS, lines)]
    with tempfile.TemporaryDirectory() as folder:
        start_processes(measure_link, (2, folder), nprocs=2, start_method="forkserver")
        found, rate = json.loads(Path(folder, "link.json").read_text())
    here, model = Link(*found), shaped(4, 8192, 512)
    parts += [f"**Measured**: two processes on one machine, {here.bandwidth / 1e9:.2f} GB/s and {1e6 * here.latency:,.0f} µs a message, {rate / 1e9:,.0f} GFLOP/s in float32 "
              "per rank with one thread. Depth 4, vocabulary 8,192, 8,192 tokens in 2 micro-steps of 2,048 per rank, at 60% of that rate:",
              markdown_table(COLUMNS, [cells(here.name, plan_step(model, 2, 0.6 * rate, here, torch.float32, 8192, 2))])]
    text = "\n\n".join(parts)
    print(text)
    if write:
        put_into_page("machines.md", "python -m bench.machines --write", text)
