"""
What training runs leave in the base folder, as the page shows it (`--watch`). Files are only read: the measurements
beside the checkpoints, each byte once; the report's sections; the steps of the speedrun.

A file may be half-written, damaged, or huge; what is read and kept has limits. Of one folder's state all viewers
get the same, read at most once a second.
"""
import json
import statistics
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from nanochat.runtime.files import base_dir
from nanochat.serve.protocol import Json
from nanochat.training.records import STEPS_LOG, newest_step

STAGES = ("base", "mid", "sft", "rl")
CURVES = ("train/loss", "train/lrm", "train/tok_per_sec", "val/bpb", "rl/reward", "eval/pass@1")
FRESH = 1.0             # seconds for which a state is kept
POINTS = 256            # of a curve; there may be twice as many until its neighbours are merged
MOST_RUNS = 24          # the newest ones
MOST_SAMPLES = 64       # of a stage
MOST_TEXT = 2_000       # characters of a text
MOST_ROWS = 64          # of a run's table
READ_BYTES = 2**22      # of a file at once; the rest comes with the next state
LOG_BYTES = 2**26       # of a measurements file: of a longer one the end
SECTION_BYTES = 2**20   # a longer section is not shown


def is_number(value: Any) -> bool:
    """A number that JSON has. Python also reads NaN, Infinity, and integers that no float holds."""
    return isinstance(value, int | float) and -1e300 < value < 1e300


def read_json(data: bytes) -> Json:
    """An object; {} for anything else."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_end(path: Path, size: int) -> bytes:
    """The last bytes of a file; b"" if it is missing or something else than a file."""
    if not path.is_file():
        return b""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read(size)


class Curve:
    """A measurement over the steps. Each point is the mean of `width` neighbours, so that a long run costs no more."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []     # (step, value)
        self.waiting: list[tuple[float, float]] = []    # fewer than `width`
        self.width = 1

    def add(self, step: int, value: float) -> None:
        self.waiting.append((step, value))
        if len(self.waiting) == self.width:
            self.points.append(mean(self.waiting))
            self.waiting = []
        if len(self.points) == 2 * POINTS:
            self.points = [mean(self.points[i : i + 2]) for i in range(0, 2 * POINTS, 2)]
            self.width *= 2

    def shown(self) -> list[tuple[float, float]]:
        return self.points + ([mean(self.waiting)] if self.waiting else [])


def mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    steps, values = zip(*points)
    return float(f"{statistics.fmean(steps):.6g}"), float(f"{statistics.fmean(values):.5g}")


class Stage:
    """A training stage of a run: its metrics.jsonl so far."""

    def __init__(self, path: Path):
        self.path = path
        self.inode = -1
        self.begin()

    def begin(self, offset: int = 0) -> None:
        self.offset, self.rest = offset, b""
        self.curves = {name: Curve() for name in CURVES}
        self.samples: dict[int, list] = {}      # step -> [question, answer] pairs
        self.last: Json = {}                    # the newest value of each name
        self.durations: deque[float] = deque(maxlen=50)
        self.elapsed = 0.0

    def read(self) -> None:
        with open(self.path, "rb") as file:
            stat = self.path.stat()
            # A run that goes on from a checkpoint writes the file anew.
            if stat.st_ino != self.inode or stat.st_size < self.offset:
                self.begin(max(0, stat.st_size - LOG_BYTES))
                self.inode = stat.st_ino
            file.seek(self.offset)
            data = file.read(READ_BYTES)
        self.changed = stat.st_mtime
        self.offset += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > READ_BYTES:
            self.rest = b""
        for line in lines:
            self.add(read_json(line))

    def add(self, record: Json) -> None:
        step = record.get("step")
        if not isinstance(step, int) or not is_number(step):
            return
        numbers = {name: value for name, value in record.items() if is_number(value)}
        for name in CURVES:
            if name in numbers:
                self.curves[name].add(step, numbers[name])
        if texts := pairs(record.get("sample")):
            self.samples[step] = texts
            if len(self.samples) > MOST_SAMPLES:
                # The first one stays, to compare with.
                del self.samples[sorted(self.samples)[1]]
        if "train/dt" in numbers:
            self.last["trained"] = step + 1
            self.elapsed += numbers["train/dt"]
            self.durations.append(numbers["train/dt"])
        for name in (*CURVES, "train/steps", "val/floor"):
            if name in numbers:
                self.last[name] = numbers[name]

    def state(self) -> Json:
        done, steps = self.last.get("trained", 0), self.last.get("train/steps")
        if steps is None and (newest := newest_step(self.path.parent)):     # a run of an earlier version
            steps = read_json(read_end(newest / "meta.json", SECTION_BYTES)).get("num_iterations")
        steps = steps if is_number(steps) else 0
        # The median: the first step compiles, and others may have waited for a save.
        left = statistics.median(self.durations) * max(0, steps - done) if self.durations and steps else None
        return {
            "step": done, "steps": steps, "elapsed": self.elapsed, "left": left, "last": self.last,
            "age": max(0.0, time.time() - self.changed), "done": 0 < steps <= done,
            "curves": {name: curve.shown() for name, curve in self.curves.items() if curve.points or curve.waiting},
            "samples": sorted(self.samples.items()),
        }


