"""
Training runs of the base folder, as the page shows them (`--watch`). Files are only read: the measurements beside the
checkpoints, again when they have grown; the report's sections; the steps of the speedrun.
"""
import contextlib
import functools
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from pydantic_core import from_json, to_json

from nanochat.runtime.files import base_dir
from nanochat.serve.protocol import Json
from nanochat.serve.served_model import ServedModel
from nanochat.training.records import ESTIMATE, STAGES, STEPS_LOG

CURVES = ("train/loss", "train/lrm", "train/tok_per_sec", "val/bpb", "rl/reward", "eval/pass@1")
FRESH = 1.0             # seconds for which a state is kept: all viewers get the same
POINTS = 512            # most points of a curve
MOST_RUNS = 24          # the newest ones
MOST_SAMPLES = 64       # samples of a stage


def read_object(data: bytes) -> Json:
    """A JSON object; {} for anything else, such as half a line or one with NaN."""
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def read_bytes(path: Path) -> bytes:
    """b"" if there is no such file."""
    return path.read_bytes() if path.is_file() else b""


def numbers_of(record: Json) -> dict[str, float]:
    """1e999 becomes infinity, and integers may be larger than any float: these are left out."""
    return {name: value for name, value in record.items() if isinstance(value, int | float) and abs(value) < 1e300}


@functools.lru_cache(64)
def read_stage(path: Path, size: int, changed: int) -> Json:
    """A training stage by its metrics.jsonl. size, changed: the file's, for the cache."""
    last: dict[str, float] = {}     # the newest number for each name
    curves: dict[str, list[tuple[float, float]]] = {}
    samples: dict[float, object] = {}
    durations = []
    for line in path.read_bytes().split(b"\n"):
        record = read_object(line)
        numbers = numbers_of(record)
        if "step" not in numbers:
            continue
        last |= numbers
        step = numbers["step"]
        for name in CURVES:
            if name in numbers:
                curves.setdefault(name, []).append((step, numbers[name]))
        if "sample" in record:
            samples[step] = record["sample"]
        if "train/dt" in numbers:
            durations.append(numbers["train/dt"])
            last["trained"] = step + 1
    step, steps = last.get("trained", 0), last.get("train/steps", 0)
    # The median: the first step compiles, and others may have waited for a save.
    left = median(durations[-50:]) * max(0, steps - step) if durations and steps else None
    first, *others = sorted(samples.items()) or [None]
    return {
        "step": step, "steps": steps, "elapsed": sum(durations), "left": left, "last": last,
        "done": 0 < steps <= step, "curves": {name: thinned(points) for name, points in curves.items()},
        # The first sample stays, for comparison.
        "samples": [first, *others[1 - MOST_SAMPLES :]] if first else [],
    }


def thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most POINTS points, means of neighbours; values keep five digits, as no screen shows more."""
    width = math.ceil(len(points) / POINTS)
    groups = [zip(*points[start : start + width]) for start in range(0, len(points), width)]
    return [(fmean(steps), float(f"{fmean(values):.5g}")) for steps, values in groups]


class Runs:
    """All runs of the base folder. A run is a model's tag, with its stages."""

    def __init__(self, models: Sequence[ServedModel] = ()) -> None:
        self.models = models
        self.lock = threading.Lock()
        self.read_at = -FRESH

    def state(self) -> bytes:
        """JSON: "runs", the newest first; "steps" of the speedrun, "expected": their seconds; "models" to talk to."""
        with self.lock:
            if time.monotonic() - self.read_at >= FRESH:
                state = {"runs": runs(), "steps": speedrun_steps(), "models": [model.id for model in self.models],
                         "expected": read_object(read_bytes(base_dir() / ESTIMATE))}
                self.kept = to_json(state, inf_nan_mode="null")
                self.read_at = time.monotonic()
            return self.kept


def runs() -> list[Json]:
    """By their newest records' times, UTC seconds: a copied file has another time. Version 0.1.0 kept none."""
    found: dict[str, Json] = {}
    now = time.time()
    for name in STAGES:
        for path in base_dir().glob(f"{name}_checkpoints/*/metrics.jsonl"):
            # It may be gone by now, or belong to another user.
            with contextlib.suppress(OSError):
                if not path.is_file():
                    continue
                stat = path.stat()
                stage = read_stage(path, stat.st_size, stat.st_mtime_ns)
                age = max(0.0, now - stage["last"].get("time", 0.0))
                found.setdefault(path.parent.name, {})[name] = stage | {"age": age}
    by_age = sorted(found.items(), key=lambda run: min(stage["age"] for stage in run[1].values()))
    return [{"tag": tag, "stages": stages, "results": results_of(tag)} for tag, stages in by_age[:MOST_RUNS]]


def results_of(tag: str) -> dict[str, Json]:
    """{row: {stage: value}} of the evaluations in the report's sections about a model."""
    rows: dict[str, Json] = {}
    for name in ("base_eval", *(f"chat_eval_{stage}" for stage in STAGES)):
        for path in (base_dir() / "report" / "sections").glob(f"*/*/{name}.json"):
            section = read_object(read_bytes(path)) if path.parent.name == tag else {}
            results, stage = section.get("results"), section.get("model")
            if isinstance(results, dict) and isinstance(stage, str):
                for row, value in results.items():
                    rows.setdefault(row, {})[stage] = value
    return rows


def speedrun_steps() -> list[Json]:
    """The speedrun's steps as scripts/once.py has recorded them; a repeated step counts at its last place."""
    steps: dict[str, Json] = {}
    for line in read_bytes(base_dir() / STEPS_LOG).split(b"\n"):
        if step := read_object(line):
            name = str(step.get("name"))
            steps.pop(name, None)
            steps[name] = step
    return list(steps.values())
