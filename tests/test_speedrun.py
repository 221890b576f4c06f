"""The speedrun as a user has it: stopped, run again, with a damaged result; and what decides that a stage is done."""
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPO, run_module

ENV = {"NANOCHAT_NO_VENV": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def once(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess:
    return run_module("scripts.once", *arguments, timeout=timeout)


def test_once_repeats_only_what_is_no_longer_as_it_was(base_folder):
    """Not again while command, input and result are the same; again when any of them has changed, and only then."""
    base_folder.mkdir()
    (base_folder / "input").write_text("a")
    script = "cd $NANOCHAT_BASE_DIR && mkdir -p made && cat input >> made/result && echo x >> runs"

    def runs() -> int:
        return (base_folder / "runs").read_text().count("x")

    def run(name: str = "stage", needs: str = "input", command: str = script) -> str:
        done = once(name, "--needs", needs, "--makes", "made", "--", "sh", "-c", command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run() == "" and runs() == 1
    assert run() == "done before: made\n" and runs() == 1
    for change in (
        lambda: (base_folder / "input").write_text("b"),
        lambda: (base_folder / "made" / "result").write_text("damaged"),
        lambda: (base_folder / "made" / "result").unlink(),
        lambda: (base_folder / "made" / "another").write_text("that it did not make"),
    ):
        before = runs()
        change()
        assert run() == "" and runs() == before + 1
        assert "done before" in run() and runs() == before + 1
    before = runs()
    run(command=script + " && true")  # the command itself
    assert runs() == before + 1
    (base_folder / "made" / "metrics.jsonl").write_text("a log says nothing about the result")
    assert "done before" in run(command=script + " && true")


def test_once_does_not_repeat_a_command_that_fetched_what_it_needs(base_folder):
    """As the evaluation of a base model downloads CORE's bundle. Another bundle is another input."""
    script = "cd $NANOCHAT_BASE_DIR && echo x >> result && mkdir -p bundle && { [ -e bundle/items ] || echo fetched > bundle/items; }"
    base_folder.mkdir()
    stage = "stage", "--needs", "bundle", "--makes", "result", "--", "sh", "-c", script
    assert once(*stage).stdout == ""
    assert once(*stage).stdout == "done before: result\n"
    (base_folder / "bundle" / "items").write_text("others")
    assert once(*stage).stdout == "" and (base_folder / "result").read_text() == "x\nx\n"


def test_once_knows_a_run_that_was_stopped_from_one_that_has_ended(base_folder):
    """A training run that is sent SIGTERM saves, and ends well, in the middle."""
    script = "cd $NANOCHAT_BASE_DIR && mkdir -p run/step_{0:06d} && echo '{{\"step\": {0}, \"num_iterations\": 1000000}}' > run/step_{0:06d}/meta.json"
    base_folder.mkdir()
    for step in (20, 999_999):  # the newest counts, by number
        stopped = once("run", "--makes", "run", "--", "sh", "-c", script.format(step))
        assert stopped.returncode == 1 and stopped.stderr == f"error: run was stopped after {step:,} of 1,000,000 steps; the same command goes on\n"
    assert once("run", "--makes", "run", "--", "sh", "-c", script.format(1_000_000)).stdout == ""
    assert "done before" in once("run", "--makes", "run", "--", "sh", "-c", script.format(1_000_000)).stdout


def test_once_reports_failures_as_the_command_did_and_remembers_none_of_them(base_folder):
    failed = once("stage", "--makes", "result", "--", "sh", "-c", "echo why >&2; exit 7")
    assert (failed.returncode, failed.stderr) == (7, "why\n")
    killed = once("stage", "--makes", "result", "--", "sh", "-c", "kill -9 $$")
    assert killed.returncode == 137
    empty = once("stage", "--makes", "result", "--", "true")
    assert empty.returncode == 1 and empty.stderr == f"error: stage has ended without making result in {base_folder}\n"
    assert once("stage", "--makes", "result", "--", "sh", "-c", "echo x > $NANOCHAT_BASE_DIR/result").stdout == ""
    assert "done before" in once("stage", "--makes", "result", "--", "sh", "-c", "echo x > $NANOCHAT_BASE_DIR/result").stdout


def test_once_lets_a_command_save_and_never_runs_it_twice_at_a_time(base_folder):
    """Ctrl-C as a terminal sends it, and SIGTERM to `once` alone: the command ends in its own time. Its lock outlives a killed `once`."""
    base_folder.mkdir()
    saves = "import signal, sys, time, pathlib, os\n" + "folder = pathlib.Path(os.environ['NANOCHAT_BASE_DIR'])\n" + (
        "def save(*_):\n    time.sleep(0.3)\n    (folder / 'saved').touch()\n    sys.exit(3)\n"
        "signal.signal(signal.SIGINT, save), signal.signal(signal.SIGTERM, save)\n(folder / 'running').touch()\ntime.sleep(60)")
    command = [sys.executable, "-m", "scripts.once", "stage", "--makes", "result", "--", sys.executable, "-c", saves]

    def start() -> subprocess.Popen:
        process = subprocess.Popen(command, cwd=REPO, env=os.environ, stderr=subprocess.PIPE, text=True, start_new_session=True)
        deadline = time.monotonic() + 20
        while not (base_folder / "running").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return process

    for stop in (lambda process: os.killpg(process.pid, signal.SIGINT), lambda process: process.terminate()):
        process = start()
        stop(process)
        assert process.wait(timeout=20) == 3 and (base_folder / "saved").exists()
        (base_folder / "saved").unlink(), (base_folder / "running").unlink()

    process = start()
    second = subprocess.run(command, cwd=REPO, env=os.environ, capture_output=True, text=True, timeout=20)
    assert second.returncode == 1 and second.stderr == "error: stage is being made by another process; wait for it, or end it\n"
    process.kill()
    process.wait()
    assert "another process" in subprocess.run(command, cwd=REPO, env=os.environ, capture_output=True, text=True, timeout=20).stderr
    os.killpg(process.pid, signal.SIGKILL)


def test_a_fresh_machine_installs_what_is_asked_for_whatever_the_arguments(tmp_path):
    """`.` hands a script's own arguments on where none are given: --chat must not become the name of an extra."""
    for name in ("speedrun.sh", "setup.sh", "pyproject.toml"):
        (tmp_path / name).write_bytes((REPO / name).read_bytes())
    stub = tmp_path / ".venv" / "bin" / "python"
    stub.parent.mkdir(parents=True)
    stub.write_text('#!/bin/sh\necho "$@" >> calls\n[ "$2" != scripts.doctor ]\n')
    stub.chmod(0o755)
    for argument in ("--chat", "--rehearse"):
        refused = subprocess.run(["bash", "speedrun.sh", argument], cwd=tmp_path, text=True, capture_output=True, timeout=60)
        assert refused.returncode == 1 and "nothing can be trained on this machine" in refused.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls.count("-m pip install --quiet --editable .") + calls.count("-m pip install --quiet --editable .[hub]") == 1
    assert [line for line in calls if "pip" not in line and not line.startswith("-c")] == ["-m scripts.doctor --kernels=True"] * 2


def set_up(folder: Path, **env: str) -> subprocess.CompletedProcess:
    """setup.sh in a folder that has some .venv, from where no index of packages can be reached."""
    for name in ("setup.sh", "pyproject.toml"):
        (folder / name).write_bytes((REPO / name).read_bytes())
    env = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""} | env
    return subprocess.run(["bash", "-c", ". ./setup.sh"], cwd=folder, env=env, text=True, capture_output=True, timeout=120)


def test_an_environment_whose_making_was_interrupted_is_completed(tmp_path):
    """What `python -m venv` leaves when it fails (Debian without python3-venv) or is stopped: a Python, and no pip."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=tmp_path, check=True)
    (tmp_path / ".venv" / "kept").touch()
    done = set_up(tmp_path)
    assert done.returncode == 1 and "No module named pip" not in done.stderr and "setuptools" in done.stderr, "the next step needs an index"
    subprocess.run([tmp_path / ".venv" / "bin" / "python", "-m", "pip", "--version"], check=True, capture_output=True)
    assert (tmp_path / ".venv" / "kept").exists(), "what was installed into it is not lost"


def test_an_environment_whose_python_is_gone_is_made_anew(tmp_path):
    """As after an upgrade of the system; also where everything had been installed. With a stand-in for the new Python."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to("/nowhere/python")
    installed = subprocess.check_output(["cksum", "pyproject.toml"], cwd=REPO, text=True)
    (tmp_path / ".venv" / "installed").write_text(installed.strip() + " \n")
    (tmp_path / "new").write_text('#!/bin/sh\necho "$@" >> asked\nexit 1\n')
    (tmp_path / "new").chmod(0o755)
    assert set_up(tmp_path, PYTHON="./new").returncode == 1 and (tmp_path / "asked").read_text() == "-m venv .venv\n"
    [kept] = tmp_path.glob(".venv.old-*")
    assert (kept / "installed").exists(), "its Python may only be out of reach"


def stand_in(folder: Path, answers: dict[str, object]) -> Path:
    """speedrun.sh in a folder whose Python gives these answers to command lines (patterns of the shell), and writes down all others in `calls`."""
    for name in ("speedrun.sh", "setup.sh", "pyproject.toml"):
        (folder / name).write_bytes((REPO / name).read_bytes())
    stub = folder / ".venv" / "bin" / "python"
    stub.parent.mkdir(parents=True, exist_ok=True)
    cases = "".join(f"    {pattern}) echo {answer} ;;\n" for pattern, answer in answers.items())
    stub.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}    *) echo "$@" >> calls ;;\nesac\n')
    stub.chmod(0o755)
    return stub


