"""
From 8 GPUs to 8,192: the fastest layout of ZeRO and pipelines at each size, what a step then waits for, and the largest
model that fits. Formulas of nanochat/plan/; the tables and the picture of docs/many_gpus.md.

    python -m bench.many_gpus --write       # without --write they are only printed, and the picture is saved here
"""
from configurator import configure

most_gpus = 8192            # [8..] where the tables end
write = False               # put tables and picture into docs
configure(globals())

import bisect

import torch
from matplotlib.figure import Figure

from bench.harness import DOCS, PageBlock
from nanochat.model.gpt_config import GPTConfig, config_from_depth
from nanochat.optim.recipe import choose_batch_size
from nanochat.plan.machines import LINKS, Cluster, Layout, bytes_on_a_rank, fastest_layout
from nanochat.plan.memory import GIB, shaped, split_into_stages
from nanochat.runtime.flops import datasheet_gpu
from nanochat.runtime.tables import markdown_table

block = PageBlock("many_gpus.md", "bench.many_gpus", write)

DEPTHS = (24, 32, 48, 96)    # of the picture
TABLE = 24                   # of this one the page has a table, too
SIZES = [8 << i for i in range(11) if 8 << i <= most_gpus]
PER_HOST = 8
MEMORY = 80 * GIB
MFU = 0.5                   # of the passes alone
PEAK = datasheet_gpu("H100").peak
LENGTH = 2048               # tokens of a row
RATIO = 8                   # training tokens per parameter: they decide the batch


def config_of(depth: int) -> GPTConfig:
    return config_from_depth(depth, 65536, LENGTH, arch="modern")


def billions(config: GPTConfig) -> float:
    """Billions of parameters."""
    return sum(split_into_stages(config)[0].units) / 1e9


def cluster_of(gpus: int) -> Cluster:
    return Cluster(gpus, min(gpus, PER_HOST), LINKS["nvlink4"], LINKS["ndr"])


def scale(depth: int) -> tuple[str, dict[int, float]]:
    """A model's table by size, and {GPUs: MFU} where it fits and its batch has a row for each GPU."""
    config = config_of(depth)
    model = shaped(config)
    horizon = RATIO * model.count_parameters("matrix", "head")  # tokens of the run
    batch = choose_batch_size(-1, horizon, SIZES[0] * LENGTH)   # tokens of a step
    rows, reached = [], {}
    for gpus in SIZES:
        if batch < gpus * LENGTH:
            rows.append([gpus, *["–"] * 5, f"the batch has {batch // LENGTH:,} rows"])
            break
        best = fastest_layout(config, cluster_of(gpus), MFU * PEAK, torch.bfloat16, batch, MEMORY)
        if best is None:
            rows.append([gpus, *["–"] * 5, "nothing fits"])
            continue
        layout, step = best
        reached[gpus] = batch * model.estimate_flops() / (gpus * step.seconds * PEAK)
        lost = {"communication": step.exposed, "Muon": step.update, "bubble": step.bubble}
        largest = max(lost, key=lost.get)
        its_rows = f"{layout.rows} twice" if layout.checkpointing else layout.rows
        rows.append([gpus, layout.zero_stage, layout.shards, layout.pipeline_stages, its_rows,
                     f"{reached[gpus]:.0%}", f"{largest}: {lost[largest] / step.seconds:.0%}"])
    head = f"**Depth {depth}**, {billions(config):.1f} billion parameters, {batch:,} tokens in a step"
    columns = ["GPUs", "stage", "shard_size", "pipeline", "rows", "MFU", "what costs most, of the step"]
    return f"{head}:\n\n{markdown_table(columns, rows)}", reached


def largest_depth(gpus: int) -> int:
    """
    The largest depth that trains on stage 3 over all ranks, a row at a time, with activations computed twice. Pipelines
    hold smaller models: their stages keep whole gradients.
    """
    how = cluster_of(gpus), Layout(3, gpus, rows=1, micro_steps=1, checkpointing=True), torch.bfloat16
    return bisect.bisect_left(range(1, 512), True, key=lambda depth: bytes_on_a_rank(config_of(depth), *how) > MEMORY)


figure = Figure(figsize=(7, 3.4), layout="constrained")
axes = figure.subplots()
parts = []
for depth in DEPTHS:
    table, reached = scale(depth)
    if depth == TABLE:
        parts.append(table)
    axes.semilogx(list(reached), list(reached.values()), ".-", base=2, label=f"depth {depth}")
axes.set(xlabel="GPUs; a line ends where each has one row", ylabel="MFU", xticks=SIZES, ylim=(0, 0.55))
axes.xaxis.set_major_formatter("{x:g}")
axes.yaxis.set_major_formatter("{x:.0%}")
axes.grid()
axes.legend()

rows = []
for gpus in [1, *SIZES[::2]]:
    depth = largest_depth(gpus)
    rows.append([gpus, depth, f"{billions(config_of(depth)):,.1f}"])
parts.append(markdown_table(["GPUs", "largest depth", "billion parameters"], rows))
block.show("\n\n".join(parts))
figure.savefig(DOCS / "images/many_gpus.png" if write else "many_gpus.png", dpi=90)
