"""The finished runs of a series, and the best size for a FLOP budget. bench.scaling shows them."""
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nanochat.model.gpt_config import GPTConfig
from nanochat.plan.memory import shaped
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import base_dir
from nanochat.training.checkpoint import read_meta
from nanochat.training.records import newest_step, read_metrics, step_dir


class Run(NamedTuple):
    """A finished run: its FLOP budget (0: none was set), sizes and result."""

    depth: int
    budget: float
    parameters: int
    tokens: int
    flops: float
    bpb: float


def read_run(folder: Path) -> Run | None:
    """The run in a folder of checkpoints; None if it has not ended with a validation."""
    checkpoint = newest_step(folder)
    if checkpoint is None:
        return None
    meta = read_meta(checkpoint)
    steps = meta["num_iterations"]
    scores = [record["val/bpb"] for record in read_metrics(folder / "metrics.jsonl")
              if record["step"] == steps and "val/bpb" in record]
    if checkpoint != step_dir(folder, steps) or not scores:
        return None
    model = shaped(GPTConfig(**meta["model_config"]))
    tokens = steps * meta["total_batch_size"]
    return Run(model.config.n_layer, max(meta["config"]["target_flops"], 0.0),
               model.count_parameters("matrix", "head"), tokens, tokens * model.estimate_flops(), scores[-1])


def read_series(series: str) -> list[Run]:
    """All finished runs whose tag begins with the series' name. UserError if there is none."""
    found = []
    for folder in sorted((base_dir() / "base_checkpoints").glob(f"{series}-*")):
        if run := read_run(folder):
            found.append(run)
        else:
            print(f"{folder.name}: not finished, left out")
    if not found:
        raise UserError(f"series={series}: no finished run {series}-… in {base_dir() / 'base_checkpoints'}; "
                        "runs/scaling_laws.sh makes them")
    return sorted(found, key=lambda run: (run.budget, run.depth))


def fit(sizes: list[int], scores: list[float]) -> tuple[float, float] | None:
    """
    (parameters, bits per byte) of the lowest point of the least-squares parabola in the logarithm of the parameters:
    approach 2 of Hoffmann et al. 2022, arXiv:2203.15556. None for fewer than three sizes, or if it has no lowest
    point.
    """
    if len(set(sizes)) < 3:
        return None
    a, b, c = np.polyfit(np.log2(sizes), scores, 2)
    return (2 ** (-b / (2 * a)), c - b * b / (4 * a)) if a > 0 else None


def exponent(budgets: list[float], sizes: list[float]) -> float | None:
    """a of best size ∝ budget^a, by least squares in logarithms; None for fewer than two budgets."""
    return np.polyfit(np.log2(budgets), np.log2(sizes), 1)[0] if len(set(budgets)) > 1 else None