def speedrun(folder: Path, *arguments: str) -> tuple[str, list[str]]:
    """What a run with the stand-in prints, and the stages that it asks for."""
    (folder / "calls").unlink(missing_ok=True)
    env = os.environ | {"NANOCHAT_BASE_DIR": str(folder / "a base")}
    done = subprocess.run(["bash", "speedrun.sh", *arguments], cwd=folder, env=env, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in (folder / "calls").read_text().splitlines() if "pip" not in line and not line.startswith("-c")]


@pytest.mark.parametrize("gpus, rows, recomputed, ranks, depth", [(1, 4, 32, 1, 12), (1, 0, 2, 1, 12), (3, 32, 32, 2, 12), (8, 16, 32, 8, 20), (16, 16, 16, 16, 20)])
def test_what_is_run_on_gpus(tmp_path, gpus, rows, recomputed, ranks, depth):
    """With a stand-in for Python that has so many GPUs, for whose memory the doctor recommends so many rows: which commands would be run."""
    asked = {"*device_count*": gpus, "*--batch_only*--activation_checkpointing": recomputed, "*--batch_only*": rows}
    stand_in(tmp_path, asked)
    _, (doctor, *calls) = speedrun(tmp_path)
    stand_in(tmp_path, asked | {"*--batch_only*": 1})  # the second time as the first, whatever the doctor says by then
    _, (doctor_again, *again) = speedrun(tmp_path)
    assert calls == again, "the same commands, so that what is finished is known"
    assert (doctor, doctor_again) == ("-m scripts.doctor --kernels=True", "-m scripts.doctor --kernels=False"), "they are tried when it is first run"
    trained = {script: line for line in calls for script in ("base_train", "mid_train", "chat_sft", "chat_rl") if f"scripts.{script} " in line}
    used = rows if rows >= 4 else recomputed
    for script, line in trained.items():
        assert f"torchrun --standalone --nproc_per_node={ranks} " in line and f"--model_tag=speedrun-d{depth} --resume=auto" in line
        assert ("--activation_checkpointing" in line) == (rows < 4)
        assert f"--device_batch_size={used if script in ('base_train', 'mid_train') else min(used, 4)} " in line
    assert len(trained) == 4 and f"--depth={depth} " in trained["base_train"] and 524288 % (used * 2048 * ranks) == 0


