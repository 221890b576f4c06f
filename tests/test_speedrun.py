"""The speedrun as a user has it: stopped, run again, with a damaged result; and what decides that a stage is done."""
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import REPO, warm_python
from ranks import run_as_main
from test_runs import problems

from nanochat.model.gpt_config import config_from_depth
from nanochat.plan.choice import LENGTHS, SIZES, Choice, cost, cpu_seconds
from nanochat.plan.memory import GIB
from nanochat.plan.step_time import step_time
from nanochat.runtime.errors import UserError
from nanochat.runtime.flops import Gpu, datasheet_gpu
from nanochat.tasks import SPEC, TASKS
from scripts.once import name_of, once


def no_venv() -> dict[str, str]:
    """The settings with which speedrun.sh takes the Python on the PATH."""
    return {"NANOCHAT_NO_VENV": "1", "PATH": f"{Path(warm_python()).parent}:{os.environ['PATH']}"}


@pytest.fixture(autouse=True)
def there(base_folder):
    base_folder.mkdir()


@pytest.fixture
def recipe(base_folder, tmp_path, monkeypatch):
    """The numbers of the commands that run in a recipe of scripts.once: each is a script of the shell."""
    monkeypatch.setenv("CHAIN", str(tmp_path / "chain"))

    def call(*commands: str) -> list[int]:
        (tmp_path / "chain").write_text("")
        (base_folder / "ran").write_text("")
        for number, command in enumerate(commands):
            script = f"cd $NANOCHAT_BASE_DIR && echo {number} >> ran && {command}"
            once(["sh", "-c", script, f"scripts.step{number}"])
        return [*map(int, (base_folder / "ran").read_text().split())]

    return call


def test_a_recipe_runs_again_from_the_first_changed_line_on(recipe, tmp_path, base_folder):
    """A command is done only after the same commands; also after a change and back, as the others ran in between."""
    notes = tmp_path / "my notes, and more"
    notes.mkdir()
    (notes / "a.md").write_text("one")
    for command in "true", f"true --tasks={300 * 'x'},json:{notes}/a.md[:9]*2", f"true --source={notes}":
        lines = ["true", command, ": second"]
        assert recipe(*lines)[-1] == 2 and recipe(*lines) == []
    assert recipe(*lines, ": more") == [3] and recipe(*lines) == []
    assert recipe("true", ": other", ": second") == [1, 2] and recipe(*lines) == [1, 2]
    (notes / "a.md").write_text("changed")
    assert recipe(*lines) == [1, 2] and recipe(*lines) == []
    (notes / "b.md").write_text("two")
    (notes / ".hidden").write_text("three")
    assert recipe(*lines) == [1, 2]
    (notes / ".hidden").write_text("four more")
    assert recipe(*lines) == []
    assert recipe(": first", *lines[1:]) == [0, 1, 2]
    (base_folder / "once" / "step1-newest.json").unlink()
    assert recipe(": first", *lines[1:]) == [1]


def test_a_command_alone_follows_none(base_folder, monkeypatch):
    monkeypatch.delenv("CHAIN", raising=False)
    for _ in range(2):
        for letter in "ab":
            once(["sh", "-c", f"echo {letter} >> $NANOCHAT_BASE_DIR/ran", f"scripts.{letter}"])
    once(["sh", "-c", "echo c >> $NANOCHAT_BASE_DIR/ran", "scripts.library"])
    once(["sh", "-c", "echo c >> $NANOCHAT_BASE_DIR/ran", "scripts.library"])
    assert (base_folder / "ran").read_text() == "a\nb\nc\nc\n", "a library each time: it knows what is left to do"


def test_once_knows_a_run_that_was_stopped_from_one_that_has_ended(base_folder):
    """A training run that is sent SIGTERM saves and, under torchrun, ends well, in the middle."""
    def train(step: int) -> None:
        place = base_folder / "mid_checkpoints" / "d4" / f"step_{step:06d}"
        meta = json.dumps({"step": step, "num_iterations": 1000})
        script = f"mkdir -p {place} && echo '{meta}' > {place}/meta.json && echo x >> {base_folder}/ran"
        once(["sh", "-c", script, "torchrun", "scripts.mid_train", "--model_tag=d4"])

    for _ in range(2):
        with pytest.raises(UserError, match="mid-d4"):
            train(20)
    train(1000), train(1000)
    assert (base_folder / "ran").read_text() == "x\n" * 3
    with pytest.raises(UserError, match="sft-d4"):  # it has saved nothing
        once(["true", "scripts.chat_sft", "--model_tag=d4"])


