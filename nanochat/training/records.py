"""What runs have left, read again. Without torch, because a report is made of nothing else."""
import json
import re
from pathlib import Path

from nanochat.runtime.files import base_dir

MODEL_FILE = "model.safetensors"


def read_metrics(path: Path) -> list[dict]:
    """
    The records of a metrics.jsonl in order of steps. After a resume steps repeat: the later record of a step and kind
    supersedes the earlier. A last line that a kill cut short is left out.
    """
    records: dict[tuple[int, str], dict] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut short by a kill; the resumed run wrote that step again on a line of its own
        kind = next((name.partition("/")[0] for name in record if name != "step"), "")
        records[record["step"], kind] = record
    return [records[key] for key in sorted(records)]


# ---- Checkpoints


def step_dir(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def list_steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint folder, rising."""
    names = (re.fullmatch(r"step_(\d+)", path.name) for path in folder.glob("step_*"))
    return sorted(int(match[1]) for match in names if match)  # as numbers: step_1000000 is newer than step_999999


def newest_step(folder: Path) -> Path | None:
    """The newest checkpoint in a folder, whether or not it is valid."""
    steps = list_steps(folder)
    return step_dir(folder, steps[-1]) if steps else None


def describe_checkpoint(checkpoint: Path) -> str:
    """Name of a checkpoint and sum of its weights: "sft_checkpoints/d4/step_000100 (0123456789abcdef)"."""
    sums = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    return f"{'/'.join(checkpoint.parts[-3:])} ({sums[MODEL_FILE][:16]})"


def replaced_origin(checkpoint: Path) -> str:
    """
    The checkpoint of an earlier stage that this one was made from, directly or not, where a run of that stage has made
    another one since. "" where there is none, and where nothing is known of it.
    """
    try:
        meta = json.loads((checkpoint / "meta.json").read_text(encoding="utf-8"))
        origin, step = meta["data_state"]["origin"], meta["config"]["source_step"]
        folder = checkpoint.parents[2] / origin.split("/")[0] / checkpoint.parent.name
        now = newest_step(folder)
        if now is None:
            return ""  # removed, to save space
        if step is not None:
            now = step_dir(folder, step)
        same = now.exists() and describe_checkpoint(now).split()[1] == origin.split()[1]  # it may have been renamed
        return replaced_origin(now) if same else origin
    except (OSError, ValueError, LookupError, TypeError):  # a base model, an imported one, a damaged one
        return ""


def models_trained_with(fingerprint: str) -> str:
    """The models whose checkpoints name the data set or the tokenizer of a fingerprint: "base d4, sft d4", or ""."""
    metas = [path for path in base_dir().glob("*_checkpoints/*/step_*/meta.json") if fingerprint in path.read_text()]
    return ", ".join(sorted({f"{path.parts[-4].removesuffix('_checkpoints')} {path.parts[-3]}" for path in metas}))


def duration(seconds: float) -> str:
    """In words of the size of the time: "40s", "3.5m", "12.0h"."""
    if seconds < 90:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.1f}m" if seconds < 5400 else f"{seconds / 3600:.1f}h"
