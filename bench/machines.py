"""
What links mean for a step, from PCIe to InfiniBand, computed; and this machine's own, measured: the tables of
docs/machines.md.

    python -m bench.machines --write    # without --write they are only printed
"""
from configurator import configure

import torch

from bench.harness import measure_link, on_ranks, show
from nanochat.flops import datasheet_peak
from nanochat.plan.machines import LINKS, Link, Step, plan_step, shaped
from nanochat.plan.memory import parameter_counts
from nanochat.report import markdown_table

gpus = 8                    # [1..] ranks of the computed tables
gpu = "H100"                # a name of the table in nanochat/flops.py
mfu = 0.5                   # [>0] part of its bf16 peak that is assumed to be reached
write = False               # put the tables into docs/machines.md
configure(globals())

COLUMNS = ["link", "computes, ms", "sends, ms: stage 1", "stage 2", "stage 3", "latency, ms", "hides stage 2 from",
           "stage 3 from"]


def line(link: Link, step: Step) -> list[str]:
    latency = "–" if step.latency is None else f"{1e3 * step.latency:.1f}"
    milliseconds = [f"{1e3 * seconds:,.0f}" for seconds in (step.compute, *step.send[1:])]
    return [link.name, *milliseconds, latency, *(f"{tokens:,.0f}" for tokens in step.hides)]


peak, parts = datasheet_peak(gpu), []
for depth in (20, 32):
    model = shaped(depth, 65536, 2048)
    lines = [line(link, plan_step(model, gpus, mfu * peak, link, torch.bfloat16, 2**19, 4)) for link in LINKS.values()]
    parts += [f"**Depth {depth}**, {sum(parameter_counts(model.config)) / 1e6:,.0f} million parameters, {gpus} ranks "
              f"of {peak / 1e12:,.0f} TFLOP/s at {mfu:.0%} MFU, bfloat16, 524,288 tokens in 4 micro-steps of "
              f"{2**17 // gpus:,} tokens per rank:", markdown_table(COLUMNS, lines)]
bandwidth, latency, rate = on_ranks(2, measure_link)
here = Link("this machine, gloo over loopback", bandwidth, latency)
lines = [line(here, plan_step(shaped(4, 8192, 512), 2, 0.6 * rate, here, torch.float32, 8192, 2))]
parts += [f"**Measured**: two processes on one machine, {here.bandwidth / 1e9:.2f} GB/s and {1e6 * here.latency:,.0f} "
          f"µs a message, {rate / 1e9:,.0f} GFLOP/s in float32 per rank with one thread. Depth 4, vocabulary 8,192, "
          "8,192 tokens in 2 micro-steps of 2,048 per rank, at 60% of that rate:", markdown_table(COLUMNS, lines)]
show("\n\n".join(parts), "machines.md", "bench.machines", write)
