"""
The report of a run: what every stage found, in one markdown file with plots.

    python -m scripts.report                   # of the model that was worked on last: report/report.md in the base folder
    python -m scripts.report --model_tag=d4    # of another one

A stage leaves its section as it ends (`write_section`), in report/sections/DATA for a data set and its tokenizer, and in
report/sections/DATA/TAG for a model that was trained on it; `generate` gathers those of one model. A section or a metrics
file that cannot be read costs the report one line, never the report.
"""
import html
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from nanochat.distributed import is_rank0
from nanochat.errors import UserError, did_you_mean
from nanochat.files import base_dir, write_text
from nanochat.metrics import duration
from nanochat.plots import plot_section, single_line

STAGES = ("data", "tokenizer", "base_train", "base_eval", "mid_train", "chat_sft", "chat_rl", "chat_eval")  # then the rest
COLUMNS = ("base", "mid", "sft", "rl")  # of the summary; then the rest
UNKNOWN = "unknown"  # in place of a data set's name


# ---- Sections

def write_section(stage: str, title: str, body: str, results: dict[str, dict[str, float | str]] | None = None,
                  metrics: Path | None = None, floor: float | None = None, *, data: str | None, model_tag: str = "") -> None:
    """
    Keep a stage's section for the report, in place of an earlier one of that stage. Rank 0 only.

    stage: also the name of its files, such as "base_train".   body: markdown.
    data: the data set it is about, or that its model was trained on; None where nobody knows, as of an imported model.
    results: for the summary table, {column: {row: value}}; a column is the model that was measured, such as "base".
    metrics: the run's metrics.jsonl, to plot.   floor: entropy of the corpus in bits per byte, drawn beside validation.
    """
    assert re.fullmatch(r"\w[\w-]*", stage, re.ASCII), f"{stage!r} cannot name a file"
    if not is_rank0():
        return
    if metrics is not None:  # relative where it lies in the base folder, so that the whole folder may move
        metrics, base = Path(metrics).resolve(), base_dir().resolve()
        metrics = metrics.relative_to(base) if metrics.is_relative_to(base) else metrics
    section = {
        "title": title,
        "body": body,
        "results": {column: dict(rows) for column, rows in (results or {}).items()},
        "metrics": None if metrics is None else str(metrics),
        "floor": None if floor is None else float(floor),
        "made": provenance(),
    }
    text = json.dumps(section, indent=1, default=float)  # numbers of numpy and torch as well
    write_text(base_dir() / "report" / "sections" / (data or UNKNOWN) / model_tag / f"{stage}.json", text)


def read_section(path: Path) -> dict[str, Any]:
    """A section as it was written. Raises ValueError or OSError when the file is not one."""
    section = json.loads(path.read_text(encoding="utf-8"))
    kinds = {"title": str, "body": str, "results": dict, "metrics": str | None, "floor": float | int | None, "made": dict}
    if not isinstance(section, dict) or not all(name in section and isinstance(section[name], kinds[name]) for name in kinds):
        raise ValueError("it is not a section")
    for rows in section["results"].values():
        if not isinstance(rows, dict) or not all(isinstance(value, str | int | float) for value in rows.values()):
            raise ValueError("its results are not a table")
    return section


# ---- The report

def generate(model_tag: str = "", data: str = "") -> Path:
    """
    Write report.md and its figures from the sections of a model and the data set it was trained on; returns its path.
    model_tag, data: empty for the newest; before there is a model, a data set is reported on. UserError when there is nothing.
    """
    folder = base_dir() / "report"
    models = newest_last((folder / "sections").glob("*/*/*.json"))
    chosen = [model for model in models if model_tag in ("", model.name) and data in ("", model.parent.name)][-1:]
    if not chosen and (models or model_tag):
        known = f"there are those of {', '.join(map(named, models)) or 'no model'}{did_you_mean(model_tag, {model.name for model in models})}"
        raise UserError(f"no sections of model_tag={model_tag}{f', data={data}' if data else ''} in {folder}; {known}")
    folders = [chosen[0].parent, *chosen] if chosen else newest_last((folder / "sections").glob("*/*.json"))[-1:]
    paths = sorted((path for one in folders for path in one.glob("*.json")), key=lambda path: (place(path.stem, STAGES), path.stem))
    if not paths:
        raise UserError(f"{folder} has no sections to report; a stage leaves one as it ends, such as python -m scripts.base_train")
    here = provenance() | {"Model": named(model) for model in chosen}
    if others := [named(model) for model in models if model not in chosen]:
        here["Other models here"] = f"{', '.join(others)}; `python -m scripts.report --model_tag=…` reports on another"
    tables, chapters, seconds = [], [], 0.0
    for path in paths:
        try:
            section = read_section(path)
        except (OSError, ValueError) as error:
            chapters.append(f"## {path.stem}\n\n*Left out: {path.relative_to(folder)} is damaged ({single_line(error)}); run its stage again.*")
            continue
        tables.append(section["results"])
        chapter = [f"## {single_line(section['title'])}", f"*{made_line(section['made'], here)}*", section["body"].strip()]
        if section["metrics"] is not None:
            plot, plotted_seconds = plot_section(path.stem, base_dir() / section["metrics"], section["floor"], folder)
            chapter.append(plot)
            seconds += plotted_seconds
        chapters.append("\n\n".join(filter(None, chapter)))
    if seconds:
        here["Training"] = f"{duration(seconds)} in optimizer steps, over all sections"
    header = "\n".join(f"- {name}: {value}" for name, value in here.items())
    write_text(folder / "report.md", "\n\n".join(["# nanochat report", header, *summary(tables), *chapters]) + "\n")
    return folder / "report.md"


