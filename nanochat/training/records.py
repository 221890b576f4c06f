"""Reads the files that runs leave. Imports no torch: a report does not need it."""
import contextlib
import json
from pathlib import Path

from nanochat.runtime.files import base_dir

MODEL_FILE = "model.safetensors"
# In the base folder: when each step of the speedrun began and ended; how many seconds scripts/choose_size.py expects.
STEPS_LOG, ESTIMATE = "once/steps.jsonl", "once/estimate.json"


def read_metrics(path: Path) -> list[dict]:
    """The records of a metrics.jsonl in order of steps. A line that a kill cut short is left out."""
    records = []
    # Each line once: after a full disk a line may have been written twice.
    for line in dict.fromkeys(path.read_text(encoding="utf-8").splitlines()):
        # The resumed run wrote the step of a broken line again, on a line of its own.
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


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


def unfinished(checkpoint: Path) -> str:
    """ "step 9 of 300" if the checkpoint's run has not reached its end, as after a stop; else ""."""
    meta = json.loads((checkpoint / "meta.json").read_bytes())
    steps = meta.get("num_iterations", 0)  # an import has none
    return f"step {meta['step']} of {steps}" if meta["step"] < steps else ""


def describe_checkpoint(checkpoint: Path) -> str:
    """Name of a checkpoint and sum of its weights: "sft_checkpoints/d4/step_000100 (0123456789abcdef)"."""
    sums = json.loads((checkpoint / "manifest.json").read_bytes())
    return f"{'/'.join(checkpoint.parts[-3:])} ({sums[MODEL_FILE][:16]})"


def models_trained_with(fingerprint: str) -> str:
    """The folders of the models whose checkpoints name the data set of a fingerprint; "" for none."""
    metas = base_dir().glob("*_checkpoints/*/step_*/meta.json")
    return ", ".join(sorted({str(meta.parent.parent) for meta in metas if fingerprint in meta.read_text()}))


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