def test_once_reports_failures_as_the_command_did_and_remembers_none_of_them(recipe, base_folder):
    for _ in range(2):
        for command, code in ("exit 7", 7), ("kill -9 $$", 137):
            with pytest.raises(SystemExit) as end:
                recipe("true", command, "true")
            assert end.value.code == code and (base_folder / "ran").read_text().split()[-1] == "1"


def test_each_result_has_a_record_of_its_own():
    run = "torchrun --standalone --nproc_per_node=8 -m"
    for command, expected in (
        ("python -m scripts.tok_train --data=mine", "tok_train-mine"),
        (f"{run} scripts.chat_rl --model_tag=d4 --source=mid", "rl-d4"),
        (f"{run} scripts.chat_eval --source=mid --model_tag=d4", "chat_eval-mid-d4"),
        ("python -m scripts.dataset --source=/home/me/books", "dataset-books"),
        ("python -m scripts.library --source=/home/me/notes --name=mine", "library-mine"),
        ("python -m scripts.chat_sft", "sft-newest")):
        assert name_of(command.split())[2] == expected


SAVES = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["NANOCHAT_BASE_DIR"])
def save(*_):
    time.sleep(0.3)
    (folder / "saved").touch()
    sys.exit(3)
signal.signal(signal.SIGINT, save), signal.signal(signal.SIGTERM, save)
(folder / "running").touch()
time.sleep(1000)
"""


def test_once_lets_a_command_save(base_folder):
    """Ctrl-C as a terminal sends it, and SIGTERM to `once` alone: the command ends in its own time."""
    call = f"from scripts.once import once; once({[sys.executable, '-c', SAVES]})"

    def start() -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, "-c", call], cwd=REPO, start_new_session=True)
        deadline = time.monotonic() + 300
        while not (base_folder / "running").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return process

    for stop in (lambda process: os.killpg(process.pid, signal.SIGINT), lambda process: process.terminate()):
        process = start()
        stop(process)
        assert process.wait(timeout=300) == 3 and (base_folder / "saved").exists()
        (base_folder / "saved").unlink(), (base_folder / "running").unlink()


def copy_scripts(folder: Path) -> None:
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    for name in ("speedrun.sh", "setup.sh", "pyproject.toml", "runs/cpu.sh", "runs/rehearsal.sh", "runs/trial.sh"):
        (folder / name).write_bytes((REPO / name).read_bytes())


def write_program(path: Path, script: str) -> None:
    """A stand-in for a program: a script of the shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def write_python(folder: Path, script: str) -> None:
    """A stand-in for the environment's Python."""
    write_program(folder / ".venv/bin/python", script)
    write_program(folder / ".venv/bin/torchrun", 'exec python torchrun "$@"')