def pairs(value: Any) -> list[list[str]]:
    """[question, answer] pairs of a record; [] for anything else."""
    if not isinstance(value, list):
        return []
    found = [pair for pair in value[:16] if isinstance(pair, list) and len(pair) == 2]
    return [[str(text)[:MOST_TEXT] for text in pair] for pair in found]


class Runs:
    """All runs of the base folder. A run is a model's tag, with its stages."""

    def __init__(self) -> None:
        self.stages: dict[Path, Stage] = {}
        self.lock = threading.Lock()
        self.kept: Json = {}
        self.read_at = -FRESH

    def state(self) -> Json:
        """{"runs": the newest first, "steps": of the speedrun}."""
        with self.lock:
            if time.monotonic() - self.read_at >= FRESH:
                self.kept = {"runs": self.runs(), "steps": speedrun_steps()}
                self.read_at = time.monotonic()
            return self.kept

    def runs(self) -> list[Json]:
        base = base_dir().resolve()
        found: dict[str, dict[str, Stage]] = {}
        for stage in STAGES:
            for path in (base / f"{stage}_checkpoints").glob("*/metrics.jsonl"):
                # A link may lead anywhere.
                if path.is_file() and path.resolve().is_relative_to(base):
                    found.setdefault(path.parent.name, {})[stage] = self.stages.setdefault(path, Stage(path))
        # Stages that have been removed are forgotten.
        kept = {stage.path for stages in found.values() for stage in stages.values()}
        self.stages = {path: stage for path, stage in self.stages.items() if path in kept}
        newest = {tag: max(stage.path.stat().st_mtime for stage in stages.values()) for tag, stages in found.items()}
        shown = []
        for tag in sorted(newest, key=lambda tag: -newest[tag])[:MOST_RUNS]:
            for stage in found[tag].values():
                stage.read()
            states = {name: stage.state() for name, stage in found[tag].items()}
            shown.append({"tag": tag, "stages": states, "results": results_of(tag)})
        return shown


def results_of(tag: str) -> dict[str, Json]:
    """{row: {stage: value}} of the evaluations in the report's sections about a model, the table as it fills."""
    rows: dict[str, Json] = {}
    base = base_dir().resolve()
    sections = base / "report" / "sections"
    for name in ("base_eval", *(f"chat_eval_{stage}" for stage in STAGES)):
        for path in sections.glob(f"*/*/{name}.json"):
            inside = path.parent.name == tag and path.resolve().is_relative_to(base)
            if not inside or not path.is_file() or path.stat().st_size > SECTION_BYTES:
                continue
            results = read_json(path.read_bytes()).get("results")
            for stage, values in results.items() if isinstance(results, dict) else ():
                for row, value in values.items() if isinstance(values, dict) else ():
                    if (is_number(value) or isinstance(value, str)) and (row in rows or len(rows) < MOST_ROWS):
                        rows.setdefault(row[:200], {})[stage] = value[:200] if isinstance(value, str) else value
    return rows


def speedrun_steps() -> list[Json]:
    """The steps of the speedrun as scripts/once.py has noted them: name, when it began and ended, its exit code."""
    steps: dict[str, Json] = {}
    for line in read_end(base_dir() / STEPS_LOG, READ_BYTES // 64).split(b"\n"):
        record = read_json(line)
        name, began = record.get("name"), record.get("began")
        if isinstance(name, str) and is_number(began):
            # A repeated step moves to the end.
            steps.pop(name, None)
            kept = {key: record[key] for key in ("ended", "code") if is_number(record.get(key))}
            steps[name] = {"name": name[:200], "began": began, **kept}
    return list(steps.values())[-MOST_ROWS:]
