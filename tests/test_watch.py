"""The view of training runs: what is read of a base folder, and the page in a browser beside a run that trains."""
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPO, make_sums
from test_base_train import TINY
from test_ui import ALPHABET, CHROMIUM, Visit, browser, serving, wait_until, write_model  # noqa: F401

from nanochat.serve.runs import state
from nanochat.training.run_report import write_section
from scripts.once import once


def write_run(base: Path, stage: str, tag: str, records: list, end: str = "\n") -> Path:
    path = base / f"{stage}_checkpoints" / tag / "metrics.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in records) + end)
    return path


def record(step: int, **values) -> dict:
    return {"step": step, "train/steps": 1000, "train/dt": 0.5, "train/loss": 8 / (1 + step), **values}


def test_a_log_is_read_as_it_grows_and_again_when_it_is_written_anew(base_folder):
    """Half a line counts once it is whole; a resumed run replaces the file; what is left is told by the median."""
    half = json.dumps(record(0))
    path = write_run(base_folder, "base", "d1", [{"step": 0, "val/bpb": 3.5, "val/floor": 0.5}, half[:20]], end="")
    [run] = state()["runs"]
    assert run["tag"] == "d1" and run["stages"]["base"]["curves"] == {"val/bpb": [(0, 3.5)]}
    with open(path, "a") as file:
        lines = half[20:], json.dumps(record(1, **{"train/dt": 100.0})), json.dumps(record(2)), ""
        file.write("\n".join(lines))
    stage = state()["runs"][0]["stages"]["base"]
    assert stage["curves"]["train/loss"] == [(0, 8), (1, 4), (2, 2.6667)] and stage["elapsed"] == 101
    assert (stage["step"], stage["steps"], stage["left"], stage["done"]) == (3, 1000, 0.5 * 997, False)
    assert stage["last"]["val/floor"] == 0.5
    aside = path.with_name("aside")
    aside.write_text(json.dumps(record(0)) + "\n")
    aside.replace(path)
    assert state()["runs"][0]["stages"]["base"]["curves"]["train/loss"] == [(0, 8)]
    path.unlink()
    assert state()["runs"] == []


def test_a_damaged_log_and_results_of_other_models_are_left_out(base_folder):
    write_run(base_folder, "base", "<b>odd", ['{"step": 1, "train/lo', {"step": 4, "sample": "x"}, record(6)])
    for tag in ("<b>odd", "other"):
        write_section("chat_eval_sft", "Chat", "", "sft", {"Lookup": f"93.2% {tag}"}, data="data", model_tag=tag)
    before = {path: path.lstat().st_mtime_ns for path in base_folder.rglob("*")}
    [run] = state()["runs"]
    assert before == {path: path.lstat().st_mtime_ns for path in base_folder.rglob("*")}, "nothing is written"
    assert run["tag"] == "<b>odd" and run["results"] == {"Lookup": {"sft": "93.2% <b>odd"}}
    assert run["stages"]["base"]["curves"] == {"train/loss": [(6, 1.1429)]}
    assert run["stages"]["base"]["samples"] == [(4, "x")]


def test_the_steps_of_a_speedrun_are_noted(base_folder):
    with pytest.raises(SystemExit):
        once([sys.executable, "-c", "raise SystemExit(7)", "scripts.bad", "--data=x"])
    once([sys.executable, "-c", "import time; time.sleep(0.2)", "scripts.good", "--data=x"])
    bad, good = state()["steps"]
    assert (bad["name"], bad["code"], good["name"], good["code"]) == ("bad-x", 7, "good-x", 0)
    assert 0.2 < good["ended"] - good["began"] < time.time() - bad["began"]


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH: apt install chromium")
def test_the_page_shows_a_run_that_trains_and_becomes_the_chat(browser, base_folder):  # noqa: F811
    """From an empty folder over a run that really trains to a model that answers, by keyboard, in one visit."""
    make_sums(base_folder)
    write_run(base_folder, "rl", "<b>other", [record(9, **{"train/steps": 10, "sample": [["<i>q</i>", "<i>a</i>"]]})])
    command = [sys.executable, "-m", "scripts.chat_web", "--watch", "--port=0", "--device_type=cpu", "--temperature=0"]
    with serving(command) as address:
        me = Visit(browser, address, key="", viewport={"width": 375, "height": 800})
        me.page.locator("#dock").wait_for(state="hidden")
        assert me.page.get_by_role("link", name="Chat").is_visible()
        me.page.locator("article h2", has_text="<b>other").wait_for()
        assert me.page.locator(".run dd").inner_text() == "<i>a</i>" and me.page.locator(".run :is(b, i)").count() == 0

        train = subprocess.Popen([sys.executable, "-m", "scripts.base_train", *TINY[:-2], "--eval_every=20",
                                  "--sample_every=20", "--num_iterations=100000", "--model_tag=live"], cwd=REPO)
        try:
            run = me.page.get_by_role("article", name="live")
            run.locator(".now", has_text="of 100,000").wait_for()
            before = run.locator(".now").inner_text()
            wait_until(lambda: run.locator(".now").inner_text() != before and run.locator("dd").count(), me.page)
            slider = run.get_by_role("slider", name="Held-out text, bits per byte")
            slider.focus()
            me.page.keyboard.press("Home")
            log = base_folder / "base_checkpoints" / "live" / "metrics.jsonl"
            first = json.loads(log.read_text().split("\n")[0])
            assert first["step"] == 0
            assert slider.get_attribute("aria-valuetext") == f"step 0: {first['val/bpb']:.3g} bits per byte"
            assert me.page.evaluate("document.documentElement.scrollWidth") <= 375
            me.page.get_by_role("checkbox", name="<b>other").check()
            assert me.page.get_by_role("article").count() == 2
        finally:
            train.send_signal(signal.SIGTERM)
            train.wait(60)
        write_model(base_folder)
        me.page.get_by_role("link", name="Talk to it").click()
        me.ask("Hello")
        assert me.answers.inner_text() in ALPHABET and len(me.answers.inner_text()) > 500
        me.leave()
