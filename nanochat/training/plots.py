"""A run in one picture: loss, validation, learning rate and throughput over its steps."""
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nanochat.runtime.files import write_aside
from nanochat.training.records import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#1f5fa8", "#d9730d", "#9aa5b1"  # distinct for colour-blind eyes as well


def plot_section(stage: str, metrics: Path, floor: float | None, folder: Path) -> str:
    """Draw a run's metrics into <stage>.png. Returns markdown that shows it, or says why there is none."""
    try:
        figure = metrics_figure(read_metrics(metrics), floor)
    except (ImportError, OSError, ValueError, TypeError, KeyError) as error:  # no matplotlib, no file, a damaged one
        return f"*No plot of {metrics}: {type(error).__name__}: {error}*"
    with write_aside(folder / f"{stage}.png") as aside:
        figure.savefig(aside, format="png", dpi=140)
    return f"![{stage}: loss, validation, learning rate and throughput over steps]({stage}.png)"


def series(records: list[dict], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the records that have a finite number for a key."""
    found = [(record["step"], record[key]) for record in records if math.isfinite(record.get(key, math.nan))]
    steps, values = np.array(found, dtype=float).reshape(-1, 2).T
    return steps, values


def smoothed(values: np.ndarray) -> np.ndarray:
    """
    Mean over a fiftieth of the run around each step, so that it does not lag as a running mean would; near the start,
    where losses fall fast, over as many steps before it as after it.
    """
    means = np.empty_like(values)
    for step in range(len(values)):
        reach = min(step, max(2, len(values) // 100))
        means[step] = values[step - reach : step + reach + 1].mean()
    return means


def metrics_figure(records: list[dict], floor: float | None) -> "Figure":
    """Four panels: loss, validation or reward, learning-rate factor, throughput. ImportError without matplotlib."""
    from matplotlib.figure import Figure  # a figure of its own: no pyplot, so no backend chosen and nothing kept open

    figure = Figure(figsize=(11, 6.6), layout="constrained")
    loss, validation, rate, throughput = figure.subplots(2, 2).flat
    losses = series(records, "train/loss")
    rewards = series(records, "rl/reward")
    if len(rewards[0]):  # reinforcement learning has rewards in place of a validation
        panel(loss, "Policy loss: only its gradient means something", "nats per token, by advantage", *losses,
              smooth=True)
        panel(validation, "Reward of the samples", "mean of a step", *rewards, smooth=True)
    else:
        panel(loss, "Training loss", "nats per token", *losses, smooth=True)
        panel(validation, "Validation", "bits per byte", *series(records, "val/bpb"), floor=floor)
        for axes in (loss, validation):
            axes.set_yscale("log")  # on a linear scale the end of a run crowds at the foot
    panel(rate, "Learning-rate factor (lrm)", "times the initial rate", *series(records, "train/lrm"))
    rate.set_ylim(bottom=0)  # a rate that falls to a tenth should look like one
    steps, speed = series(records, "train/tok_per_sec")
    panel(throughput, "Throughput", "tokens per second", steps[1:], speed[1:], smooth=True)  # the first step compiles
    throughput.set_ylim(bottom=0)
    return figure


def panel(axes: "Axes", title: str, unit: str, steps: np.ndarray, values: np.ndarray, *, smooth: bool = False,
          floor: float | None = None) -> None:
    """One quantity over the steps. smooth: thin, and its smoothed curve over it. floor: a line to compare with."""
    # As little ink as possible beside the data: no frame, a light grid, the legend above the panel.
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    if len(values) == 0:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color=GREY)
        return
    marker = "o"  # of the few validations
    if smooth:
        axes.plot(steps, values, color=GREY, linewidth=0.6)
        values = smoothed(values)
        marker = ""
    axes.plot(steps, values, color=BLUE, linewidth=1.6, marker=marker, markersize=4, label=f"last {values[-1]:,.4g}")
    if floor is not None:
        axes.axhline(floor, color=ORANGE, linewidth=1.4, linestyle="--", label=f"entropy floor {floor:.4g}")
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel(unit, fontsize=9)
    axes.grid(color="#e6e9ed", linewidth=0.7)
    axes.legend(loc="lower right", bbox_to_anchor=(1.01, 0.985), ncols=2, fontsize=8.5, frameon=False)