def bash(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    settings = dict(cwd=folder, env=os.environ | env, text=True, capture_output=True, timeout=500)
    return subprocess.run(["bash", *arguments], **settings)


# ---- Which commands: with a stand-in for Python


def stand_in(folder: Path, gpus: int, chosen: str, three_steps: str = ":") -> None:
    """
    speedrun.sh in a folder with an environment that looks installed. Its Python counts that many GPUs, chooses these
    variables, and writes down in `calls` all other commands.
    """
    copy_scripts(folder)
    write_python(folder, f"""case "$*" in
    *device_count*) echo {gpus} ;;
    *scripts.plan*) mkdir -p "$NANOCHAT_BASE_DIR/once"; echo "{chosen}" > "$NANOCHAT_BASE_DIR/once/gpus" ;;
    *) echo "$@" >> calls ;;
esac
case "$*" in *--num_iterations=3*) mkdir -p "$NANOCHAT_BASE_DIR"; {three_steps} ;; esac
""")
    sums = subprocess.check_output(["cksum", "pyproject.toml"], cwd=folder, text=True).strip()
    (folder / ".venv" / "installed").write_text(f"{sums} dev\n")


def speedrun(folder: Path, *arguments: str, code: int = 0) -> list[str]:
    """The commands of a run with the stand-in."""
    (folder / "calls").unlink(missing_ok=True)
    done = bash(folder, "speedrun.sh", *arguments, NANOCHAT_BASE_DIR=str(folder / "a base"))
    assert done.returncode == code, done.stderr
    return (folder / "calls").read_text().splitlines()


ALL = "TALK=500000 RL=467 SAMPLES=256"
EIGHT = f"RANKS=8 DEPTH=22 ROWS=32 FEW=4 RECOMPUTE=False VOCAB=49152 RATIO=9.4 SHARDS=125 {ALL}"
TWENTY = f"VOCAB=32768 RATIO=8 SHARDS=75 {ALL}"
STAGES = ["base_train", "mid_train", "chat_sft", "chat_rl"]


def test_what_is_run_on_gpus(tmp_path):
    """Three steps of the same shapes before anything is downloaded; then all stages. A rehearsal has the same steps."""
    stand_in(tmp_path, 3, f"RANKS=2 DEPTH=20 ROWS=8 FEW=4 RECOMPUTE=True {TWENTY}")
    stand_in(tmp_path / "short", 1, "RANKS=1 DEPTH=8 ROWS=8 FEW=8 RECOMPUTE=False VOCAB=32768 RATIO=8 SHARDS=8 "
             "TALK=25000 RL=0")
    without_rl = "".join(speedrun(tmp_path / "short"))
    assert "smoltalk[:25000], mmlu[:5000]*3, gsm8k*4" in without_rl and "_per_task=500" in without_rl
    # The last stage is judged on all problems, the others on 128 a task.
    assert "--source=mid --max_problems=128" in without_rl and "--source=sft --max_problems=-1" in without_rl
    assert "scripts.report" in without_rl and "=rl" not in without_rl
    notes = [tmp_path / "nm" / name for name in ("My notes.2024", "python")]
    for folder in notes:
        folder.mkdir(parents=True)
    calls = speedrun(tmp_path, f"--folder={notes[0]}")
    (place,) = (i for i, line in enumerate(calls) if "--num_iterations=3" in line)
    trained = {script: line for line in calls[place + 1 :] for script in STAGES if f"scripts.{script} " in line}
    assert list(trained) == STAGES
    for script, line in trained.items():
        assert "scripts.once torchrun --standalone --nproc_per_node=2 --max-restarts=3 " in line
        assert "--model_tag=speedrun-d20 --resume=auto" in line and "--activation_checkpointing=True" in line
        assert f"--device_batch_size={4 if script == 'chat_sft' else 8} " in line
    assert "--num_iterations=467 " in trained["chat_rl"] and "--sampling_batch_size=256 " in trained["chat_rl"]
    judged = re.findall(r"identity, lookup, search --source=(\w+)(?: --max_problems=(\d+))?$", "\n".join(calls), re.M)
    assert judged == [("mid", "128"), ("sft", "128"), ("rl", "")]
    shape = trained["base_train"].partition(" torchrun ")[2].replace("climbmix", "python")
    shape = shape.replace("restarts=3", "restarts=0").replace("--resume=auto", "--overwrite")
    tokens = 2 * 8 * 2048 * 2
    assert calls[place].partition("torchrun ")[2] == f"{shape} --total_batch_size={tokens} --num_iterations=3"
    assert "climbmix" not in "".join(calls[:place])
    assert f"once python -m scripts.library --source={notes[0]} --name=My-notes-2024" in "".join(calls)
    rehearsed = speedrun(tmp_path, "--rehearse", "--chat", f"--folder={notes[1]}")
    assert "--num_iterations=3 " not in "".join(rehearsed), "not again"
    assert "--nproc_per_node=3 -m scripts.base_train" in "".join(rehearsed), "all GPUs"
    assert rehearsed[-1].startswith("-m scripts.chat_web --source=rl --model_tag=reh")
    assert rehearsed[-1].endswith(" --library=my-python"), "python is the library of Python itself"


def test_nothing_is_downloaded_where_three_steps_fail(tmp_path):
    """As where they do not compile, or need more memory than was thought. Nor with --hours, but no GPU."""
    stand_in(tmp_path, 8, EIGHT, three_steps="exit 7")
    for argument in ([], ["--rehearse"]):
        calls = "".join(speedrun(tmp_path, *argument, code=7))
        assert "--source=python" in calls and "climbmix" not in calls and "tinyworld" not in calls
    stand_in(tmp_path, 0, "")
    refused = bash(tmp_path, "speedrun.sh", "--hours=2", NANOCHAT_BASE_DIR=str(tmp_path / "no base"))
    assert refused.returncode == 2 and "--hours=2" in refused.stderr and not (tmp_path / "no base").exists()


def test_every_machine_has_the_same_steps_in_the_same_order():
    """The files for GPUs and a rehearsal; on a CPU no base_eval and fine-tuning. Settings and tasks exist."""
    steps = {}
    for name in ("speedrun.sh", "runs/cpu.sh", "runs/rehearsal.sh"):
        text = (REPO / name).read_text()
        commands = re.sub(r"(\s\\)?\n +", " ", text[text.index("once python -m scripts.library") :])
        steps[name] = re.findall(r"^(?:\[ \$RL = 0 \] \|\| )?once .*?(?:scripts\.(\w+)|(--source=\w+))", commands, re.M)
        cut = re.sub(r"\$TALK|\$\(\(TALK / 5\)\)", "9", text)
        specs = ", ".join(re.findall(r'--tasks="([^"]+)"', cut)).split(",")
        assert len(specs) > 5 and all(SPEC.fullmatch(spec.strip())["name"] in TASKS for spec in specs)
        assert problems(commands, REPO) == [] and max(map(len, text.splitlines())) <= 120
    tuned = [step for step in steps["speedrun.sh"] if not {"base_eval", "chat_sft", "--source=sft"}.intersection(step)]
    assert len(tuned) > 7 and steps["runs/cpu.sh"] == tuned, steps
    assert steps["runs/rehearsal.sh"] == steps["speedrun.sh"], steps


@pytest.mark.parametrize("argument, code, words", [
    ("--help", 0, "--plan=8,H100,80 --price=2.5  # only shows"), ("-h", 0, "--rehearse     # every stage"),
    ("--folder=/not/there", 2, "error: no folder /not/there"), ("--folder=tests-of-none", 2, "/tests-of-none"),
    ("--run=", 2, "--run=: expected"), ("--hours=0", 2, "=0: expected"),
    *((wrong, 2, "--plan=1,RTX4090") for wrong in ("--plan", "--plan=1", "--plan=H100", "--plan=4090")),
    ("--chatt", 2, "--chatt: expected")])
def test_an_argument_is_answered_before_anything_is_made(tmp_path, argument, code, words):
    stand_in(tmp_path, 0, "")
    done = bash(tmp_path, "speedrun.sh", argument)
    assert done.returncode == code and words in (done.stderr if code else done.stdout), done
    assert not (tmp_path / "calls").exists() and "set -euo" not in done.stdout and "#!/" not in done.stdout


@pytest.mark.parametrize("script", ["miniseries.sh", "scaling_laws.sh", "multi_node.sh"])
def test_scripts_of_series_print_their_help_and_refuse_what_they_would_ignore(script):
    shown = bash(REPO, f"runs/{script}", "--help", **no_venv())
    assert shown.returncode == 0 and f"bash runs/{script}" in shown.stdout and "set -euo" not in shown.stdout
    if script != "multi_node.sh":
        refused = bash(REPO, f"runs/{script}", "--depth=3", **no_venv())
        assert refused.returncode == 2 and "--depth=3 is unknown" in refused.stderr


def test_setup_says_how_it_is_called_and_which_extras_there_are(tmp_path):
    """Before anything is made: as a program it could not change the shell's PATH."""
    stand_in(tmp_path, 0, "")
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for call, words in (("bash setup.sh dev", [". ./setup.sh"]), (". ./setup.sh --help", ["--help", *extras]),
                        (". ./setup.sh hub,gpux", ["hub,gpux", *extras])):
        done = bash(tmp_path, "-c", call)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2 and [word for word in words if word not in line] == [], line
    assert not (tmp_path / "calls").exists()
    assert bash(tmp_path, "-c", f"set -e; . ./setup.sh {','.join(extras)}; . ./setup.sh").returncode == 0


@pytest.mark.parametrize("code", [0, 1])
def test_what_pip_says_is_shown_only_if_it_fails(tmp_path, code):
    """Where uv is missing, which it fetches."""
    copy_scripts(tmp_path)
    pip = f"echo WARNING: pip >&2; mkdir -p .uv/bin; cp bin/tool .uv/bin/uv; exit {code}"
    write_program(tmp_path / "bin/python3", pip)
    write_program(tmp_path / "bin/tool", "exit 9")
    done = bash(tmp_path, "-c", ". ./setup.sh", PATH=f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert done.returncode == 1 and ("WARNING: pip" in done.stderr) == bool(code)
    assert ("error: uv is missing" in done.stderr) == bool(code) and (done.stdout == "") == bool(code)


# ---- A plan, which is shown and not run


def test_a_plan_is_understood_as_people_write_it_and_says_what_is_paid_for(base_folder):
    """
    Eight H100: the commands in order, hours by hand, and nothing is run or left. Of six GPUs four compute and six are
    paid for, also in the stages after pretraining.
    """
    plans = [bash(REPO, "speedrun.sh", f"--plan={plan}", "--price=3", "--run=mine", **no_venv()).stdout
             for plan in ("8,H100,80", "8xH100", "8,h100", "6,H100,80", "1,RTX-4090,24")]
    shown, *spelled, six, one = [plan.replace("h100", "H100") for plan in plans]
    assert spelled == [shown] * 2 and not any(base_folder.iterdir())
    for plan, words in ((shown, ("cost $57 to $68 for 8 GPU(s) at $3", "in all 2.4–2.8 hours: ")),
                        (six, ("cost $70 to $80 for 6 GPU(s) at $3", "2 of 6 GPUs stand idle: rent 4\n")),
                        (six, ("disk 240 GiB; downloads 11 GB of text",)), (one, (" --depth=16 ", "=8 --save_every"))):
        assert [word for word in words if word not in plan] == [], plan
    assert "stand idle" not in shown and shown.count("--run=mine") == 4

    assert bash(REPO, "-c", "bash speedrun.sh --plan=1,H100 | true", **no_venv()).stderr.count("\n") == 1
    refused = bash(REPO, "speedrun.sh", "--plan=1,H100,8O", **no_venv())
    assert refused.returncode == 2 and "\nerror: " in refused.stderr and not refused.stdout
    assert problems(shown, REPO) == []
    commands = re.findall(r"^(?:python|torchrun .*--nproc_per_node=8 .*?) -m scripts\.(\w+) ", shown, re.M)
    stages = "base_train base_eval mid_train chat_eval chat_sft chat_eval chat_rl chat_eval"
    assert commands == ["dataset", "library", "tok_train", *stages.split(), "report"]
    # 9.4 tokens for each parameter of matrices and head; the step's time is in tests/test_plan.py.
    steps = round(9.4 * (12 * 22 * 1408**2 + 49152 * 1408) / 2**20)
    config, gpu = config_from_depth(22, 49152, 2048, arch="modern"), datasheet_gpu("H100")
    # Published steps of eight GPUs take at least 1.13 times as long; only pretraining computes in 8 bits.
    step, later = (1.13 * step_time(config, 32, 2, 8, gpu, fp8).seconds for fp8 in (True, False))
    assert f"{steps:,} steps of 1,048,576 tokens in 2 micro-step(s)" in shown
    hours = steps * step / 3600
    assert f": pretraining {hours:.2f}–{1.2 / 1.13 * hours:.2f}, mid-training" in shown
    assert f"at best {2**20 / step:,.0f} tokens per second, " in shown
    # RL's hours follow from its steps: a GPU samples 32 answers of each at a time, a tenth more in evaluations. Then
    # 2 x 900 and 2,800 answers, 32 at a time; 40 million tokens and 500,000 conversations of 1,100 of other stages, 30
    # million of evaluations, and what RL trains on; 0.4 hours.
    for longest, slower, printed in (150, 1, " 2.4–"), (256, 1.2 / 1.13, "–2.8 hours: "):
        decoded = (1.1 * 467 + 4600 / 8 / 32) * longest * 0.0224 / 3600
        others = (4e7 + 500_000 * 1100 + 3e7 + 467 * 256 * 300) / 2**20 * later / 3600
        assert f"{slower * (hours + others) + decoded + 0.4:.1f}" in printed and printed in shown
    assert " --depth=22 --target_param_data_ratio=9.4 --device_batch_size=32 " in shown
    assert " --num_shards=125\n" in shown and shown.count("--vocab_size=49152") == 1


# ---- How large a model


@pytest.fixture
def choose(tmp_path, monkeypatch, capsys):
    """A call of scripts.plan on a machine that is described; the variables, and what it prints."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # `configure` sets another

    def call(*arguments: str, gpus: int = 0, peak: float = 989e12, rows=lambda *_: 32, ms: float = 0,
             free_gib: int = 300) -> tuple[str, str]:
        monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
        monkeypatch.setattr("nanochat.runtime.devices.choose_device_type", lambda _: "cuda" if gpus else "cpu")
        monkeypatch.setattr("nanochat.runtime.devices.compute_dtype", lambda *_: torch.bfloat16)
        monkeypatch.setattr("nanochat.runtime.flops.gpu_here", lambda _: Gpu("H100", peak, peak / 295, 80))
        monkeypatch.setattr("nanochat.plan.step_trial.rows_that_train", lambda most, config, checkpointing,
                            ranks: min(rows(config.n_layer, checkpointing), most))
        monkeypatch.setattr("nanochat.plan.step_trial.try_steps", lambda config, *_: config.n_layer * ms)
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free_gib * GIB))
        file = tmp_path / "gpus"
        with contextlib.suppress(SystemExit):
            run_as_main("scripts.plan", [f"--file={file}", *arguments])
        return file.read_text().strip() if gpus else "", capsys.readouterr().out

    return call


@pytest.mark.parametrize("machine, variables", [
    (dict(gpus=8), EIGHT),                                              # enough of everything
    (dict(gpus=1, peak=3e13, rows=lambda *_: 4),                        # slow: the smallest, however long it takes
     f"RANKS=1 DEPTH=12 ROWS=4 FEW=4 RECOMPUTE=False VOCAB=32768 RATIO=8 SHARDS=20 {ALL.replace('500000', '123782')}"),
    (dict(gpus=2, peak=3e14, rows=lambda _, checkpointing: 2 * checkpointing),  # activations are computed twice
     f"RANKS=2 DEPTH=20 ROWS=2 FEW=2 RECOMPUTE=True {TWENTY}"),
    (dict(gpus=3, rows=lambda depth, _: 8 if depth < 22 else 0),        # the largest does not fit; one GPU is idle
     f"RANKS=2 DEPTH=20 ROWS=8 FEW=8 RECOMPUTE=False {TWENTY}"),
    (dict(gpus=64), EIGHT.replace("RANKS=8", "RANKS=64").replace("ROWS=32 FEW=4", "ROWS=4 FEW=1"))])
def test_the_largest_model_that_fits_and_ends_in_a_day(choose, machine, variables):
    """A run that goes on stays the same model, whatever memory, disk and speed are by then; ranks are those of now."""
    assert choose(**machine)[0] == variables
    machine |= dict(gpus=2 * machine["gpus"], rows=lambda *_: 1, free_gib=0)
    ranks, few = (int(re.search(rf"{name}=(\d+)", variables)[1]) for name in ("RANKS", "FEW"))
    later = variables.replace(f"RANKS={ranks}", f"RANKS={2 * ranks}")
    assert choose(**machine)[0] == later.replace(f"FEW={few}", f"FEW={max(min(few, 16 // ranks), 1)}")


def test_all_stages_end_in_the_hours(choose, tmp_path):
    """
    On one H100: of all depths the largest in time, then the most tokens, 8 to 16 a parameter, then the most RL; kept
    later. Pretraining has 35% of one hour, and 60% of two or more.
    """
    gpu = Gpu("H100", 989e12, 989e12 / 295, 80)
    for hours, share in (1, 0.35), (2, 0.6), (4, 0.6), (8, 0.6):
        line, printed = choose(f"--hours={hours}", gpus=1)
        costs = {(depth, ratio, steps): cost(Choice(depth, 32, False, ratio, steps), 1, gpu)
                 for depth in SIZES if depth < 22 for ratio, steps in LENGTHS}
        depth, ratio, steps = best = max(found for found in costs if costs[found].most <= hours)
        assert f" DEPTH={depth} ROWS=32 " in line and f" RATIO={ratio:g} " in line and f" RL={steps} " in line
        assert f"–{costs[best].most:.1f} hours: pretraining " in printed
        assert costs[best].stages["pretraining"][1] >= share * costs[best].most
        assert choose(gpus=1, peak=1e12)[0] == line
        (tmp_path / "gpus").unlink()
    with pytest.raises(UserError, match="depth 14 takes up to 1.9 hours"):
        choose("--hours=1.8", "--depth=14", gpus=1)
    with pytest.raises(UserError, match="depth 14 takes up to 3"):  # with activations computed twice
        choose("--hours=2.5", "--depth=14", gpus=1, rows=lambda _, checkpointing: 2 * checkpointing)


def test_a_machine_that_is_too_small_is_refused(choose, base_folder, tmp_path):
    with pytest.raises(UserError, match="240 GiB of disk, and 239.0 are free"):
        choose(gpus=8, free_gib=239)
    with pytest.raises(UserError, match="depth 12 does not fit"):
        choose(gpus=8, rows=lambda *_: 0)
    assert not (tmp_path / "gpus").exists()
    (tmp_path / "gpus").write_text("RANKS=8 DEPTH=24 ROWS=16 FEW=4 RECOMPUTE=False SHARDS=125\n")
    with pytest.raises(UserError, match="gpus has no depth of 22, 20"):
        choose(gpus=8)


def test_how_long_a_cpu_takes(choose, tmp_path, base_folder):
    """A step takes so many milliseconds a layer. The page that shows the run reads the seconds of each step."""
    show = 'once() { python -m scripts.once --show "$@"; }; python() { case "$2" in *once) command python "$@"; esac; }'
    shown = bash(REPO, "-c", f"{show}; depth=4; . runs/cpu.sh", **no_venv()).stdout
    steps = re.findall("^=== (.*)$", shown, re.M)
    assert [step for step in steps if step not in ("library-python", "report-assistant-d4")] == [*cpu_seconds(4, 200)]
    (base_folder / "once").mkdir()
    (base_folder / "once" / "base-assistant-d4.json").touch()
    for layers, ms in ((2, 100), (4, 50)):
        shown = choose(f"--depth={layers}", ms=ms)[1]
        expected = cpu_seconds(layers, 200)
        assert json.loads((tmp_path / "gpus").read_text()) == expected
        done = expected["base-assistant-d4"] if layers == 4 else 0
        assert f"about {(sum(expected.values()) - done) / 60:.0f} minutes" in shown


# ---- A real run


def rehearse(until: str | None = None) -> str:
    """What `bash speedrun.sh --rehearse` prints; with `until` it and its processes are killed when a line says that."""
    process = subprocess.Popen(
        ["bash", "speedrun.sh", "--rehearse"], cwd=REPO, env=os.environ | no_venv(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )
    lines, deadline = [], time.monotonic() + 1000
    try:
        for line in process.stdout:
            lines.append(line)
            if until and until in line or time.monotonic() > deadline:
                break
    finally:
        if until or time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL)
    code = process.wait(timeout=300)
    assert until or code == 0, "".join(lines)
    return "".join(lines)


def what_was_skipped(output: str) -> list[str]:
    return re.findall("^=== (.*), .*\ndone before$", output, re.M)


def test_a_killed_speedrun_does_no_finished_stage_again(base_folder):
    """The stage that was killed runs again, and the next ones; what finished stages have left stays as it is."""
    folder = base_folder / "rehearsal"
    killed = rehearse(until="=== chat_eval-sft-rehearsal")
    assert "done before" not in killed and "=== sft-rehearsal" in killed

    names = "data/*/shard_*", "tokenizer/*", "*_checkpoints/rehearsal/step_*"
    kept = [path for name in names for path in folder.glob(name)]
    before = {path: path.stat().st_mtime_ns for top in kept for path in list(top.glob("*")) or [top]}
    output = rehearse()
    finished = ["dataset-tinyworld", "tok_train-tinyworld"]
    finished += [f"{stage}-rehearsal" for stage in ("base", "base_eval", "mid", "chat_eval-mid", "sft")]
    assert what_was_skipped(output) == finished
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert f"everything works; the models in {folder} have learned nothing" in output
    report = (folder / "report" / "report.md").read_text()
    for title in ("Base model: pretraining", "Mid-training", "Supervised fine-tuning", "Reinforcement learning"):
        assert title in report
