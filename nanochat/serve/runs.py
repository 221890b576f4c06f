"""
Training runs of the base folder, as the page shows them (`--watch`). Files are only read: the measurements beside the
checkpoints, each byte once; the report's sections; the steps of the speedrun.

A file may be half-written, damaged, or huge, so limits apply to what is read and kept. All viewers get the same state,
read at most once a second.
"""
import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pydantic_core import from_json, to_json

from nanochat.runtime.files import base_dir
from nanochat.serve.protocol import Json
from nanochat.serve.served_model import ServedModel
from nanochat.training.records import ESTIMATE, STAGES, STEPS_LOG

CURVES = ("train/loss", "train/lrm", "train/tok_per_sec", "val/bpb", "rl/reward", "eval/pass@1")
FRESH = 1.0             # seconds for which a state is kept
POINTS = 512            # most points of a curve
MOST_RUNS = 24          # the newest ones
MOST_SAMPLES = 64       # samples of a stage
MOST_TEXT = 16_000      # bytes of a sample's JSON
READ_BYTES = 2**22      # of a log read at once; the rest comes with the next state
LOG_BYTES = 2**26       # of a longer log only the end is read
FILE_BYTES = 2**18      # of other files only the end is read, so a larger section is not shown


def read_object(data: bytes) -> Json:
    """A JSON object; {} for anything else, including half an object or one with NaN."""
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def read_end(path: Path) -> bytes:
    """The last bytes of a file; b"" if there is none, or a link leads out of the base folder."""
    if not path.is_file() or not path.resolve().is_relative_to(base_dir().resolve()):
        return b""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - FILE_BYTES))
        return file.read(FILE_BYTES)


class Curve:
    """A measurement over the steps. Each point is the mean of `width` neighbours, so a long run costs no more."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []     # (step, value)
        self.waiting: list[tuple[float, float]] = []    # fewer than `width`
        self.width = 1

    def add(self, step: float, value: float) -> None:
        self.waiting.append((step, value))
        if len(self.waiting) == self.width:
            self.points.append(mean(self.waiting))
            self.waiting = []
        if len(self.points) == POINTS:
            self.points = [mean(self.points[i : i + 2]) for i in range(0, POINTS, 2)]
            self.width *= 2

    def shown(self) -> list[tuple[float, float]]:
        return self.points + [mean(self.waiting)] if self.waiting else self.points


def mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Values keep five digits; no screen shows more."""
    steps, values = zip(*points)
    return fmean(steps), float(f"{fmean(values):.5g}")


class Stage:
    """A training stage of a run: its metrics.jsonl so far."""

    def __init__(self, path: Path):
        self.path = path
        self.inode = -1

    def begin(self, offset: int) -> None:
        self.offset, self.rest = offset, b""
        self.curves = {name: Curve() for name in CURVES}
        self.samples: dict[float, Any] = {}     # step -> [question, answer] pairs
        self.last: Json = {}                    # the newest number for each name
        self.durations: deque[float] = deque(maxlen=50)
        self.step: float = 0
        self.elapsed = 0.0

    def read(self) -> None:
        with open(self.path, "rb") as file:
            stat = self.path.stat()
            # A run resumed from a checkpoint rewrites the file.
            if stat.st_ino != self.inode or stat.st_size < self.offset:
                self.begin(max(0, stat.st_size - LOG_BYTES))
            file.seek(self.offset)
            data = file.read(READ_BYTES)
        self.inode = stat.st_ino
        self.offset += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        # A longer line does not come from a log.
        self.rest = self.rest[:READ_BYTES]
        for line in lines:
            self.add(read_object(line), len(line))

    def add(self, record: Json, size: int) -> None:
        # 1e999 becomes infinity, and integers may be larger than any float.
        numbers = {name: n for name, n in record.items() if isinstance(n, int | float) and abs(n) < 1e300}
        step = numbers.pop("step", None)
        if step is None:
            return
        self.last |= numbers
        for name in CURVES:
            if name in numbers:
                self.curves[name].add(step, numbers[name])
        if "sample" in record and size < MOST_TEXT:
            self.samples[step] = record["sample"]
            if len(self.samples) > MOST_SAMPLES:
                # The first sample stays, for comparison.
                del self.samples[sorted(self.samples)[1]]
        if "train/dt" in numbers:
            self.step = step + 1
            self.elapsed += numbers["train/dt"]
            self.durations.append(numbers["train/dt"])

    def changed(self) -> float:
        """UTC seconds of the newest record, as a copied file has another time; 0 if unknown, as in version 0.1.0."""
        return self.last.get("time", 0.0)

    def state(self, now: float) -> Json:
        steps = self.last.get("train/steps", 0)
        # The median: the first step compiles, and others may have waited for a save.
        left = median(self.durations) * max(0, steps - self.step) if self.durations and steps else None
        return {
            "step": self.step, "steps": steps, "elapsed": self.elapsed, "left": left, "last": self.last,
            "age": max(0.0, now - self.changed()), "done": 0 < steps <= self.step,
            "curves": {name: points for name, curve in self.curves.items() if (points := curve.shown())},
            "samples": sorted(self.samples.items()),
        }