def newest_last(sections: Iterable[Path]) -> list[Path]:
    """The folders of these sections, by the time of the newest section in each."""
    times: dict[Path, int] = {}
    for path in sections:
        times[path.parent] = max(times.get(path.parent, 0), path.stat().st_mtime_ns)
    return sorted(times, key=lambda folder: (times[folder], folder))


def named(model: Path) -> str:
    """A model in words, by the folder of its sections."""
    return f"{model.name} (trained on {model.parent.name})" if model.parent.name != UNKNOWN else model.name


def place(name: str, order: tuple[str, ...]) -> int:
    """Where a name stands in an order that ends with everything else."""
    return order.index(name) if name in order else len(order)


def summary(tables: Iterable[dict[str, dict[str, float | str]]]) -> list[str]:
    """The results of all sections in one table, heading first; nothing where there are none. The later section wins."""
    cells: dict[str, dict[str, float | str]] = {}  # row: column: value
    for column, rows in (item for table in tables for item in table.items()):
        for row, value in rows.items():
            cells.setdefault(row, {})[column] = value
    columns = dict.fromkeys(column for values in cells.values() for column in values)
    ordered = sorted(columns, key=lambda column: place(column, COLUMNS))
    lines = [["", *map(cell, ordered)], ["---", *["---:"] * len(ordered)]]
    lines += [[cell(row), *(cell(values.get(column, "-")) for column in ordered)] for row, values in cells.items()]
    return ["## Summary", "\n".join(f"| {' | '.join(line)} |" for line in lines)] if cells else []


def cell(value: float | int | str) -> str:
    """A value as a table shows it: four significant digits of a float, and no exponent where digits can be read."""
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{float(f'{value:.4g}'):,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"
    return single_line(value).replace("|", "\\|")


def settings_table(config: dict[str, Any], defaults: dict[str, Any] | None = None) -> str:
    """
    A run's settings as markdown, folded away. With defaults, the line that stays visible names those that differ,
    and the table shows what they would have been.
    """
    changed = {name: config[name] for name in config if defaults and name in defaults and config[name] != defaults[name]}
    headline = f"{len(config)} settings"
    if defaults is not None:
        headline += ": " + (", ".join(f"{name}={value}" for name, value in changed.items()) or "all as they come")
    columns = ["setting", "value"] + ["default"] * (defaults is not None)
    lines = [columns, ["---"] * len(columns)]
    for name, value in config.items():
        default = [code(defaults[name]) if name in changed else ""] if defaults is not None else []
        lines.append([cell(name), code(value), *default])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"<details><summary>{html.escape(single_line(headline))}</summary>\n\n{table}\n\n</details>"


def code(value: Any) -> str:
    """A setting's value as code in a table; longer backticks around those that it contains."""
    text = cell(repr(value))
    return f"`` {text} ``" if "`" in text else f"`{text}`"


# ---- Where and with what

def provenance() -> dict[str, str]:
    """Date, machine, software and commit of this moment."""
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = [f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in gpus]
    machine = [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)] + [f"{cpu_model()}, {os.cpu_count()} cores"]
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        machine.append(f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB RAM")
    return {
        "Date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "Machine": ", ".join(machine),
        "Software": f"{platform.system()} {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}",
        "Commit": commit(Path(__file__).resolve().parent.parent),
    }


def made_line(made: dict[str, str], here: dict[str, str]) -> str:
    """When a section was made; and its machine, software and commit where they were not those of the report."""
    other = [f"{name.lower()}: {made[name]}" for name in ("Machine", "Software", "Commit") if made.get(name, here[name]) != here[name]]
    return single_line("; ".join([str(made.get("Date", "undated")), *other]))


def cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None  # not Linux
    return found[1] if found else platform.processor() or platform.machine()


def commit(folder: Path) -> str:
    """The short hash of the commit a folder is at, "none" where it is no repository's root; says if files differ from it."""
    git = ["git", "--no-optional-locks", "-C", str(folder)]  # looking must not get in the way of someone's commit
    try:
        root, short, status = (
            subprocess.run([*git, *arguments], capture_output=True, text=True, check=True, timeout=20).stdout.strip()
            for arguments in (["rev-parse", "--show-toplevel"], ["rev-parse", "--short", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.SubprocessError):
        return "none"
    if Path(root).resolve() != folder:
        return "none"  # a copy without history inside somebody's repository
    return short + (" with uncommitted changes" if status else "")


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]], words: Sequence[int] = (0,)) -> str:
    """A Markdown table: the columns of these indices to the left, all others, which are numbers, to the right."""
    rules = ["---" if i in words else "---:" for i in range(len(columns))]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [columns, rules, *rows])
