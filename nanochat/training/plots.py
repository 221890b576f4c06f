"""A run in one picture: loss, validation, learning rate and throughput over its steps."""
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nanochat.runtime.files import write_aside
from nanochat.training.records import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#1f5fa8", "#d9730d", "#9aa5b1"  # told apart by colour-blind eyes as well


def plot_section(stage: str, metrics: Path, floor: float | None, folder: Path) -> tuple[str, float]:
    """
    Draw a run's metrics into <stage>.png. Returns the markdown that shows it, or one line that says why there is none,
    and the seconds of all its steps.
    """
    seconds = 0.0
    try:
        records = read_metrics(metrics)
        seconds = float(np.nansum(series(records, "train/dt")[1]))
        if not records:
            raise ValueError("it has no records")
        figure = metrics_figure(records, floor)
    except (ImportError, OSError, ValueError, TypeError, KeyError) as error:  # no matplotlib, no file, a damaged one
        return f"*No plot of {metrics}: {' '.join(f'{type(error).__name__}: {error}'.split())}*", seconds
    with write_aside(folder / f"{stage}.png") as aside:
        figure.savefig(aside, format="png", dpi=140)
    return f"![{stage}: loss, validation, learning rate and throughput over steps]({stage}.png)", seconds


def series(records: list[dict], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the records that have a key; NaN for infinities. TypeError or ValueError for non-numbers."""
    steps, values = np.array([(r["step"], r[key]) for r in records if key in r], dtype=float).reshape(-1, 2).T
    return steps, np.where(np.isfinite(values), values, np.nan)


def smoothed(values: np.ndarray) -> np.ndarray:
    """
    Mean over a fiftieth of the run around each step, so that it does not lag as a running mean would: over as many
    steps after it as before it at the start, where losses fall fast, and over those that are left at the end.
    """
    steps = np.arange(len(values))
    reach = np.minimum(steps, max(2, len(values) // 100))
    first, end = steps - reach, np.minimum(steps + reach + 1, len(values))
    totals, known = (np.append(0, np.cumsum(column)) for column in (np.nan_to_num(values), ~np.isnan(values)))
    with np.errstate(invalid="ignore"):  # 0 / 0 where no value is known, which gives the NaN it should
        return (totals[end] - totals[first]) / (known[end] - known[first])


def metrics_figure(records: list[dict], floor: float | None) -> "Figure":
    """Four panels: loss, validation or reward, learning-rate factor, throughput. ImportError without matplotlib."""
    from matplotlib.figure import Figure  # a figure of its own: no pyplot, so no backend chosen and nothing kept open
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(11, 6.6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1, wspace=0.03, hspace=0.03)
    loss, validation, rate, throughput = figure.subplots(2, 2).flat

    losses = series(records, "train/loss")
    if any("rl/reward" in record for record in records):  # reinforcement learning has rewards in place of a validation
        panel(loss, "Policy loss: only its gradient means something", "nats per token, by advantage", *losses,
              smooth=True)
        panel(validation, "Reward of the samples", "mean of a step", *series(records, "rl/reward"), smooth=True)
    else:
        panel(loss, "Training loss", "nats per token", *losses, smooth=True, log=True)
        panel(validation, "Validation", "bits per byte", *series(records, "val/bpb"), floor=floor, log=True)
    panel(rate, "Learning-rate factor (lrm)", "times the initial rate", *series(records, "train/lrm"))
    rate.set_ylim(bottom=0)

    settled = [record for record in records if "train/dt" in record][1:]  # the first step compiles
    steps, speed = series(settled, "train/tok_per_sec")
    label = ""
    for key, words in (("train/mfu", ""), ("train/mfu_at_most", "at most ")):
        if any(record.get(key, 0) > 0 for record in settled):
            label = f", MFU {words}{100 * np.nanmedian(series(settled, key)[1]):.3g}%"
    if len(speed):
        label = f"median {EngFormatter(places=2)(np.nanmedian(speed))} tok/s{label}"
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

    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    if np.isnan(values).all():
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color=GREY)
        return
    curve = smoothed(values) if smooth else values
    if smooth:
        axes.plot(steps, values, color=GREY, linewidth=0.6)
    axes.plot(steps, curve, color=BLUE, linewidth=1.6, marker="" if smooth or len(steps) > 40 else "o", markersize=4,
              label=label or f"{'smoothed, ' * smooth}last {curve[-1]:#.4g}")
    if floor is not None:
        axes.axhline(floor, color=ORANGE, linewidth=1.4, linestyle="--", label=f"entropy floor {floor:#.4g}")
        values = np.append(values, floor)
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel(unit, fontsize=9)
    axes.tick_params(labelsize=8.5, length=3)
    axes.grid(color="#e6e9ed", linewidth=0.7)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="lower right", bbox_to_anchor=(1.01, 0.985), ncols=2, fontsize=8.5, frameon=False)
    if log and 0 < 2 * np.nanmin(values) < np.nanmax(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 6, 8)))
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylabel(f"{unit} (log scale)", fontsize=9)
