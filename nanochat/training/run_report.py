"""
The report of a run: the results of every stage, in one markdown file with plots.

    python -m scripts.report                   # of the newest model: report/report.md in the base folder
    python -m scripts.report --model_tag=d4    # of another one

A stage writes its section as it ends (`write_section`): into report/sections/DATA for a data set and its tokenizer, and
into report/sections/DATA/TAG for a model that was trained on it; `generate` puts the sections of one model together. A
new training run removes the sections about the model that it replaces (`remove_sections`).
"""
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nanochat.data.shard_reader import main_data
from nanochat.runtime.console import is_rank0
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import base_dir, write_text
from nanochat.runtime.tables import cell, markdown_table
from nanochat.training.records import SCRIPTS

# Sections come in this order: each model's evaluation after its training.
ORDER = ("data", "tokenizer", "base_train", "base_eval", "chat_eval_base", "mid_train", "chat_eval_mid", "chat_sft",
         "chat_eval_sft", "chat_rl", "chat_eval_rl")


def section_path(stage: str, data: str | None, model_tag: str) -> Path:
    """With several data sets, sections are in the first one's folder."""
    folder = main_data(data) if data else "unknown"
    return base_dir() / f"report/sections/{folder}/{model_tag}/{stage}.json"


def write_section(stage: str, title: str, body: str, model: str = "", results: dict[str, float | str] | None = None, *,
                  data: str | None, model_tag: str = "") -> None:
    """
    Keep a stage's section for the report; it replaces the stage's earlier one. Rank 0 only.

    stage: a name in ORDER.   body: markdown.   results: the column of `model` ("base", "mid", …) in the summary table.
    data: the data set it is about, or that its model was trained on; None if unknown (an imported model).
    """
    if is_rank0():
        section = {"stage": stage, "title": title, "body": body, "model": model, "results": results or {},
                   "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"}
        text = json.dumps(section, indent=1, default=float)  # numbers of numpy and torch as well
        write_text(section_path(stage, data, model_tag), text)


def remove_sections(stage: str, data: str | None, model_tag: str) -> None:
    """Rank 0: remove the sections of a training stage and of later ones, whose results come from another model now."""
    for later in ORDER[ORDER.index(stage) :]:
        section_path(later, data, model_tag).unlink(missing_ok=True)


def generate(model_tag: str = "") -> Path:
    """
    Write report.md and its figures from the sections of a model and the data set it was trained on; returns its path.
    model_tag: empty for the model whose section is the newest. UserError if there is none.
    """
    from nanochat.training.plots import plot_section  # matplotlib is slow to import, and sections do not need it

    folder = base_dir() / "report"
    chosen = sorted(folder.glob(f"sections/*/{model_tag or '*'}/*.json"))
    if not chosen:
        raise UserError(f"no sections of model_tag={model_tag} in {folder}/sections; a stage writes one as it ends")
    # Each section has its date. A copied file's own time says nothing.
    model = max(chosen, key=lambda path: json.loads(path.read_bytes())["made"]).parent
    files = {path.stem: path for path in [*model.parent.glob("*.json"), *model.glob("*.json")]}
    sections = [json.loads(files[stage].read_bytes()) for stage in ORDER if stage in files]
    parts = ["# nanochat report", f"- Model: {model.name} (trained on {model.parent.name})", summary(sections)]
    for section in sections:
        parts += [f"## {section['title']}", f"*{section['made']}*", section["body"].strip()]
        if section["stage"] in SCRIPTS.values():
            metrics = base_dir() / f"{section['model']}_checkpoints/{model.name}/metrics.jsonl"
            parts.append(plot_section(section["stage"], metrics, folder))
    write_text(folder / "report.md", "\n\n".join(filter(None, parts)) + "\n")
    return folder / "report.md"


def summary(sections: list[dict]) -> str:
    """
    All results in one table, with its heading; "" if there are none. Columns and rows come in the order of the
    sections; of two results for one cell the later section's is shown.
    """
    columns: dict[str, dict] = {}  # {model: {row: value}}
    rows: dict[str, None] = {}  # a set in order
    for section in sections:
        if results := section["results"]:
            columns.setdefault(section["model"], {}).update(results)
            rows |= dict.fromkeys(results)
    if not rows:
        return ""
    lines = [[cell(row), *(cell(column.get(row, "-")) for column in columns.values())] for row in rows]
    return "## Summary\n\n" + markdown_table(["", *columns], lines)


def settings_table(config: dict[str, Any]) -> str:
    """A run's settings as markdown, folded away."""
    rows = [(name, f"`{cell(repr(value))}`") for name, value in config.items()]
    table = markdown_table(["setting", "value"], rows, words=(0, 1))
    return f"<details><summary>{len(config)} settings</summary>\n\n{table}\n\n</details>"