def test_a_slow_machine_trains_a_smaller_model_unless_asked_for_all(tmp_path):
    """With a stand-in for Python that times a step of depth 4 at so many milliseconds. What was chosen first stays chosen."""

    def chosen(folder: Path, ms: int, *arguments: str) -> tuple[str, str]:
        folder.mkdir(exist_ok=True)
        stand_in(folder, {"*device_count*": 0, "*--time_only?--depth=4*": ms, "*--time_only?--depth=2*": ms // 3})
        out, calls = speedrun(folder, *arguments)
        (depth,) = {line.partition("--depth=")[2].split()[0] for line in calls if "scripts.base_train" in line}
        assert all(f"--model_tag=speedrun-d{depth} " in f"{line} " for line in calls if "model_tag" in line)
        return depth, out

    depth, out = chosen(tmp_path / "fast", 400)
    assert depth == "4" and "about 15 minutes" in out and "smaller" not in out
    depth, out = chosen(tmp_path / "slow", 2500)
    assert depth == "2" and "about 78 minutes" in out and "a smaller model instead, in about 27 minutes; bash speedrun.sh --full trains the larger one" in out
    assert chosen(tmp_path / "slow", 450)[0] == "2", "now as fast: this run goes on as it began"
    assert chosen(tmp_path / "slow", 3000, "--full")[0] == "4"
    assert chosen(tmp_path / "slow", 3000)[0] == "4", "what was asked for last goes on"
    assert chosen(tmp_path / "other", 3000, "--full")[0] == "4"


def rehearse(until: str | None = None) -> str:
    """What `bash speedrun.sh --rehearse` prints; with `until` it and all its processes are killed when a line says that."""
    process = subprocess.Popen(
        ["bash", "speedrun.sh", "--rehearse"], cwd=REPO, env=os.environ | ENV, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )
    lines, deadline = [], time.monotonic() + 400
    try:
        for line in process.stdout:
            lines.append(line)
            if until and until in line or time.monotonic() > deadline:
                break
    finally:
        if until or time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL)
    code = process.wait(timeout=30)
    assert until or code == 0, "".join(lines)
    return "".join(lines)


def what_was_skipped(output: str) -> set[str]:
    lines = [line.removeprefix("done before: ") for line in output.splitlines() if line.startswith("done before: ")]
    return {name for line in lines for name in line.split(", ")}


def test_a_killed_speedrun_does_no_finished_stage_again(base_folder):
    """Where meanwhile a byte of a model changes, the last step of that stage is made again, to the same weights, so that what came of them stays."""
    folder = base_folder / "rehearsal"
    (folder / "once").mkdir(parents=True)  # as after the first run: the kernels are not tried
    killed = rehearse(until="=== evaluation: sft")
    assert "done before" not in killed and "=== fine-tuning" in killed

    finished = {"tokenizer/tinyworld", "base_checkpoints/rehearsal", *(f"report/sections/tinyworld/rehearsal/{name}.json" for name in ("base_train", "base_eval"))}
    before = {path: path.stat().st_mtime_ns for name in finished | {"sft_checkpoints/rehearsal"} for path in list((folder / name).glob("step_*/*")) or [folder / name]}
    weights = sorted((folder / "mid_checkpoints" / "rehearsal").glob("step_*/model.safetensors"))[-1]
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    output = rehearse()
    assert what_was_skipped(output) == finished and "does not match its checksum" in output
    assert weights.read_bytes() == whole
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert f"everything works; the models in {folder} have learnt nothing" in output
    report = (folder / "report" / "report.md").read_text()
    assert all(title in report for title in ("Base model: pretraining", "Mid-training", "Supervised fine-tuning", "Reinforcement learning"))


def test_unknown_arguments_are_refused():
    refused = subprocess.run(["bash", "speedrun.sh", "--chatt"], cwd=REPO, env=os.environ | ENV, text=True, capture_output=True)
    assert refused.returncode == 2 and refused.stderr == "error: --chatt is unknown; expected --chat, --full or --rehearse\n"
