"""A run in one picture: loss, validation or reward, learning rate and throughput over its steps."""
import math
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure  # no pyplot, so no backend is chosen and nothing is kept open

from nanochat.runtime.files import write_aside
from nanochat.training.records import read_metrics

BLUE, ORANGE, GREY = "#1f5fa8", "#d9730d", "#9aa5b1"  # distinct also for colour-blind readers

# Title, unit, name in metrics.jsonl, scale. A linear scale would squeeze the end of a falling loss.
LOSS = "Training loss, step by step (the terminal shows it smoothed)", "nats per token", "train/loss", "log"
VALIDATION = "Validation", "bits per byte", "val/bpb", "log"
POLICY_LOSS = "Policy loss: only its gradient means something", "nats per token, by advantage", "train/loss", "linear"
REWARD = "Reward of the samples", "mean per step", "rl/reward", "linear"
RATE = "Learning-rate factor (lrm)", "times the initial rate", "train/lrm", "linear"
THROUGHPUT = "Throughput", "tokens per second", "train/tok_per_sec", "linear"


def plot_section(stage: str, metrics: Path, floor: float | None, folder: Path) -> str:
    """Draw a run's metrics into <stage>.png. Returns markdown that shows it, or says why there is none."""
    try:
        figure = metrics_figure(read_metrics(metrics), floor)
    except Exception as error:  # no file, or a damaged one: it costs a line, not the report
        return f"*No plot: {error}*"
    with write_aside(folder / f"{stage}.png") as aside:
        figure.savefig(aside, format="png", dpi=140)
    return f"![{stage}: loss, validation, learning rate and throughput over steps]({stage}.png)"


def metrics_figure(records: list[dict], floor: float | None) -> Figure:
    """Four panels. floor: a line beside the validation."""
    panels = [LOSS, VALIDATION, RATE, THROUGHPUT]
    if any("rl/reward" in record for record in records):  # reinforcement learning has no validation
        panels = [POLICY_LOSS, REWARD, RATE, THROUGHPUT]
    figure = Figure(figsize=(11, 6.6), layout="constrained")
    for axes, (title, unit, key, scale) in zip(figure.subplots(2, 2).flat, panels):
        points = [(record["step"], record[key]) for record in records if math.isfinite(record.get(key, math.nan))]
        steps, values = np.array(points, dtype=float).reshape(-1, 2).T
        axes.set(title=title, xlabel="step", ylabel=unit, yscale=scale)
        axes.grid(color="#e6e9ed")
        if scale == "log":  # plain numbers, as powers of ten alone could leave the axis without any
            axes.yaxis.set_major_formatter("{x:g}")
            if len(values) and values.max() < 10 * values.min():
                axes.yaxis.set_minor_formatter("{x:g}")
        # The mean over a fiftieth of the run around each step does not lag as a running mean would.
        reach = len(values) // 100
        if reach:
            axes.plot(steps, values, color=GREY, linewidth=0.6)
            window = np.ones(2 * reach + 1) / (2 * reach + 1)
            steps, values = steps[reach:-reach], np.convolve(values, window, "valid")
        axes.plot(steps, values, color=BLUE, marker="" if reach else "o")
        if key == "val/bpb" and floor is not None:
            axes.axhline(floor, color=ORANGE, linestyle="--", label=f"entropy floor {floor:.4g}")
            axes.legend()
    return figure
