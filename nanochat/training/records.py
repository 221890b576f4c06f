"""Reads the files that runs leave. Imports no torch: a report does not need it."""
import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

from nanochat.runtime.files import base_dir

# The training stages, in the order of a run, and the script of each.
SCRIPTS = {"base": "base_train", "mid": "mid_train", "sft": "chat_sft", "rl": "chat_rl"}
STAGES = tuple(SCRIPTS)
MODEL_FILE = "model.safetensors"
# In the base folder: when each step of the speedrun began and ended; how many seconds scripts/plan.py expects.
STEPS_LOG, ESTIMATE = "once/steps.jsonl", "once/estimate.json"


def read_metrics(path: Path, key: str = "step") -> list[dict]:
    """
    The records of a metrics.jsonl in order of steps. A line that a kill cut short, or that is damaged, is left out: no
    training depends on it. key: what each record has.
    """
    records = []
    # Each line once: after a full disk one may have been written twice.
    for line in dict.fromkeys(path.read_text(encoding="utf-8", errors="replace").splitlines()):
        # The resumed run wrote the step of a broken line again, on a line of its own.
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict) and key in record]


# ---- Checkpoints


def step_dir(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def list_steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint folder, rising."""
    numbers = [path.name.removeprefix("step_") for path in folder.glob("step_*")]
    # As numbers: 1000000 is newer than 999999.
    return sorted(int(number) for number in numbers if number.isdecimal())


def newest_step(folder: Path) -> Path | None:
    """The newest checkpoint in a folder, whether or not it is valid."""
    steps = list_steps(folder)
    return step_dir(folder, steps[-1]) if steps else None


def read_meta(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "meta.json").read_bytes())


def stage_of(checkpoint: Path) -> str:
    """The training stage that saved this checkpoint: "base", "mid", "sft" or "rl"."""
    return checkpoint.parts[-3].removesuffix("_checkpoints")


def unfinished(checkpoint: Path) -> str:
    """ "step 9 of 300" if the checkpoint's run has not reached its end, as after a stop; else ""."""
    meta = read_meta(checkpoint)
    steps = meta.get("num_iterations", 0)  # an import has none
    return f"step {meta['step']} of {steps}" if meta["step"] < steps else ""


def describe_checkpoint(checkpoint: Path) -> str:
    """Name of a checkpoint and sum of its weights: "sft_checkpoints/d4/step_000100 (0123456789abcdef)"."""
    sums = json.loads((checkpoint / "manifest.json").read_bytes())
    return f"{'/'.join(checkpoint.parts[-3:])} ({sums[MODEL_FILE][:16]})"


def latest_checkpoint(stages: Iterable[str], model_tag: str | None, only_finished: bool = False) -> Path | None:
    """
    The checkpoint that was saved last by these stages, of one model or of any (model_tag None), by the time in its
    meta.json: a copy's files have new times. Version 0.1.0 kept none: of its checkpoints the furthest stage's is the
    last. only_finished: leave out models whose run is not at its end.
    """
    found = []
    for number, stage in enumerate(stages):
        for folder in base_dir().glob(f"{stage}_checkpoints/*"):
            steps = list_steps(folder) if model_tag in (None, folder.name) else []
            for step in reversed(steps):
                # If it is damaged, the one before it counts.
                with contextlib.suppress(OSError, ValueError, KeyError):
                    path = step_dir(folder, step)
                    if not only_finished or not unfinished(path):
                        found.append((read_meta(path).get("saved", 0.0), number, path))
                    break
    return max(found)[2] if found else None


def duration(seconds: float) -> str:
    """In a suitable unit: "40s", "3.5m", "12.0h", "9.5 days", "10.9 years"."""
    if seconds < 90:
        return f"{seconds:.0f}s"
    if seconds < 5400:
        return f"{seconds / 60:.1f}m"
    if seconds < 2 * 86400:
        return f"{seconds / 3600:.1f}h"
    days = seconds / 86400
    return f"{days:.1f} days" if days < 730 else f"{days / 365.25:.1f} years"
