"""
What a series of runs says about size: bits per byte against FLOPs, and for each FLOP budget against depth, with the depth that
fits it best. runs/scaling_laws.sh and runs/miniseries.sh train them, bench/scaling.py shows them.
"""
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from nanochat.checkpoint import list_steps, read_meta, step_dir
from nanochat.errors import UserError
from nanochat.files import base_dir
from nanochat.gpt import GPT, GPTConfig
from nanochat.metrics import read_metrics
from nanochat.plots import BLUE, GREY, ORANGE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = [BLUE, ORANGE, "#2a7f62", "#8a3b8f", "#b8860b", "#555f6b"]


class Run(NamedTuple):
    """A finished run: its FLOP budget (0: none was set), and what became of it."""

    depth: int
    budget: float
    parameters: int
    tokens: int
    flops: float
    bpb: float


class Optimum(NamedTuple):
    """The lowest point of the parabola through a budget's runs; curvature in bits per byte per squared octave of depth."""

    depth: float
    bpb: float
    curvature: float


def read_run(folder: Path) -> Run | None:
    """The run in a folder of checkpoints; None where it has not ended with a validation."""
    steps = list_steps(folder)
    meta = read_meta(step_dir(folder, steps[-1])) if steps else {}
    if not steps or meta["num_iterations"] != steps[-1]:
        return None
    scores = [record["val/bpb"] for record in read_metrics(folder / "metrics.jsonl") if record["step"] == steps[-1] and "val/bpb" in record]
    if not scores:
        return None
    with torch.device("meta"):
        model = GPT(GPTConfig(**meta["model_config"]))
    tokens = steps[-1] * meta["total_batch_size"]
    return Run(model.config.n_layer, max(meta["config"]["target_flops"], 0.0), sum(p.numel() for p in model.parameters()), tokens,
               float(tokens * model.estimate_flops()), scores[-1])


def fit(depths: list[float], scores: list[float]) -> Optimum | None:
    """
    Least-squares parabola of bits per byte in the logarithm of depth, as in approach 2 of Hoffmann et al. 2022,
    arXiv:2203.15556 (there of parameters). None for fewer than three depths, and where it has no lowest point.
    """
    if len(set(depths)) < 3:
        return None
    a, b, c = np.polyfit(np.log2(depths), scores, 2)
    return Optimum(float(2 ** (-b / (2 * a))), float(c - b * b / (4 * a)), float(a)) if a > 0 else None


def figure(series: str, runs: list[Run], optima: dict[float, Optimum | None]) -> "Figure":
    """Left: bits per byte over FLOPs, a line for each depth; right: over depth, a curve for each budget. ImportError without matplotlib."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = picture.subplots(1, 2)
    for axes, title, label in ((left, "What computation buys", "FLOPs of the run"), (right, "What to spend it on", "depth")):
        axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
        axes.set(xscale="log", xlabel=label, ylabel="validation, bits per byte")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e6e9ed", linewidth=0.7)
        axes.tick_params(labelsize=8.5, length=3)
    for depth in sorted({run.depth for run in runs}):
        line = sorted((run.flops, run.bpb) for run in runs if run.depth == depth)
        left.plot(*zip(*line), color=GREY, linewidth=1, marker="o", markersize=4)
        left.annotate(f"d{depth}", line[-1], xytext=(5, -3), textcoords="offset points", fontsize=8.5)
    winners = [min((run for run in runs if run.budget == budget), key=lambda run: run.bpb) for budget in optima] if len(optima) > 1 else runs
    left.plot(*zip(*sorted((run.flops, run.bpb) for run in winners)), color=BLUE, linewidth=1.8, label="the best of each budget" if len(optima) > 1 else series)
    left.minorticks_off()
    for (budget, best), colour in zip(optima.items(), COLOURS * len(optima)):
        line = sorted((run.depth, run.bpb) for run in runs if run.budget == budget)
        name = f"{budget:.2e} FLOPs" if budget else series
        inside = best is not None and line[0][0] <= best.depth <= line[-1][0]
        label = name if best is None else f"{name}: depth {best.depth:.2f}" if inside else f"{name}: depth {best.depth:.2f}, extrapolated"
        right.plot(*zip(*line), color=colour, marker="o", markersize=4, linewidth=0 if best else 1.4, label=label)
        if best:
            x = np.geomspace(line[0][0], line[-1][0])
            right.plot(x, best.bpb + best.curvature * np.log2(x / best.depth) ** 2, color=colour, linewidth=1.4)
        if inside:
            right.plot(best.depth, best.bpb, color=colour, marker="*", markersize=12)
    depths = sorted({run.depth for run in runs})
    right.set_xticks(depths, [str(depth) for depth in depths])
    right.minorticks_off()
    for axes in (left, right):
        axes.legend(fontsize=8.5, frameon=False)
    return picture


def read_series(series: str) -> list[Run]:
    """All finished runs whose tag begins with the series' name."""
    folders = sorted((base_dir() / "base_checkpoints").glob(f"{series}-*"))
    runs = {folder.name: read_run(folder) for folder in folders}
    for name in (name for name, run in runs.items() if run is None):
        print(f"{name}: not finished, left out")
    found = sorted((run for run in runs.values() if run), key=lambda run: (run.budget, run.depth))
    if not found:
        raise UserError(f"series={series}: no finished run {series}-… in {base_dir() / 'base_checkpoints'}; runs/scaling_laws.sh makes them")
    return found
