"""
The report of a run: what every stage found, in one markdown file with plots.

    python -m scripts.report                   # of the newest model: report/report.md in the base folder
    python -m scripts.report --model_tag=d4    # of another one

A stage writes its section as it ends (`write_section`): into report/sections/DATA for a data set and its tokenizer, and
into report/sections/DATA/TAG for a model that was trained on it; `generate` puts those of one model together. A section
or a metrics file that cannot be read costs the report one line, never the report. A section names its checkpoint: where
that, or what it was made from, has been replaced since, the section is marked, and left out of the summary.
"""
import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nanochat.runtime.errors import UserError, did_you_mean, is_rank0
from nanochat.runtime.files import base_dir, write_text
from nanochat.runtime.tables import cell, markdown_table
from nanochat.training.records import describe_checkpoint, duration, newest_step, replaced_origin

COLUMNS = ("base", "mid", "sft", "rl")  # of the summary; then all others
# Sections come in this order, then all others.
STAGES = ("data", "tokenizer", "base_train", "base_eval", "mid_train", "chat_sft", "chat_rl",
          *(f"chat_eval_{column}" for column in COLUMNS))
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA's, also under Windows, and AMD's
UNKNOWN = "unknown"  # in place of a data set's name


# ---- Sections

def write_section(stage: str, title: str, body: str, results: dict[str, dict[str, float | str]] | None = None,
                  metrics: Path | None = None, floor: float | None = None, *,
                  data: str | None, model_tag: str = "", checkpoint: Path | None = None) -> None:
    """
    Keep a stage's section for the report, in place of an earlier one of that stage. Rank 0 only.

    stage: also the name of its files, such as "base_train".   body: markdown.
    results: for the summary table, {column: {row: value}}; a column is the model that was measured, such as "base".
    metrics: the run's metrics.jsonl, to plot.   floor: entropy of the corpus in bits per byte, drawn beside validation.
    data: the data set it is about, or that its model was trained on; None where that is unknown (an imported model).
    checkpoint: of the model that it is about.
    """
    assert re.fullmatch(r"\w[\w-]*", stage, re.ASCII), f"{stage!r} cannot name a file"
    if not is_rank0():
        return
    relative = metrics and os.path.relpath(metrics, base_dir())  # so that the base folder may move
    section = {"title": title, "body": body, "results": results or {}, "metrics": relative, "floor": floor,
               "made": provenance(), "checkpoint": checkpoint and describe_checkpoint(checkpoint)}
    text = json.dumps(section, indent=1, default=float)  # numbers of numpy and torch as well
    write_text(base_dir() / "report" / "sections" / (data or UNKNOWN) / model_tag / f"{stage}.json", text)


def read_section(path: Path) -> dict[str, Any]:
    """A section as it was written. Raises ValueError or OSError when the file is not one."""
    section = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(section, dict) or not {"title", "body", "results", "metrics", "floor", "made"} <= section.keys():
        raise ValueError("it is not a section")
    return section


def older_model(section: dict[str, Any]) -> str:
    """In words, that a section is about a model which has been replaced; "" where it has not, or nothing is known."""
    about = section.get("checkpoint")  # not in sections of earlier versions
    newest = about and newest_step(base_dir() / Path(about.split()[0]).parent)
    if newest is None:
        return ""
    try:
        now = describe_checkpoint(newest)
    except (OSError, ValueError):  # damaged
        return ""
    if now != about:
        return f"of an older model, {about}; the newest is {now}"
    origin = replaced_origin(newest)
    return f"of a model made from {origin}, which has been replaced" if origin else ""


def sorted_sections(paths: Iterable[Path]) -> list[Path]:
    """Files of sections in the order of the stages, then by name."""
    return sorted(paths, key=lambda path: (place(path.stem, STAGES), path.stem))


# ---- The report

def generate(model_tag: str = "", data: str = "") -> Path:
    """
    Write report.md and its figures from the sections of a model and the data set it was trained on; returns its path.
    model_tag, data: empty for the newest; before there is a model, a data set is reported on. UserError when there is
    nothing.
    """
    from nanochat.training.plots import plot_section  # imports numpy and matplotlib; sections need neither

    folder = base_dir() / "report"
    models = newest_last((folder / "sections").glob("*/*/*.json"))
    chosen = [m for m in models if model_tag in ("", m.name) and data in ("", m.parent.name)][-1:]
    folders = [chosen[0].parent, *chosen] if chosen else newest_last((folder / "sections").glob("*/*.json"))[-1:]
    runs = [] if chosen else newest_last(base_dir().glob(f"*_checkpoints/{model_tag or '*'}/metrics.jsonl"))
    if not folders or not chosen and (models or model_tag):
        raise nothing_to_report(model_tag, data, models, runs)
    header = provenance()
    if chosen:
        header["Model"] = named(chosen[0])
    if others := [named(model) for model in models if model not in chosen]:
        header["Other models here"] = ", ".join(others) + "; --model_tag=… reports on another"
    if runs:
        header["Runs that have not ended"] = ", ".join(f"{run}/metrics.jsonl" for run in runs)
    tables, chapters, seconds = [], [], 0.0
    for path in sorted_sections(path for one in folders for path in one.glob("*.json")):
        try:
            section = read_section(path)
        except (OSError, ValueError) as error:
            chapters.append(f"## {path.stem}\n\n*Left out: {path.relative_to(folder)} is damaged "
                            f"({single_line(error)}); run its stage again.*")
            continue
        older, made = older_model(section), made_line(section["made"], header)
        if older:
            made = f"{made}; **{older}: not in the summary**"
        else:
            tables.append(section["results"])
        chapters += [f"## {single_line(section['title'])}", f"*{made}*", section["body"].strip()]
        if section["metrics"] is not None and not older:  # its log may be another run's by now
            plot, plotted = plot_section(path.stem, base_dir() / section["metrics"], section["floor"], folder)
            chapters.append(plot)
            seconds += plotted
    if seconds:
        header["Training"] = f"{duration(seconds)} in optimizer steps, over all sections"
    lines = "\n".join(f"- {name}: {value}" for name, value in header.items())
    parts = ["# nanochat report", lines, summary(tables), *chapters]
    write_text(folder / "report.md", "\n\n".join(part for part in parts if part) + "\n")
    return folder / "report.md"


