"""A run in one picture: loss, validation, learning rate and throughput over its steps."""
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nanochat.runtime.files import write_aside
from nanochat.training.records import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#1f5fa8", "#d9730d", "#9aa5b1"  # distinct for colour-blind eyes as well


def plot_section(stage: str, metrics: Path, floor: float | None, folder: Path) -> tuple[str, float]:
    """
    Draw a run's metrics into <stage>.png. Returns the markdown that shows it, or one line that says why there is none,
    and the seconds of all its steps.
    """
    seconds = 0.0
    try:
        records = read_metrics(metrics)
        _, times = series(records, "train/dt")
        seconds = float(np.nansum(times))
        if not records:
            raise ValueError("it has no records")
        figure = metrics_figure(records, floor)
    except (ImportError, OSError, ValueError, TypeError, KeyError) as error:  # no matplotlib, no file, a damaged one
        return f"*No plot of {metrics}: {type(error).__name__}: {error}*", seconds
    with write_aside(folder / f"{stage}.png") as aside:
        figure.savefig(aside, format="png", dpi=140)
    return f"![{stage}: loss, validation, learning rate and throughput over steps]({stage}.png)", seconds


def series(records: list[dict], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the records that have a key; NaN for infinities. TypeError or ValueError for non-numbers."""
    found = [(record["step"], record[key]) for record in records if key in record]
    steps, values = np.array(found, dtype=float).reshape(-1, 2).T
    return steps, np.where(np.isfinite(values), values, np.nan)


def smoothed(values: np.ndarray) -> np.ndarray:
    """
    Mean over a fiftieth of the run around each step, so that it does not lag as a running mean would; near the start,
    where losses fall fast, over as many steps before it as after it.
    """
    means = np.full(len(values), np.nan)
    for step in range(len(values)):
        reach = min(step, max(2, len(values) // 100))
        around = values[step - reach : step + reach + 1]
        known = around[~np.isnan(around)]
        if len(known):
            means[step] = known.mean()
    return means


def metrics_figure(records: list[dict], floor: float | None) -> "Figure":
    """Four panels: loss, validation or reward, learning-rate factor, throughput. ImportError without matplotlib."""
    from matplotlib.figure import Figure  # a figure of its own: no pyplot, so no backend chosen and nothing kept open
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(11, 6.6), layout="constrained")
    loss, validation, rate, throughput = figure.subplots(2, 2).flat

    steps, losses = series(records, "train/loss")
    if any("rl/reward" in record for record in records):  # reinforcement learning has rewards in place of a validation
        panel(loss, "Policy loss: only its gradient means something", "nats per token, by advantage", steps, losses,
              smooth=True)
        panel(validation, "Reward of the samples", "mean of a step", *series(records, "rl/reward"), smooth=True)
    else:
        panel(loss, "Training loss", "nats per token", steps, losses, smooth=True, log=True)
        panel(validation, "Validation", "bits per byte", *series(records, "val/bpb"), floor=floor, log=True)
    panel(rate, "Learning-rate factor (lrm)", "times the initial rate", *series(records, "train/lrm"))
    rate.set_ylim(bottom=0)  # a rate that falls to a tenth should look like one

    settled = [record for record in records if "train/dt" in record][1:]  # the first step compiles
    steps, speed = series(settled, "train/tok_per_sec")
    label = ""
    if len(speed):
        label = f"median {EngFormatter(places=2)(np.nanmedian(speed))} tok/s"
        for key, words in (("train/mfu", "MFU"), ("train/mfu_at_most", "MFU at most")):
            _, shares = series(settled, key)
            if len(shares):
                label += f", {words} {100 * np.nanmedian(shares):.3g}%"
    panel(throughput, "Throughput", "tokens per second", steps, speed, smooth=True, label=label)
    throughput.yaxis.set_major_formatter(EngFormatter())
    throughput.set_ylim(bottom=0)
    return figure


def panel(axes: "Axes", title: str, unit: str, steps: np.ndarray, values: np.ndarray, *, smooth: bool = False,
          log: bool = False, floor: float | None = None, label: str = "") -> None:
    """
    One quantity over the steps. smooth: thin, and its smoothed curve over it; floor: a line to compare with; log: a
    logarithmic scale where values more than double, since on a linear one the end of a run crowds at the foot.
    """
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

    # As little ink as possible beside the data: no frame, a light grid, the legend above the panel.
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    if np.isnan(values).all():
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color=GREY)
        return
    curve = smoothed(values) if smooth else values
    if not label:
        label = f"smoothed, last {curve[-1]:#.4g}" if smooth else f"last {curve[-1]:#.4g}"
    if smooth:
        axes.plot(steps, values, color=GREY, linewidth=0.6)
    marker = "" if smooth or len(steps) > 40 else "o"
    axes.plot(steps, curve, color=BLUE, linewidth=1.6, marker=marker, markersize=4, label=label)
    lowest, highest = np.nanmin(values), np.nanmax(values)
    if floor is not None:
        axes.axhline(floor, color=ORANGE, linewidth=1.4, linestyle="--", label=f"entropy floor {floor:#.4g}")
        lowest = min(lowest, floor)
    if log and 0 < 2 * lowest < highest:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 6, 8)))
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.yaxis.set_minor_locator(NullLocator())
        unit += " (log scale)"
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel(unit, fontsize=9)
    axes.grid(color="#e6e9ed", linewidth=0.7)
    axes.legend(loc="lower right", bbox_to_anchor=(1.01, 0.985), ncols=2, fontsize=8.5, frameon=False)
