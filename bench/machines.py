"""
What links mean for a step, from PCIe to InfiniBand, computed; and this machine's own, measured: the tables of
docs/machines.md.

    python -m bench.machines --write    # without --write they are only printed
"""

from configurator import configure

import torch

from bench.harness import all_reduce_seconds, on_ranks, show
from bench.links import hiding_tokens, messages
from nanochat.flops import datasheet_peak, measured_matmul_flops
from nanochat.gpt_config import GPTConfig, config_from_depth
from nanochat.plan.machines import LINKS, Cluster, Layout, Link, plan_step
from nanochat.plan.memory import parameter_counts
from nanochat.report import markdown_table

write = False               # put the tables into docs/machines.md
configure(globals())

COLUMNS = ["link", "computes, ms", "sends, ms: stage 1", "stage 2", "stage 3", "latency, ms", "hides stage 2 from",
           "stage 3 from"]


def measure_link(rank: int, ranks: int) -> tuple[float, float, float]:
    """Between two ranks here, by gloo: bytes/s of an all-reduce of 64 MB, seconds of a message; a rank's FLOP/s."""
    seconds = {numbers: min(all_reduce_seconds(numbers, 6)) for numbers in (2**24, 1)}
    # With two ranks an all-reduce sends the tensor once, in two messages.
    return 4 * 2**24 / seconds[2**24], seconds[1] / 2, measured_matmul_flops(torch.device("cpu"), torch.float32)


def line(
    link: Link, config: GPTConfig, ranks: int, rate: float, dtype: torch.dtype, batch_tokens: int, micro_steps: int
) -> list[str]:
    """Of ranks that are joined by this link alone; the others: as for `plan_step`."""
    cluster, rows = Cluster(ranks, ranks, link, link), batch_tokens // (ranks * micro_steps * config.sequence_len)
    plans = [plan_step(config, cluster, Layout(stage, ranks, rows, micro_steps), rate, dtype, batch_tokens)
             for stage in (1, 2, 3)]
    milliseconds = [f"{1e3 * seconds:,.0f}" for seconds in (plans[0].compute, *(plan.sending for plan in plans))]
    latency = f"{1e3 * messages(config, ranks) * link.latency:.1f}" if link.latency else "–"
    return [link.name, *milliseconds, latency,
            *(f"{tokens:,.0f}" for tokens in hiding_tokens(config, ranks, rate, link, dtype))]


peak, parts = datasheet_peak("H100"), []
for depth in (20, 32):
    config = config_from_depth(depth, 65536, 2048)
    lines = [line(link, config, 8, 0.5 * peak, torch.bfloat16, 2**19, 4) for link in LINKS.values()]
    parts += [f"**Depth {depth}**, {sum(parameter_counts(config)) / 1e6:,.0f} million parameters "
              f"(classic, vocabulary 65,536), 8 ranks of {peak / 1e12:,.0f} TFLOP/s at 50% MFU, bfloat16, "
              "524,288 tokens in 4 micro-steps of 16,384 tokens per rank:", markdown_table(COLUMNS, lines)]
bandwidth, latency, rate = on_ranks(2, measure_link)
here = Link("this machine, gloo over loopback", bandwidth, latency)
lines = [line(here, config_from_depth(4, 8192, 512), 2, 0.6 * rate, torch.float32, 8192, 2)]
parts += [f"**Measured**: two processes on one machine, {bandwidth / 1e9:.2f} GB/s and {1e6 * latency:,.0f} "
          f"µs a message, {rate / 1e9:,.0f} GFLOP/s in float32 per rank with one thread. Depth 4, vocabulary 8,192, "
          "8,192 tokens in 2 micro-steps of 2,048 per rank, at 60% of that rate:", markdown_table(COLUMNS, lines)]
show("\n\n".join(parts), "machines.md", "bench.machines", write)
