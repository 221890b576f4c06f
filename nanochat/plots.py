"""A run in one picture: loss, validation, learning rate and throughput over its steps."""
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nanochat.files import write_aside
from nanochat.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#1f5fa8", "#d9730d", "#9aa5b1"  # told apart by colour-blind eyes as well


def plot_section(stage: str, metrics: Path, floor: float | None, folder: Path) -> tuple[str, float]:
    """Draw a run's metrics into <stage>.png; the markdown that shows it, or one line why not, and the seconds of its steps."""
    seconds = 0.0
    try:
        records = read_metrics(metrics)
        seconds = float(np.nansum(series(records, "train/dt")[1]))
        if not records:
            return f"*No plot: {metrics} has no records.*", 0.0
        figure = metrics_figure(records, floor)
    except FileNotFoundError:
        return f"*No plot: {metrics} is missing.*", 0.0
    except ImportError:
        return "*No plot: matplotlib is not installed; with it, python -m scripts.report draws one.*", seconds
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"*No plot: {metrics} is damaged ({type(error).__name__}: {single_line(error)}).*", seconds
    with write_aside(folder / f"{stage}.png") as aside:
        figure.savefig(aside, format="png", dpi=140)
    return f"![{stage}: loss, validation, learning rate and throughput over steps]({stage}.png)", seconds


def series(records: list[dict], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the records that have a key; NaN for infinities. TypeError or ValueError for what is no number."""
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
    return np.divide(totals[end] - totals[first], known[end] - known[first], out=np.full(len(values), np.nan),
                     where=known[end] > known[first])


def metrics_figure(records: list[dict], floor: float | None) -> "Figure":
    """Four panels over the step: loss, validation with its floor, learning-rate factor, throughput. ImportError without matplotlib."""
    from matplotlib.figure import Figure  # a figure of its own: no pyplot, so no backend chosen and nothing kept open

    figure = Figure(figsize=(11, 6.6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1, wspace=0.03, hspace=0.03)
    loss, validation, rate, throughput = figure.subplots(2, 2).flat

    steps, values = series(records, "train/loss")
    if start_panel(loss, "Training loss", "nats per token", values):
        loss.plot(steps, values, color=GREY, linewidth=0.6, label="each step")
        loss.plot(steps, smoothed(values), color=BLUE, linewidth=1.6, label=f"smoothed, last {smoothed(values)[-1]:#.4g}")
        finish_panel(loss, values)

    if any("rl/reward" in record for record in records):
        plot_reward(validation, *series(records, "rl/reward"))
    else:
        plot_validation(validation, *series(records, "val/bpb"), floor)

    steps, values = series(records, "train/lrm")
    if start_panel(rate, "Learning-rate factor", "times the initial rate", values):
        rate.plot(steps, values, color=BLUE, linewidth=1.6)
        rate.set_ylim(0, 1.08 * max(1, np.nanmax(values)))

    plot_throughput(throughput, [record for record in records if "train/dt" in record][1:])  # the first step compiles
    return figure


def plot_validation(axes: "Axes", steps: np.ndarray, values: np.ndarray, floor: float | None) -> None:
    if start_panel(axes, "Validation", "bits per byte", values):
        marker = "o" if len(steps) <= 40 else ""
        axes.plot(steps, values, color=BLUE, linewidth=1.6, marker=marker, markersize=4, label=f"last {values[-1]:#.4g}")
        if floor is not None:
            axes.axhline(floor, color=ORANGE, linewidth=1.4, linestyle="--", label=f"entropy floor {floor:#.4g}")
            values = np.append(values, floor)
        finish_panel(axes, values)


def plot_reward(axes: "Axes", steps: np.ndarray, values: np.ndarray) -> None:
    """What reinforcement learning has in place of a validation."""
    if start_panel(axes, "Samples", "mean reward", values):
        axes.plot(steps, values, color=GREY, linewidth=0.6, label="each step")
        axes.plot(steps, smoothed(values), color=BLUE, linewidth=1.6, label=f"smoothed, last {smoothed(values)[-1]:#.3g}")
        finish_panel(axes)


def plot_throughput(axes: "Axes", records: list[dict]) -> None:
    """Tokens per second on the left, MFU on the right. They part only where a run went on with other ranks, so the scales
    are chosen to hold the two curves apart."""
    from matplotlib.ticker import EngFormatter, FuncFormatter

    steps, speed = series(records, "train/tok_per_sec")
    if not start_panel(axes, "Throughput", "tokens per second", speed):
        return
    median = EngFormatter(places=2)(np.nanmedian(speed))
    axes.plot(steps, speed, color=GREY, linewidth=0.6)
    axes.plot(steps, smoothed(speed), color=BLUE, linewidth=1.6, label=f"median {median} tok/s")
    axes.set_ylim(0, 1.6 * np.nanmax(speed))
    axes.yaxis.set_major_formatter(EngFormatter())
    at_most = "" if any("train/mfu" in record for record in records) else "at most "
    steps, mfu = series(records, "train/mfu_at_most" if at_most else "train/mfu")
    if np.any(mfu > 0):
        right = axes.twinx()
        right.plot(steps, smoothed(mfu), color=ORANGE, linewidth=1.6)
        axes.plot([], [], color=ORANGE, linewidth=1.6, label=f"MFU {at_most}{100 * np.nanmedian(mfu):.3g}%")  # one legend for both
        right.set_ylim(0, 1.15 * np.nanmax(mfu))
        right.set_ylabel("MFU, part of peak FLOP/s", fontsize=9)
        right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
        right.tick_params(labelsize=8.5, length=3)
        right.spines["top"].set_visible(False)
    finish_panel(axes)


def start_panel(axes: "Axes", title: str, unit: str, values: np.ndarray) -> bool:
    """Title, labels, grid and step axis; False, and a word in the panel, where no value is a number."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    if np.isnan(values).all():
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color=GREY)
        return False
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel(unit, fontsize=9)
    axes.tick_params(labelsize=8.5, length=3)
    axes.grid(color="#e6e9ed", linewidth=0.7)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return True


def finish_panel(axes: "Axes", values: np.ndarray | None = None) -> None:
    """The legend beside the title, where no curve runs. Values that more than double get a log scale: on a linear one the
    end of a run crowds at the foot."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

    axes.legend(loc="lower right", bbox_to_anchor=(1.01, 0.985), ncols=2, fontsize=8.5, frameon=False, borderaxespad=0.2)
    if values is not None and 0 < 2 * np.nanmin(values) < np.nanmax(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 6, 8)))
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylabel(axes.get_ylabel() + " (log scale)", fontsize=9)


def single_line(text: object) -> str:
    """Text on one line."""
    return " ".join(str(text).split())
