"""
The report of a run: what every stage found, in one markdown file with plots.

    python -m scripts.report                   # of the newest model: report/report.md in the base folder
    python -m scripts.report --model_tag=d4    # of another one

A stage writes its section as it ends (`write_section`): into report/sections/DATA for a data set and its tokenizer, and
into report/sections/DATA/TAG for a model that was trained on it; `generate` puts the sections of one model together. A
metrics file that cannot be read costs the report one line, never the report. A section names its checkpoint: where a
newer one has replaced it, the section is left out.
"""
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from nanochat.runtime.console import is_rank0
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import base_dir, write_text
from nanochat.runtime.tables import cell, markdown_table
from nanochat.training.records import describe_checkpoint, newest_step

# Sections come in this order.
STAGES = ("data", "tokenizer", "base_train", "base_eval", "mid_train", "chat_sft", "chat_rl",
          "chat_eval_base", "chat_eval_mid", "chat_eval_sft", "chat_eval_rl")


# ---- Sections

def write_section(stage: str, title: str, body: str, results: dict[str, dict[str, float | str]] | None = None,
                  metrics: Path | None = None, floor: float | None = None, *,
                  data: str | None, checkpoint: Path | None = None) -> None:
    """
    Keep a stage's section for the report, in place of an earlier one of that stage. Rank 0 only.

    stage: also the name of its files, such as "base_train".   body: markdown.
    results: for the summary table, {column: {row: value}}; a column is the model that was measured, such as "base".
    metrics: the run's metrics.jsonl, to plot.   floor: entropy of the corpus in bits per byte, drawn beside validation.
    data: the data set it is about, or that its model was trained on; None where that is unknown (an imported model).
    checkpoint: of the model that it is about; None for a data set and its tokenizer.
    """
    if not is_rank0():
        return
    section = {"title": title, "body": body, "results": results or {}, "metrics": None, "floor": floor,
               "made": provenance(), "checkpoint": None}
    if metrics:
        section["metrics"] = os.path.relpath(metrics, base_dir())  # so that the base folder may move
    model_tag = ""
    if checkpoint:
        section["checkpoint"] = describe_checkpoint(checkpoint)
        model_tag = checkpoint.parent.name
    text = json.dumps(section, indent=1, default=float)  # numbers of numpy and torch as well
    write_text(base_dir() / "report" / "sections" / (data or "unknown") / model_tag / f"{stage}.json", text)


def is_current(section: dict[str, Any]) -> bool:
    """Whether a section is not about a checkpoint which a newer one has replaced."""
    about = section["checkpoint"]
    newest = newest_step(base_dir() / Path(about.split()[0]).parent) if about else None
    return newest is None or describe_checkpoint(newest) == about


# ---- The report

def generate(model_tag: str = "") -> Path:
    """
    Write report.md and its figures from the sections of a model and the data set it was trained on; returns its path.
    model_tag: empty for the model whose section is the newest. UserError where there is none.
    """
    from nanochat.training.plots import plot_section  # imports numpy and matplotlib; sections need neither

    folder = base_dir() / "report"
    of_models = sorted((folder / "sections").glob("*/*/*.json"), key=lambda path: path.stat().st_mtime_ns)
    tags = {path.parent.name for path in of_models}
    chosen = [path.parent for path in of_models if model_tag in ("", path.parent.name)]
    if not chosen:
        known = ", ".join(sorted(tags)) or "none; a stage writes one as it ends"
        raise UserError(f"no sections of model_tag={model_tag} in {folder}; there are those of {known}")
    model = chosen[-1]
    files = {path.stem: path for path in [*model.parent.glob("*.json"), *model.glob("*.json")]}
    tables, chapters = [], []
    for stage in STAGES:
        if stage not in files:
            continue
        section = json.loads(files[stage].read_bytes())
        if not is_current(section):  # its results are not this model's, and its log may be another run's by now
            continue
        chapters += [f"## {section['title']}", f"*{section['made']}*", section["body"].strip()]
        tables.append(section["results"])
        if section["metrics"]:
            chapters.append(plot_section(stage, base_dir() / section["metrics"], section["floor"], folder))
    parts = ["# nanochat report", f"- Model: {model.name} (trained on {model.parent.name})", summary(tables), *chapters]
    write_text(folder / "report.md", "\n\n".join(part for part in parts if part) + "\n")
    return folder / "report.md"


def summary(tables: Iterable[dict[str, dict[str, float | str]]]) -> str:
    """
    The results of all sections in one table, with its heading; "" where there are none. Columns and rows come in the
    order of the sections; of two results for one cell the later section's is shown.
    """
    rows: dict[str, dict[str, float | str]] = {}  # row: column: value
    columns: dict[str, None] = {}  # a set that keeps its order
    for table in tables:
        for column, values in table.items():
            for row, value in values.items():
                rows.setdefault(row, {})[column] = value
                columns[column] = None
    if not rows:
        return ""
    lines = []
    for row, values in rows.items():
        lines.append([cell(row), *(cell(values.get(column, "-")) for column in columns)])
    return "## Summary\n\n" + markdown_table(["", *map(cell, columns)], lines)


def settings_table(config: dict[str, Any]) -> str:
    """A run's settings as markdown, folded away."""
    rows = [(name, f"`{cell(repr(value))}`") for name, value in config.items()]
    table = markdown_table(["setting", "value"], rows, words=(0, 1))
    return f"<details><summary>{len(config)} settings</summary>\n\n{table}\n\n</details>"


# ---- Where and with what

def provenance() -> str:
    """Date, machine and commit of this moment."""
    machine = f"{cpu_model()}, {os.cpu_count()} cores"
    torch = sys.modules.get("torch")  # a stage that has not imported it has used no GPU
    if torch and torch.cuda.is_available():
        machine += f", {torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
    return f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}; {machine}; {commit()}"


def cpu_model() -> str:
    cpus = Path("/proc/cpuinfo")  # of Linux alone
    found = re.search(r"model name\s*: (.+)", cpus.read_text()) if cpus.exists() else None
    return found[1] if found else platform.machine()


def commit() -> str:
    """The short hash of the commit of this code, with "-dirty" if files differ from it; "none" without one."""
    # No locks: a report must not get in the way of a commit.
    git = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return "none"  # git is not installed
    return done.stdout.strip() or "none"
