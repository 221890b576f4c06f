"""The runs of a series that have ended, and the size that fits a FLOP budget best. bench.scaling shows them."""
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import GPTConfig
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import base_dir
from nanochat.training.checkpoint import list_steps, read_meta, step_dir
from nanochat.training.records import read_metrics


class Run(NamedTuple):
    """A finished run: its FLOP budget (0: none was set), and what became of it."""

    depth: int
    budget: float
    parameters: int
    tokens: int
    flops: float
    bpb: float


def read_run(folder: Path) -> Run | None:
    """The run in a folder of checkpoints; None where it has not ended with a validation."""
    last = next(reversed(list_steps(folder)), None)
    meta: dict[str, Any] = read_meta(step_dir(folder, last)) if last is not None else {"num_iterations": -1}
    records = read_metrics(folder / "metrics.jsonl") if meta["num_iterations"] == last else []
    scores = [record["val/bpb"] for record in records if record["step"] == last and "val/bpb" in record]
    if not scores:
        return None
    with torch.device("meta"):
        model = GPT(GPTConfig(**meta["model_config"]))
    parameters, tokens = model.count_parameters("matrix", "head"), last * meta["total_batch_size"]
    budget, flops = max(meta["config"]["target_flops"], 0.0), float(tokens * model.estimate_flops())
    return Run(model.config.n_layer, budget, parameters, tokens, flops, scores[-1])


def read_series(series: str) -> list[Run]:
    """All finished runs whose tag begins with the series' name. UserError where there is none."""
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
    approach 2 of Hoffmann et al. 2022, arXiv:2203.15556. None for fewer than three sizes, and where it has no lowest
    point.
    """
    if len(set(sizes)) < 3:
        return None
    a, b, c = np.polyfit(np.log2(sizes), scores, 2)
    return (float(2 ** (-b / (2 * a))), float(c - b * b / (4 * a))) if a > 0 else None


def exponent(budgets: list[float], sizes: list[float]) -> float | None:
    """a of best size ∝ budget^a, by least squares in logarithms; None for fewer than two budgets."""
    return float(np.polyfit(np.log2(budgets), np.log2(sizes), 1)[0]) if len(set(budgets)) > 1 else None
