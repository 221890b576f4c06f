"""
From 8 GPUs to 8,192: the fastest layout of ZeRO and pipelines at each size, what a step then waits for, and the largest
model that fits. Formulas of nanochat/plan/; the tables and the picture of docs/many_gpus.md.

    python -m bench.many_gpus --write       # without --write they are only printed, and the picture is drawn here
"""
import bisect
from pathlib import Path

from configurator import configure

import torch
from matplotlib.figure import Figure

from bench.harness import DOCS, show
from nanochat.model.gpt_config import GPTConfig, config_from_depth
from nanochat.optim.schedule import choose_batch_size
from nanochat.plan.machines import LINKS, Cluster, Layout, StepPlan, fastest_layout, fits, pipelines
from nanochat.plan.memory import GIB, parameter_counts, shaped
from nanochat.runtime.files import write_aside
from nanochat.runtime.flops import datasheet_peak
from nanochat.runtime.tables import markdown_table

write = False               # put tables and picture into docs
configure(globals())

SIZES, PER_HOST, MEMORY, MFU = [8 << i for i in range(11)], 8, 80 * GIB, 0.5
WITHIN, BETWEEN, PEAK = LINKS["nvlink4"], LINKS["ndr"], datasheet_peak("H100")
MODELS = ((24, "#1f5fa8"), (32, "#d9730d"), (48, "#31a354"), (96, "#756bb1"))    # depth, color
RATIO, LENGTH = 8, 2048


def config_of(depth: int) -> GPTConfig:
    return config_from_depth(depth, 65536, LENGTH, arch="modern")


def cluster_of(gpus: int) -> Cluster:
    return Cluster(gpus, PER_HOST, WITHIN, BETWEEN)


def plans(depth: int) -> tuple[int, dict[int, tuple[Layout, StepPlan, float]]]:
    """(tokens of a step, {GPUs: the fastest layout, its step, its MFU}); sizes at which none fits are not in it."""
    config, found = config_of(depth), {}
    model = shaped(config)
    batch = choose_batch_size(-1, RATIO * model.count_parameters("matrix", "head"), SIZES[0] * LENGTH)
    for gpus in SIZES:
        best = fastest_layout(config, cluster_of(gpus), MFU * PEAK, torch.bfloat16, batch, MEMORY)
        if best:
            found[gpus] = (*best, batch * model.estimate_flops() / (gpus * best[1].seconds * PEAK))
    return batch, found


def table(depth: int, batch: int, found: dict[int, tuple[Layout, StepPlan, float]]) -> str:
    config, rows = config_of(depth), []
    for gpus in SIZES:
        if gpus not in found:
            few = batch < gpus * LENGTH
            rows.append([gpus, *["–"] * 9, f"the batch has {batch // LENGTH:,} rows" if few else "nothing fits"])
            if few:
                break
            continue
        layout, step, mfu = found[gpus]
        lost = {"communication": step.exposed, "Muon": step.update, "bubble": step.bubble}
        largest = max(lost, key=lost.get)
        seconds = [f"{1e3 * number:,.1f}" for number in (step.compute, step.update, step.exposed, step.bubble)]
        its_rows = f"{layout.rows}{' twice' * layout.checkpointing}"
        rows.append([gpus, layout.zero_stage, layout.shards, layout.pipeline_stages, its_rows, *seconds, f"{mfu:.0%}",
                     f"{largest}: {lost[largest] / step.seconds:.0%}"])
    head = (f"**Depth {depth}**, {sum(parameter_counts(config)) / 1e9:.1f} billion parameters, "
            f"{batch:,} tokens in a step:\n\n")
    return head + markdown_table(["GPUs", "stage", "shard_size", "pipeline", "rows", "computes, ms", "Muon, ms",
                                  "waits, ms", "bubble, ms", "MFU", "what costs most, of the step"], rows)


def largest_depth(cluster: Cluster) -> tuple[int, Layout | None]:
    """
    The deepest model that can be trained, one row at a time and activations computed twice, and how: stage 3 over all
    ranks, or a pipeline with stage 1 in each of its stages.
    """
    def fitting(depth: int) -> Layout | None:
        config = config_of(depth)
        tried = [Layout(1, cluster.ranks // n, 1, n, True, n) for n in pipelines(config, cluster)]
        tried = [Layout(3, cluster.ranks, 1, 1, True), *tried]
        return next((layout for layout in tried if fits(config, cluster, layout, torch.bfloat16, MEMORY)), None)

    depth = bisect.bisect_left(range(1, 512), True, key=lambda depth: fitting(depth) is None)
    return depth, fitting(depth)


def largest_models() -> str:
    rows = []
    for gpus in [1, *SIZES]:
        cluster = cluster_of(gpus)._replace(per_host=min(gpus, PER_HOST))
        depth, layout = largest_depth(cluster)
        parameters = sum(parameter_counts(config_of(depth)))
        how = f"stage {layout.zero_stage}" + f", {layout.pipeline_stages} in a pipeline" * (layout.pipeline_stages > 1)
        rows.append([gpus, depth, f"{parameters / 1e9:,.1f}", how])
    return markdown_table(["GPUs", "largest depth", "billion parameters", "how"], rows)


def draw(path: Path, curves: list[tuple[int, str, dict]]) -> None:
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    for depth, color, found in curves:
        axes.plot(list(found), [mfu for *_, mfu in found.values()], color=color, marker="o", markersize=3,
                  label=f"depth {depth}")
        last = max(found)
        axes.annotate("a row each", (last, found[last][2]), (5, -3), textcoords="offset points", size=8, color=color)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="GPUs", ylabel="MFU", xticks=SIZES, ylim=(0, 0.55))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.grid(color="#e6e9ed")
    axes.legend(frameon=False, fontsize=9)
    with write_aside(path) as aside:
        figure.savefig(aside, format="png", dpi=90)


parts, curves = [], []
for depth, color in MODELS:
    batch, found = plans(depth)
    parts.append(table(depth, batch, found))
    curves.append((depth, color, found))
show("\n\n".join([*parts, largest_models()]), "many_gpus.md", "bench.many_gpus", write)
draw(DOCS / "images" / "many_gpus.png" if write else Path("many_gpus.png"), curves)
