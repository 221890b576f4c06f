"""
Training runs of the base folder, as the page shows them (`--watch`). Files are only read: the measurements beside the
checkpoints, again when they have grown; the report's sections; the steps of the speedrun.
"""
import contextlib
import functools
import json
import math
import time
from pathlib import Path
from statistics import fmean, median

from nanochat.runtime.files import base_dir
from nanochat.serve.protocol import Json
from nanochat.training.records import ESTIMATE, STAGES, STEPS_LOG, read_metrics

CURVES = ("train/loss", "train/lrm", "train/tok_per_sec", "val/bpb", "rl/reward", "eval/pass@1")
POINTS = 512            # most points of a curve
MOST_RUNS = 24          # the newest ones
Curve = list[tuple[float, float]]   # (step, value)


@functools.lru_cache(64)
def read_stage(path: Path, size: int, changed: int) -> Json:
    """A training stage by its metrics.jsonl. size, changed: the file's, for the cache."""
    last: dict[str, float] = {}     # the newest number for each name
    curves: dict[str, Curve] = {}
    samples: dict[float, object] = {}
    durations = []
    for record in read_metrics(path):
        step = record["step"]
        last |= {name: value for name, value in record.items() if isinstance(value, int | float)}
        for name in CURVES:
            if name in record:
                curves.setdefault(name, []).append((step, record[name]))
        if "sample" in record:
            samples[step] = record["sample"]
        if "train/dt" in record:
            durations.append(record["train/dt"])
            last["trained"] = step + 1
    step, steps = last.get("trained", 0), last.get("train/steps", 0)
    # The median: the first step compiles, and others may have waited for a save.
    left = median(durations[-50:]) * max(0, steps - step) if durations and steps else None
    return {
        "step": step, "steps": steps, "elapsed": sum(durations), "left": left, "last": last,
        "done": 0 < steps <= step, "curves": {name: thinned(points) for name, points in curves.items()},
        "samples": sorted(samples.items()),
    }


def thinned(points: Curve) -> Curve:
    """At most POINTS points, means of neighbours; values keep five digits, as no screen shows more."""
    width = math.ceil(len(points) / POINTS)
    groups = [zip(*points[start : start + width]) for start in range(0, len(points), width)]
    return [(fmean(steps), float(f"{fmean(values):.5g}")) for steps, values in groups]


def state() -> Json:
    """The runs, the newest first; the speedrun's steps, and how many seconds they are expected to take."""
    estimate = base_dir() / ESTIMATE
    return {"runs": runs(), "steps": speedrun_steps(),
            "expected": json.loads(estimate.read_bytes()) if estimate.is_file() else {}}


def runs() -> list[Json]:
    """
    A run is a model's tag, with its stages. By their newest records' times, UTC seconds: a copied file has another
    time. Version 0.1.0 kept none.
    """
    found: dict[str, Json] = {}
    now = time.time()
    for name in STAGES:
        for path in base_dir().glob(f"{name}_checkpoints/*/metrics.jsonl"):
            # It may be gone by now, belong to another user, or be damaged.
            with contextlib.suppress(OSError, ValueError):
                stat = path.stat()
                stage = read_stage(path, stat.st_size, stat.st_mtime_ns)
                age = max(0.0, now - stage["last"].get("time", 0.0))
                found.setdefault(path.parent.name, {})[name] = stage | {"age": age}
    by_age = sorted(found.items(), key=lambda run: min(stage["age"] for stage in run[1].values()))
    return [{"tag": tag, "stages": stages, "results": results_of(tag)} for tag, stages in by_age[:MOST_RUNS]]


def results_of(tag: str) -> dict[str, Json]:
    """{row: {stage: value}} of the evaluations in the report's sections about a model."""
    rows: dict[str, Json] = {}
    for path in sorted((base_dir() / "report" / "sections").glob("*/*/*_eval*.json")):
        if path.parent.name == tag:
            section = json.loads(path.read_bytes())
            for row, value in section["results"].items():
                rows.setdefault(row, {})[section["model"]] = value
    return rows


def speedrun_steps() -> list[Json]:
    """The speedrun's steps as scripts/once.py has recorded them; a repeated step counts at its last place."""
    steps: dict[str, Json] = {}
    log = base_dir() / STEPS_LOG
    for step in read_metrics(log, "name") if log.is_file() else []:
        steps.pop(step["name"], None)
        steps[step["name"]] = step
    return list(steps.values())
