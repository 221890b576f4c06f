"""What a run has logged, read again. Without torch, because a report is made of nothing else."""
import json
from pathlib import Path

from nanochat.files import base_dir


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


def models_trained_with(fingerprint: str) -> str:
    """The models whose checkpoints name the data set or the tokenizer of a fingerprint: "base d4, sft d4", or ""."""
    metas = [path for path in base_dir().glob("*_checkpoints/*/step_*/meta.json") if fingerprint in path.read_text()]
    return ", ".join(sorted({f"{path.parts[-4].removesuffix('_checkpoints')} {path.parts[-3]}" for path in metas}))


def duration(seconds: float) -> str:
    """In words of the size of the time: "40s", "3.5m", "12.0h"."""
    if seconds < 90:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.1f}m" if seconds < 5400 else f"{seconds / 3600:.1f}h"
