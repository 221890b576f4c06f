"""A run in one picture: loss, validation or reward, learning rate and throughput over its steps."""
import math
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure  # no pyplot, so no backend is chosen and nothing is kept open

from nanochat.runtime.files import write_aside
from nanochat.training.records import read_metrics

BLUE, ORANGE, GREY = "#1f5fa8", "#d9730d", "#9aa5b1"  # distinct also for colour-blind readers
# Title, unit, name in metrics.jsonl. A run has a panel for the numbers it logs: of RL, rewards instead of validations.
PANELS = [
    ("Training loss (of RL only its gradient means something)", "nats per token", "train/loss"),
    ("Validation", "bits per byte", "val/bpb"),
    ("Reward of the samples", "mean per step", "rl/reward"),
    ("Learning-rate factor (lrm)", "times the initial rate", "train/lrm"),
    ("Throughput", "tokens per second", "train/tok_per_sec"),
]


def plot_section(stage: str, metrics: Path, folder: Path) -> str:
    """Draw a run's metrics into <stage>.png. Returns markdown that shows it, or says why there is none."""
    try:
        figure = metrics_figure(read_metrics(metrics))
    except Exception as error:  # no file, or a damaged one: it costs a line, not the report
        return f"*No plot: {error}*"
    with write_aside(folder / f"{stage}.png") as aside:
        figure.savefig(aside, format="png", dpi=140)
    return f"![{stage}: loss, validation, learning rate and throughput over steps]({stage}.png)"


def metrics_figure(records: list[dict]) -> Figure:
    figure = Figure(figsize=(11, 6.6), layout="constrained")
    panels = [panel for panel in PANELS if any(panel[2] in record for record in records)]
    for axes, (title, unit, key) in zip(figure.subplots(2, 2).flat, panels):
        points = [(record["step"], record[key]) for record in records if math.isfinite(record.get(key, math.nan))]
        steps, values = np.array(points, float).T
        axes.set(title=title, xlabel="step", ylabel=unit)
        axes.grid(color="#e6e9ed")
        # A linear scale would squeeze the end of a falling loss. Plain numbers, as powers of ten alone could leave the
        # axis without any.
        if key in ("train/loss", "val/bpb") and values.min() > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            if values.max() < 10 * values.min():
                axes.yaxis.set_minor_formatter("{x:g}")
        # The mean over a fiftieth of the run around each step does not lag as a running mean would.
        reach = len(values) // 100
        if reach:
            axes.plot(steps, values, color=GREY, linewidth=0.6)
            steps = steps[reach:-reach]
            values = np.lib.stride_tricks.sliding_window_view(values, 2 * reach + 1).mean(axis=1)
        axes.plot(steps, values, color=BLUE, marker="" if reach else "o")
        floors = [record["val/floor"] for record in records if "val/floor" in record]
        if key == "val/bpb" and floors:
            axes.axhline(floors[0], color=ORANGE, linestyle="--", label=f"entropy floor {floors[0]:.4g}")
            axes.legend()
    return figure