class Runs:
    """All runs of the base folder. A run is a model's tag, with its stages."""

    def __init__(self, models: Sequence[ServedModel] = ()) -> None:
        self.models = models
        self.stages: dict[Path, Stage] = {}
        self.lock = threading.Lock()
        self.read_at = -FRESH

    def state(self) -> bytes:
        """JSON: "runs", the newest first; "steps" of the speedrun, "expected": their seconds; "models" to talk to."""
        with self.lock:
            if time.monotonic() - self.read_at >= FRESH:
                state = {"runs": self.runs(), "steps": speedrun_steps(), "models": [model.id for model in self.models],
                         "expected": read_object(read_end(base_dir() / ESTIMATE))}
                self.kept = to_json(state, inf_nan_mode="null")
                self.read_at = time.monotonic()
            return self.kept

    def runs(self) -> list[Json]:
        base = base_dir().resolve()
        changed: dict[str, float] = {}
        found: dict[Path, Stage] = {}
        now = time.time()
        for path in base.glob("*_checkpoints/*/metrics.jsonl"):
            # A link may lead anywhere.
            if path.is_file() and path.resolve().is_relative_to(base):
                tag = path.parent.name
                stage = self.stages.get(path) or Stage(path)
                # It may be gone by now, or belong to another user.
                with contextlib.suppress(OSError):
                    stage.read()
                    found[path] = stage
                    changed[tag] = max(changed.get(tag, 0.0), stage.changed())
        self.stages = found
        shown = []
        for tag in sorted(changed, key=lambda tag: -changed[tag])[:MOST_RUNS]:
            states = {}
            for name in STAGES:
                if stage := found.get(base / f"{name}_checkpoints" / tag / "metrics.jsonl"):
                    states[name] = stage.state(now)
            shown.append({"tag": tag, "stages": states, "results": results_of(tag)})
        return shown


def results_of(tag: str) -> dict[str, Json]:
    """{row: {stage: value}} of the evaluations in the report's sections about a model."""
    rows: dict[str, Json] = {}
    for name in ("base_eval", *(f"chat_eval_{stage}" for stage in STAGES)):
        for path in (base_dir() / "report" / "sections").glob(f"*/*/{name}.json"):
            section = read_object(read_end(path)) if path.parent.name == tag else {}
            results, stage = section.get("results"), section.get("model")
            if isinstance(results, dict) and isinstance(stage, str):
                for row, value in results.items():
                    rows.setdefault(row, {})[stage] = value
    return rows


def speedrun_steps() -> list[Json]:
    """The speedrun's steps as scripts/once.py has recorded them; a repeated step counts at its last place."""
    steps: dict[str, Json] = {}
    for line in read_end(base_dir() / STEPS_LOG).split(b"\n"):
        if step := read_object(line):
            name = str(step.get("name"))
            steps.pop(name, None)
            steps[name] = step
    return list(steps.values())
