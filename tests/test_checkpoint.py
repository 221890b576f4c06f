"""Checkpoints survive kills, damage and re-saving; what is loaded is what was saved, or an error says why not."""
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import REPO
from ranks import run_on_ranks
from test_muon import Run
from test_zero import state_of

from nanochat.runtime import distributed
from nanochat.runtime.compiling import set_compile
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import previous, sha256
from nanochat.training.checkpoint import (
    RULES,
    changed_settings,
    checkpoint_dir,
    choose_start,
    find_checkpoint,
    find_model,
    list_steps,
    problem_with,
    read_meta,
    step_dir,
)
from nanochat.training.records import STAGES, latest_checkpoint, stage_of
from nanochat.training.saving import write_files

set_compile(False, "cpu")
META = {"config": {}}


@pytest.fixture
def folder(base_folder):
    return checkpoint_dir("base", "x")


def save(folder: Path, step: int, run: Run | None = None, **settings) -> Path:
    writer = (run or Run(0)).writer(folder, **settings)
    writer.save(step, META)
    writer.wait()
    return step_dir(folder, step)


def test_float32_masters_are_not_stored_twice(folder):
    """They are the weights; test_muon.py loads them."""
    for dtype in (torch.float32, torch.bfloat16):
        path = save(folder, 3, Run(0, dtype=dtype))
        assert (b"master." in (path / "optimizer_rank_00000.safetensors").read_bytes()) == (dtype == torch.bfloat16)


def test_what_does_not_fit_is_refused(folder):
    path = save(folder, 1)
    more = Run(0)
    more.muon.state["second"] = {"parts.2.square": torch.zeros(64)}
    for run, problem in ((Run(0, dtype=torch.bfloat16), "float32, .*bfloat16"), (more, "muon.second.parts.2.square")):
        with pytest.raises(UserError, match=problem):
            run.load(path)


# ---- Finding


def test_settings_that_changed_since_a_checkpoint_are_named():
    """Settings that change no weight are not; that the code is another is said, whatever the settings are."""
    now = {"seed": 1, "grad_clip": 0.0, "newer_than_it": -1, "resume": "auto", "begin_from": "", "eval_tokens": 9}
    before = {"seed": 0, "grad_clip": 0.0, "resume": "", "begin_from": "ref", "eval_tokens": 7}
    assert changed_settings({"config": before, "rules": RULES}, now) == "\n  with another seed: 0 before, 1 now"
    for others in ({}, {"rules": RULES - 1}):
        assert "older version: updates may differ" in changed_settings({"config": now} | others, now)
    assert read_meta(save(checkpoint_dir("base", "x"), 1))["rules"] == RULES


def test_the_newest_step_is_found_by_number_and_only_the_last_are_kept(folder):
    for step in (999_999, 1_000_000, 20):
        save(folder, step)
    assert list_steps(folder) == [20, 999_999, 1_000_000] and find_checkpoint(folder).name == "step_1000000"
    shutil.copytree(folder / "step_000020", folder / "step_000020.old")  # the user's copy
    save(folder, 1_000_001, keep_last=2)
    assert list_steps(folder) == [1_000_000, 1_000_001] and (folder / "step_000020.old").exists()


def flip(file):
    content = file.read_bytes()
    file.write_bytes(content[:5] + bytes([content[5] ^ 128]) + content[6:])


DAMAGES = {
    "flipped": flip,  # the manifest is no UTF-8 any more
    "missing": lambda file: file.unlink(),
    "unreadable": lambda file: (file.unlink(), file.mkdir()),  # an error when it is read, as of a bad disk
}