def nothing_to_report(model_tag: str, data: str, models: list[Path], runs: list[Path]) -> UserError:
    """What there is instead: the log of a run that has not ended, other models, or nothing yet."""
    asked = f" of model_tag={model_tag}" * bool(model_tag) + f", data={data}" * bool(data)
    if runs:
        return UserError(f"no stage{asked} has ended yet, and a stage writes its section as it ends; "
                         f"until then its steps are in {runs[-1]}/metrics.jsonl")
    if not models:
        return UserError(f"no sections{asked} in {base_dir() / 'report'}; a stage writes one as it ends, "
                         "such as python -m scripts.base_train")
    known = ", ".join(map(named, models)) + did_you_mean(model_tag, {model.name for model in models})
    return UserError(f"no sections{asked} in {base_dir() / 'report'}; there are those of {known}")


def newest_last(paths: Iterable[Path]) -> list[Path]:
    """The folders of these files, by the time of the newest file in each."""
    newest_first = sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.parent), reverse=True)
    return list(dict.fromkeys(path.parent for path in newest_first))[::-1]


def named(model: Path) -> str:
    """A model in words, by the folder of its sections."""
    return f"{model.name} (trained on {model.parent.name})" if model.parent.name != UNKNOWN else model.name


def place(name: str, order: tuple[str, ...]) -> int:
    """Where a name stands in an order that ends with everything else."""
    return order.index(name) if name in order else len(order)


def summary(tables: Iterable[dict[str, dict[str, float | str]]]) -> str:
    """The results of all sections in one table, with its heading; "" where there are none. The later section wins."""
    rows: dict[str, dict[str, float | str]] = {}  # row: column: value
    for column, values in (item for table in tables for item in table.items()):
        for row, value in values.items():
            rows.setdefault(row, {})[column] = value
    columns = dict.fromkeys(column for values in rows.values() for column in values)
    columns = sorted(columns, key=lambda column: place(column, COLUMNS))
    lines = [[cell(row), *(cell(values.get(column, "-")) for column in columns)] for row, values in rows.items()]
    return "## Summary\n\n" + markdown_table(["", *map(cell, columns)], lines) if rows else ""


def single_line(text: object) -> str:
    """Text on one line."""
    return " ".join(str(text).split())


def settings_table(config: dict[str, Any]) -> str:
    """A run's settings as markdown, folded away."""
    table = markdown_table(["setting", "value"], [(name, f"`{cell(repr(config[name]))}`") for name in config], (0, 1))
    return f"<details><summary>{len(config)} settings</summary>\n\n{table}\n\n</details>"


# ---- Where and with what

def gpus() -> list[str]:
    """The GPUs of this machine, such as "8 × NVIDIA H100 (80 GiB)"."""
    if "torch" not in sys.modules and not any(map(os.path.exists, GPU_DRIVERS)):
        return []
    import torch  # here: it takes seconds, and all else of a report needs none of it

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.cuda.get_device_properties(index) for index in range(count)]
    found = Counter(f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in devices)
    return [f"{count} × {name}" for name, count in found.items()]


def provenance() -> dict[str, str]:
    """Date, machine, software and commit of this moment."""
    machine = [*gpus(), f"{cpu_model()}, {os.cpu_count()} cores"]
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        machine.append(f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB RAM")
    return {
        "Date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "Machine": ", ".join(machine),
        "Software": f"{platform.system()} {platform.release()}, "
                    f"Python {platform.python_version()}, torch {version('torch')}",
        "Commit": commit(Path(__file__).resolve().parents[2]),
    }


def made_line(made: dict[str, str], here: dict[str, str]) -> str:
    """When a section was made; and its machine, software and commit where they were not those of the report."""
    names = [name for name in ("Machine", "Software", "Commit") if made.get(name, here[name]) != here[name]]
    return "; ".join([made.get("Date", "undated"), *(f"{name.lower()}: {single_line(made[name])}" for name in names)])


def cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""  # not Linux
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def commit(folder: Path) -> str:
    """The short hash of the commit a folder is at; says if files differ from it. "none" outside a repository."""
    if not (folder / ".git").exists():
        return "none"  # also for a copy without history inside somebody else's repository
    # No locks: looking must not get in the way of a commit.
    git = ["git", "--no-optional-locks", "-C", str(folder), "status", "--porcelain=v2", "--branch"]
    try:
        status = subprocess.run(git, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return "none"  # no git, or one that refuses the folder
    changed = any(not line.startswith("#") for line in status)
    return status[0].removeprefix("# branch.oid ")[:9] + " with uncommitted changes" * changed
