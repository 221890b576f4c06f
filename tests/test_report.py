"""The report: which sections are in it, its summary table, its figures by the points they draw."""
import re
from datetime import datetime
from types import SimpleNamespace

import numpy as np
import pytest

from nanochat.runtime.errors import UserError
from nanochat.training import plots, run_report


def write_section(*section, **settings) -> None:
    """A section about the model d4 on the data set "world"."""
    run_report.write_section(*section, data="world", model_tag="d4", **settings)


def headings(markdown: str) -> list[str]:
    return re.findall(r"^## (.*)$", markdown, re.MULTILINE)


def test_summary_table_joins_the_results_of_all_sections():
    write_section("chat_eval_rl", "Chat", "", "rl", {"ARC": "n/a"})
    write_section("chat_eval_sft", "Chat", "Body.", "sft", {"ARC": 0.123456, "GSM8K": 0.0})
    write_section("base_eval", "Eval", "", "base", {"CORE | centered": 0.2, "bits per byte": np.float32(0.91237)})
    write_section("base_train", "Train", "", "base", {"parameters": 73_531_392, "bits per byte": 0.95})
    text = run_report.generate().read_text()
    table = """
|  | base | sft | rl |
| --- | ---: | ---: | ---: |
| parameters | 73,531,392 | - | - |
| bits per byte | 0.9124 | - | - |
| CORE \\| centered | 0.2 | - | - |
| ARC | - | 0.1235 | n/a |
| GSM8K | - | 0 | - |
"""
    assert table in text, "of bits per byte the later stage's"
    assert headings(text) == ["Summary", "Train", "Eval", "Chat", "Chat"] and "Body." in text
    assert "*No plot: " in text, "a log that cannot be read costs a line, not the report"


def test_a_report_is_about_one_model_and_its_data(monkeypatch):
    """Of two models and an imported one: the newest by what its sections say, or the one that is named."""
    made = iter(datetime(2026, 11, 28, 10, minute) for minute in (3, 2, 1, 0, 4))
    monkeypatch.setattr(run_report, "datetime", SimpleNamespace(now=lambda zone: next(made)))
    with pytest.raises(UserError):
        run_report.generate()
    for data, tag in (("sea", "d4"), ("land", "d8"), (None, "guest")):
        if data:
            run_report.write_section("tokenizer", "Tokenizer", f"Of {data}.", data=data)
        run_report.write_section("base_eval", "Eval", f"{tag} on {data}.", data=data, model_tag=tag)
    for named, tag, data in (("", "guest", None), ("d4", "d4", "sea")):
        text = run_report.generate(named).read_text()
        assert f"- Model: {tag} (trained on {data or 'unknown'})\n" in text
        assert re.findall(r"Of (\w+)\.", text) == ([data] if data else [])
        assert re.findall(r"(\w+) on (\w+)\.", text) == [(tag, str(data))]
    with pytest.raises(UserError, match="d44"):
        run_report.generate("d44")


def test_a_stage_that_starts_anew_removes_what_was_said_of_its_old_model():
    """Its own section and those of later stages; not those of stages before, nor of another model."""
    for stage in ("tokenizer", "mid_train", "chat_eval_mid", "chat_sft", "chat_rl"):
        write_section(stage, stage, "")
    run_report.remove_sections("chat_sft", "world", "d8")
    assert "chat_sft" in headings(run_report.generate().read_text())
    run_report.remove_sections("chat_sft", "world", "d4")
    assert headings(run_report.generate().read_text()) == ["tokenizer", "mid_train", "chat_eval_mid"]


def test_panels_draw_the_records():
    """Six steps and three validations. A loss of RL may be negative, so its scale is not a logarithm."""
    records = [{"step": step, "train/loss": 3.0 - step, "train/tok_per_sec": 100.0} for step in range(6)]
    records += [{"step": step, "val/bpb": 3.0 - step / 3, "val/floor": 0.8} for step in (0, 3, 6)]
    loss, validation, throughput, _ = plots.metrics_figure(records).axes
    assert loss.lines[0].get_xydata().tolist() == [[step, 3.0 - step] for step in range(6)]
    assert (loss.get_yscale(), validation.get_yscale()) == ("linear", "log")
    assert validation.lines[0].get_xydata().tolist() == [[0, 3.0], [3, 2.0], [6, 1.0]]
    assert set(validation.lines[1].get_ydata()) == {0.8}
    assert throughput.lines[0].get_ydata().tolist() == [100.0] * 6