@pytest.mark.parametrize("victim", ["optimizer_rank_00000.safetensors", "model.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(damage, victim, folder, capsys):
    """A damaged file of an optimizer only matters to runs that go on: a model that answers does without."""
    good, bad = (save(folder, step) for step in (10, 20))
    DAMAGES[damage](bad / victim)
    assert find_checkpoint(folder) == good
    said = capsys.readouterr().out
    assert "step_000020" in said and victim in said
    with pytest.raises(UserError, match="no valid checkpoint of step 20 .*10, 20"):
        find_checkpoint(folder, 20)
    assert find_model("base") == (bad if "optimizer" in victim else good)
    (good / "meta.json").unlink()
    with pytest.raises(UserError, match="no valid checkpoint"):
        find_checkpoint(folder)


def write_stage(stage: str, tag: str, **meta) -> None:
    """A checkpoint's meta.json as the stages write it."""
    checkpoint = step_dir(checkpoint_dir(stage, tag), 7)
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "meta.json").write_text(json.dumps({"step": 7, "num_iterations": 7} | meta))


def last_stage(tag: str | None) -> str:
    return stage_of(latest_checkpoint(STAGES, tag))


@pytest.mark.parametrize("again, last", [(None, "rl"), ("mid", "mid"), ("base", "base")])
def test_the_stage_that_was_trained_last(again, last):
    """
    By the times in meta.json; those of the files are in the reverse order. A run of three stages, and a stage trained
    again. Version 0.1.0 kept no times: the furthest stage's is the last.
    """
    assert latest_checkpoint(STAGES, None) is None
    for saved, stage in ((2, "rl"), (1, "mid"), (0, "base")):
        write_stage(stage, "d2", saved=99.0 if stage == again else saved)
    write_stage("sft", "d1", saved=90.0)
    write_stage("base", "d1", saved=6.0)
    for stage in ("sft", "mid", "base"):
        write_stage(stage, "old")
    (step_dir(checkpoint_dir("sft", "d1"), 8)).mkdir()  # damaged: the one before it counts
    assert [last_stage(tag) for tag in ("d1", "d2", "old")] == ["sft", last, "sft"]
    assert last_stage(None) == (last if again else "sft") and latest_checkpoint(STAGES, "d3") is None


def test_the_choice_of_a_model_is_never_guessed():
    with pytest.raises(UserError, match="scripts.base_train makes one"):
        find_model("auto")
    for tag in ("d1", "d2"):
        save(checkpoint_dir("base", tag), 1)
    for arguments, message in ((["base"], "d1, d2"), (["base", "d1", 7], "step 7"), (["base", "d22"], "d1, d2"),
                               (["auto", "d22"], "d1, d2")):
        with pytest.raises(UserError, match=message):
            find_model(*arguments)


def test_what_torchrun_starts_again_goes_on_whatever_its_settings_say(folder, monkeypatch):
    """
    It repeats the command line: --overwrite or a step to go back to would lose what was done since. Before the first
    attempt has trained a step, the settings hold: one that died early must not turn into resuming an older run.
    """
    for step in (5, 30):
        save(folder, step)
    monkeypatch.setattr(distributed, "job_stores", [torch.distributed.HashStore()])
    with pytest.raises(UserError, match="--resume=auto"):
        choose_start(folder, "", False)
    assert choose_start(folder, "", True) is None
    assert choose_start(folder, "", True, 5).name == "step_000005"
    writer = Run(0).writer(folder, start_step=5, overwrite=True)
    writer.mark_replaced()
    distributed.mark_begun()
    writer.wait()
    for settings in (("", False), ("", True), ("", True, 30), ("auto", False)):
        assert choose_start(folder, *settings).name == "step_000005"
    monkeypatch.setattr(distributed, "job_stores", [])
    assert choose_start(folder, "", True, 30).name == "step_000030"


def test_a_run_whose_hosts_come_and_go_must_be_told_to_resume(folder, monkeypatch):
    """Its store ends with its ranks, so that nothing tells a restart from a first start."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    for settings in (("", False), ("", True), ("auto", False, 5)):
        with pytest.raises(UserError, match="--resume=auto"):
            choose_start(folder, *settings)
    assert choose_start(folder, "auto", False) is None
    save(folder, 5)
    assert choose_start(folder, "auto", False).name == "step_000005"


# ---- Saving in the background


def test_training_goes_on_while_a_save_is_written(folder, monkeypatch):
    """The thread is held up until every tensor and the meta have changed in place: what is saved is as at save()."""
    run, fresh = Run(0, dtype=torch.bfloat16), Run(0, dtype=torch.bfloat16)
    meta, changed = {"config": {"lr": 1}}, threading.Event()
    monkeypatch.setattr("nanochat.training.saving.write_files", lambda *args: changed.wait() and write_files(*args))
    run.steps(0, 2)
    expected = state_of(run.sharding, run.optimizers)
    writer = run.writer(folder)
    writer.save(1, meta)
    run.steps(2, 4)
    meta["config"]["lr"] = 2
    assert not list_steps(folder), "save() returned before anything was written"
    changed.set()
    writer.wait()
    fresh.load(find_checkpoint(folder))
    assert read_meta(find_checkpoint(folder))["config"] == {"lr": 1}
    assert all(map(torch.equal, state_of(fresh.sharding, fresh.optimizers), expected))


def refusal(*_, **__):
    raise OSError(28, "No space left on device", "/disk")


@pytest.mark.parametrize("function", ["nanochat.training.saving.save_file", "nanochat.training.saving.complete"])
def test_a_failed_save_is_a_warning_if_another_follows_and_an_error_if_not(function, folder, monkeypatch, capsys):
    """The old checkpoint stays, and nothing half-made."""
    save(folder, 5)
    writer = Run(0).writer(folder)
    with monkeypatch.context() as patch:
        patch.setattr(function, refusal)
        writer.save(6, META)
        assert writer.writing.exception()
    assert [path.name for path in folder.iterdir()] == ["step_000005"]
    writer.save(6, META)
    writer.join()
    assert "warning: step 6 was not saved: No space left on device: /disk" in capsys.readouterr().out
    assert list_steps(folder) == [5, 6]
    monkeypatch.setattr(function, refusal)
    writer.save(7, META)
    with pytest.raises(UserError, match=f"step 7 was not saved: No space left .*{folder / 'step_000006'}"):
        writer.wait()
    assert sorted(path.name for path in folder.iterdir()) == ["step_000005", "step_000006"]


def test_a_full_disk_costs_what_a_run_replaces_rather_than_the_run(folder, monkeypatch):
    """Room for two; until it is needed nothing is lost, and a disk that fails otherwise takes nothing."""
    for step in (5, 6):
        save(folder, step)
    writer = Run(0).writer(folder, overwrite=True)
    writer.mark_replaced()
    with monkeypatch.context() as patch:
        patch.setattr("nanochat.training.saving.complete", lambda *_: os.listdir(folder / "nowhere"))
        writer.save(2, META)
        with pytest.raises(RuntimeError, match=f"no step is saved in {folder}"):
            writer.join()
    assert list_steps(folder) == [5, 6]
    monkeypatch.setattr("nanochat.training.saving.sync", lambda path: refusal() if list_steps(folder)[1:] else None)
    writer.save(2, META)
    writer.wait()
    assert list_steps(folder) == [2]


def test_of_checkpoints_that_only_time_asked_for_the_newest_two_are_kept(folder):
    """Beside those of save_every and the end; a save starts the clock anew. Also in a run that goes on."""
    run = Run(0)
    writer = run.writer(folder)
    for step in range(1, 8):
        if step != 4:
            writer.began -= 60 * 30
        assert writer.time_is_up() == (step != 4)
        writer.save(step, META, by_time=step not in (2, 6))
    writer.wait()
    assert list_steps(folder) == [2, 5, 6, 7]
    writer = run.writer(folder, start_step=7, by_time=read_meta(folder / "step_000007")["by_time"])
    writer.save(8, META, by_time=True)
    writer.wait()
    assert list_steps(folder) == [2, 6, 7, 8], "a run that goes on knows of them"


# ---- Several processes


def save_and_load(rank: int, world_size: int, folder: Path) -> tuple:
    """Ranks 0 and 1 are a shard group, 2 and 3 its replica. Returns what this rank saw."""
    run = Run(1, shard_size=2)
    writer = run.writer(folder, keep_last=2)
    for step in (1, 2, 3):
        writer.save(step, META)
    writer.join()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="No space left") as refused:
        if rank == 1:
            patch.setattr("nanochat.training.saving.sync", refusal)
        writer.save(4, META)
        writer.wait()
    if rank == 1:
        (folder / "step_000003" / "optimizer_rank_00001.safetensors").write_bytes(b"damaged")
    torch.distributed.barrier()
    checkpoint = choose_start(folder, "auto", False)
    assert len(list(checkpoint.glob("optimizer_rank_*"))) == 2, "replicas write nothing"
    if rank == 2:
        run.muon.counters["other"] = torch.zeros(1)
    with pytest.raises(UserError, match="muon.other") as unfit:
        run.load(checkpoint)
    return checkpoint.name, str(refused.value), str(unfit.value)


def test_ranks_save_and_load_together_and_agree_on_what_went_wrong(tmp_path):
    """One rank's disk refuses; one file is damaged, which one rank reads; one cannot use what the others can."""
    outcomes = run_on_ranks(4, save_and_load, tmp_path / "x")
    assert outcomes == [outcomes[0]] * 4 and outcomes[0][0] == "step_000002"
    there = sorted(path.name for path in (tmp_path / "x").iterdir())
    assert there == ["step_000002", "step_000003"], "the last two, and no debris"


SAVE_FOR_EVER = f"""
import sys
sys.path[:0] = [{str(REPO / "tests")!r}, {str(REPO)!r}]
from test_checkpoint import *
run = Run(0)
while True:
    save(checkpoint_dir("base", "x"), 1, run)
"""


def test_killed_at_any_moment_of_saving_the_same_step_a_valid_checkpoint_remains(folder):
    """A real process that replaces step 1 over and over, stopped at four moments, then killed for real; twice."""
    for life in range(2):
        process = subprocess.Popen([sys.executable, "-c", SAVE_FOR_EVER], stdout=subprocess.PIPE)
        assert process.stdout.readline().startswith(b"saved ")
        for moment in range(4):
            process.send_signal(signal.SIGCONT)
            time.sleep(0.013 * (1 + 4 * life + moment))
            process.send_signal(signal.SIGSTOP)  # the folder as a kill at this moment would leave it
            os.waitpid(process.pid, os.WUNTRACED)
            names = {path.name for path in folder.iterdir()}
            assert names & {"step_000001", previous(folder / "step_000001").name}, f"nothing left but {names}"
        process.kill()
        process.communicate()
        path = choose_start(folder, "auto", False)
        assert path.name == "step_000001" and problem_with(path) is None
        Run(0).load(path)


def read_by_rank(rank: int, world_size: int, folder: Path) -> tuple[list[str], list[str | None]]:
    """The files that this rank hashes, and what it is told while some file or other is damaged."""
    checkpoint = save(folder, 10, Run(2))
    hashed, told = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanochat.training.checkpoint.sha256", lambda path: hashed.append(path.name) or sha256(path))
        assert problem_with(checkpoint) is None
    for name in DAMAGED:
        torch.distributed.barrier()
        if rank == 0:
            flip(checkpoint / name)
        torch.distributed.barrier()
        told.append(problem_with(checkpoint).split()[0])
        torch.distributed.barrier()
        if rank == 0:
            flip(checkpoint / name)
    return hashed, told


DAMAGED = ["model.safetensors", "optimizer_rank_00002.safetensors", "manifest.json"]


def test_ranks_share_the_reading_of_a_checkpoint_and_all_know_what_one_finds(folder):
    """Rank 0 alone would hash 14 bytes a parameter while the others wait in a collective, which has a time limit."""
    outcomes = run_on_ranks(3, read_by_rank, folder)
    manifest = json.loads((folder / "step_000010" / "manifest.json").read_text())
    assert sorted(sum((hashed for hashed, _ in outcomes), [])) == sorted(manifest)
    for hashed, told in outcomes:
        assert any("safetensors" in name for name in hashed) and told == DAMAGED
