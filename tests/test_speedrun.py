"""The speedrun as a user has it: stopped, run again, with a damaged result; and what decides that a stage is done."""
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPO, run_module, warm_python
from ranks import run_as_main
from test_runs import problems

from nanochat.plan.choice import choose_for_gpus
from nanochat.runtime.errors import UserError
from nanochat.tasks import SPEC, TASKS


def no_venv() -> dict[str, str]:
    """The settings with which speedrun.sh takes the Python on the PATH."""
    return {"NANOCHAT_NO_VENV": "1", "PATH": f"{Path(warm_python()).parent}:{os.environ['PATH']}"}


def once(name: str, command: str, **paths: str) -> tuple[int, str, str]:
    """scripts.once with a command of the shell, run in the base folder; its exit code and what it printed."""
    options, script = [f"--{option}={path}" for option, path in paths.items()], f"cd $NANOCHAT_BASE_DIR && {command}"
    done = run_module("scripts.once", name, *options, "--", "sh", "-c", script)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(autouse=True)
def there(base_folder):
    base_folder.mkdir()


def test_once_repeats_only_what_is_no_longer_as_it_was(base_folder):
    """Not again while command, input and result are the same; again when any of them has changed, and only then."""
    script = "mkdir -p made && cat input >> made/result && echo x >> runs"
    result = base_folder / "made" / "result"

    def runs(command: str = script) -> int:
        """How often the command has run after two more calls; the second always finds it done."""
        once("stage", command, needs="input", makes="made")
        count = (base_folder / "runs").read_text().count("x")
        assert once("stage", command, needs="input", makes="made") == (0, "done before: made\n", "")
        assert (base_folder / "runs").read_text().count("x") == count
        return count

    (base_folder / "input").write_text("a")
    assert runs() == 1
    changes = [
        lambda: (base_folder / "input").write_text("b"),
        lambda: result.write_text("damaged"),
        lambda: result.unlink(),
        lambda: result.with_name("another").write_text("that it did not make"),
    ]
    for before, change in enumerate(changes, 1):
        change()
        assert runs() == before + 1
    assert runs(script + " && true") == 6, "the command itself"
    result.with_name("metrics.jsonl").write_text("a log says nothing about the result")
    assert runs(script + " && true") == 6


def test_once_knows_a_run_that_was_stopped_from_one_that_has_ended():
    """A training run that is sent SIGTERM saves, and ends well, in the middle."""
    meta = """echo '{"step": %d, "num_iterations": 1000000}' > run/step_%06d/meta.json"""
    mine = "mkdir -p run/step_%06d run/step_9999999.mine && touch run/step_9999999.mine/meta.json && " + meta
    for step in (20, 999_999):  # the newest counts, by number
        message = "error: run was stopped before its end; the same command goes on\n"
        assert once("run", mine % (step, step, step), makes="run") == (1, "", message)
    assert once("run", mine % (10**6, 10**6, 10**6), makes="run") == (0, "", "")
    assert once("run", mine % (10**6, 10**6, 10**6), makes="run") == (0, "done before: run\n", "")


def test_once_reports_failures_as_the_command_did_and_remembers_none_of_them(base_folder):
    assert once("stage", "echo why >&2; exit 7", makes="result") == (7, "", "why\n")
    assert once("stage", "kill -9 $$", makes="result")[0] == 137
    message = f"error: stage has ended without making result in {base_folder}\n"
    assert once("stage", "true", makes="result") == (1, "", message)
    assert once("stage", "echo x > result", makes="result") == (0, "", "")
    assert once("stage", "echo x > result", makes="result") == (0, "done before: result\n", "")


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
    arguments = ["stage", "--makes", "result", "--", sys.executable, "-c", SAVES]

    def start() -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, "-m", "scripts.once", *arguments], cwd=REPO, start_new_session=True)
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
    (folder / "runs").mkdir(exist_ok=True)
    runs = [f"runs/{name}.sh" for name in ("prepare", "three_steps", "cpu", "rehearsal")]
    for name in ("speedrun.sh", "setup.sh", "pyproject.toml", *runs):
        (folder / name).write_bytes((REPO / name).read_bytes())


def write_python(folder: Path, script: str) -> None:
    """A stand-in for the environment's Python: a script of the shell."""
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text("#!/bin/sh\n" + script)
    python.chmod(0o755)


def bash(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    settings = dict(cwd=folder, env=os.environ | env, text=True, capture_output=True, timeout=500)
    return subprocess.run(["bash", *arguments], **settings)


def stand_in(folder: Path, chosen: str, gpus: int = 8, fails: str = "nothing") -> None:
    """
    speedrun.sh in a folder whose Python counts that many GPUs, whose doctor chooses these variables, which fails at
    commands with that text, and writes down all others in `calls`.
    """
    copy_scripts(folder)
    write_python(folder, f"""
case "$*" in
    *device_count*) echo {gpus} ;;
    *--choose=*)
        for word; do case $word in --choose=*) file=${{word#*=}} ;; esac; done
        mkdir -p "${{file%/*}}" && echo "{chosen}" > "$file" ;;
    *{fails}*) exit 7 ;;
    *) echo "$@" >> calls ;;
esac
""")


def speedrun(folder: Path, *arguments: str) -> tuple[str, list[str]]:
    """What a run with the stand-in prints, and the stages that it asks for."""
    (folder / "calls").unlink(missing_ok=True)
    done = bash(folder, "speedrun.sh", *arguments, NANOCHAT_BASE_DIR=str(folder / "a base"))
    assert done.returncode == 0, done.stderr
    calls = (folder / "calls").read_text().splitlines()
    return done.stdout, [line for line in calls if "pip" not in line and not line.startswith("-c")]


@pytest.mark.parametrize("gpus, ranks, depth, rows, recompute", [
    (8, 8, 24, 16, False), (1, 1, 12, 4, False), (1, 1, 20, 2, True), (3, 2, 24, 16, False)])
def test_what_is_run_on_gpus(tmp_path, gpus, ranks, depth, rows, recompute):
    few = min(rows, 4)
    stand_in(tmp_path, f"RANKS={ranks} DEPTH={depth} ROWS={rows} FEW={few} RECOMPUTE={recompute} SHARDS=20", gpus)
    _, (_, *calls) = speedrun(tmp_path)
    stand_in(tmp_path, "RANKS=1 DEPTH=8", gpus)
    _, (_, *again) = speedrun(tmp_path)  # as the first, whatever the doctor says by then
    assert calls == again, "the same commands, so that what is finished is known"
    stages = ("base_train", "mid_train", "chat_sft", "chat_rl")
    trained = {script: line for line in calls for script in stages if f"scripts.{script} " in line}
    for script, line in trained.items():
        assert f"torchrun --standalone --nproc_per_node={ranks} " in line
        assert f"--model_tag=speedrun-d{depth} --resume=auto" in line
        assert f"--activation_checkpointing={recompute}" in line
        assert f"--device_batch_size={rows if script in ('base_train', 'mid_train') else few} " in line
    assert len(trained) == 4 and f"--depth={depth} " in trained["base_train"]
    assert 524288 % (rows * 2048 * ranks) == 0, "what mid-training takes; pretraining's batch is chosen"
    steps, before = rehearsed_steps(calls)
    same = trained["base_train"].partition(" torchrun ")[2].replace("climbmix", "python")
    shape = same.replace("restarts=3", "restarts=0").replace("--resume=auto", "--overwrite")
    tokens = 2 * rows * 2048 * ranks
    assert steps.partition(" torchrun ")[2] == f"{shape} --total_batch_size={tokens} --num_iterations=3"
    assert "climbmix" not in "".join(before)
    _, (_, *rehearsed) = speedrun(tmp_path, "--rehearse")
    assert rehearsed_steps(rehearsed) == (steps, before), "the same, so that they are not done again"
    stages = [line for line in rehearsed if "scripts.base_train" in line]
    assert len(stages) == 2 and "--depth=2" in stages[1]
    assert (f"torchrun --standalone --nproc_per_node={gpus} " in stages[1]) == (gpus > 1)


@pytest.mark.parametrize("ranks, rate, fit, chosen", [
    (8, 4.7e14, lambda depth, most, twice: most, (24, 16, False)),          # enough of everything
    (32, 4.7e14, lambda depth, most, twice: most, (24, 8, False)),          # 256 rows over all ranks
    (1, 1e13, lambda depth, most, twice: 4, (12, 4, False)),                # slow: the smallest, however long it takes
    (8, 4.7e14, lambda depth, most, twice: 2 * twice, (24, 2, True)),       # activations are computed twice
    (8, 4.7e14, lambda depth, most, twice: depth < 17 and 8, (16, 8, False))])
def test_the_largest_model_that_fits_and_is_done_in_a_day_is_chosen(ranks, rate, fit, chosen):
    *choice, run = choose_for_gpus(ranks, rate, fit)
    assert tuple(choice) == chosen and (run.hours <= 12 or chosen[0] == 12)
    with pytest.raises(UserError, match="depth 12 does not fit into this GPU's memory"):
        choose_for_gpus(ranks, rate, lambda *_: 0)


def rehearsed_steps(calls: list[str]) -> tuple[str, list[str]]:
    """The command of the three steps before the downloads, and all commands up to it."""
    (place,) = (i for i, line in enumerate(calls) if "--num_iterations=3" in line)
    return calls[place], calls[: place + 1]


@pytest.mark.parametrize("argument, code, words", [
    ("--help", 0, "--plan=8,H100,80    # only says"), ("-h", 0, "--rehearse     # each stage"),
    ("--folder=/not/there", 2, "error: no folder /not/there"), ("--folder=tests-of-none", 2, "no folder tests-of-none"),
    ("--plan", 2, "error: --plan: expected --plan=8,H100,80"),
    ("--chatt", 2, "--chatt is unknown")])
def test_an_argument_is_answered_before_anything_is_made(tmp_path, argument, code, words):
    """A stand-in for Python would write down that it was called."""
    stand_in(tmp_path, "")
    done = bash(tmp_path, "speedrun.sh", argument)
    assert done.returncode == code and words in (done.stderr if code else done.stdout), done
    assert not (tmp_path / "calls").exists()
    if code == 0:
        assert "set -euo" not in done.stdout and "#!/" not in done.stdout


@pytest.mark.parametrize("script", ["miniseries.sh", "scaling_laws.sh", "multi_node.sh"])
def test_scripts_of_series_print_their_help_and_refuse_what_they_would_ignore(script):
    shown = bash(REPO, f"runs/{script}", "--help", **no_venv())
    assert shown.returncode == 0 and f"bash runs/{script}" in shown.stdout and "set -euo" not in shown.stdout
    if script != "multi_node.sh":
        refused = bash(REPO, f"runs/{script}", "--depth=3", **no_venv())
        assert refused.returncode == 2 and "--depth=3 is unknown" in refused.stderr


def test_a_plan_is_understood_as_people_write_it_and_says_what_is_paid_for():
    """Of six GPUs four compute and six are paid for, also in the stages after pretraining."""
    plans = [bash(REPO, "speedrun.sh", f"--plan={plan}", PRICE="3", **no_venv()).stdout
             for plan in ("8,H100,80", "8xH100", "8,h100", "6,H100,80")]
    plain, *spelled, six = [plan.replace("h100", "H100") for plan in plans]
    assert spelled == [plain] * 2 and "=== report" in plain
    assert "3 to 4 hours and $73 to $97 for 8 GPUs at $3 " in plain and "of them stand idle" not in plain
    assert "6 to 8 hours and $109 to $145 for 6 GPUs at $3 " in six and "2 of them stand idle, so rent 4; " in six
    assert "disk: 200 GiB; downloads: 11 GB of text" in six
    unknown = bash(REPO, "speedrun.sh", "--plan=8,A100", **no_venv())
    assert unknown.returncode == 1 and "error: plan=8,A100: expected 8,H100,80" in unknown.stderr


def test_nothing_is_downloaded_where_three_steps_fail(tmp_path):
    """As where they do not compile, or need more memory than was thought."""
    stand_in(tmp_path, "RANKS=8 DEPTH=24 ROWS=16 FEW=4 RECOMPUTE=False SHARDS=125", fails="--num_iterations=3")
    for argument in ([], ["--rehearse"]):
        done = bash(tmp_path, "speedrun.sh", *argument, NANOCHAT_BASE_DIR=str(tmp_path / "base"))
        assert done.returncode == 7, done.stderr
    calls = (tmp_path / "calls").read_text()
    assert "--source=python" in calls and "climbmix" not in calls and "tinyworld" not in calls


def test_a_plan_shows_the_commands_for_gpus_that_are_not_here(base_folder):
    """Eight H100: the commands in order, with settings that exist; hours by hand; and nothing is run or left."""
    shown = bash(REPO, "speedrun.sh", "--plan=8,H100,80", **no_venv())
    assert shown.returncode == 0 and not any(base_folder.iterdir()), shown.stderr
    assert problems(shown.stdout, REPO) == []
    commands = re.findall(r"^(?:python|torchrun .*--nproc_per_node=8 .*?) -m scripts\.(\w+) ", shown.stdout, re.M)
    stages = "base_train base_eval mid_train chat_eval chat_sft chat_eval chat_rl chat_eval"
    assert commands == ["dataset", "library", "tok_train", *stages.split(), "report"]
    specs = ", ".join(re.findall(r'"--tasks=([^"]+)"', shown.stdout)).split(", ")
    assert len(specs) > 30 and all(SPEC.fullmatch(spec)["name"] in TASKS for spec in specs)
    computing, windows = 12 * 24 * 1536**2 + 32768 * 1536, 6 * 2048 + 18 * 512
    steps = round(8 * computing / 2**20)
    hours = (6 * computing + 12 * 1536 * windows) / (8 * 0.48 * 989e12) / 3600  # per token
    assert f"{steps:,} steps of 1,048,576 tokens in 4 micro-step(s)" in shown.stdout
    assert f"{hours * steps * 2**20:.2f} hours if all communication hides" in shown.stdout


def test_a_slow_machine_trains_a_smaller_model_unless_asked_for_all(tmp_path, base_folder, monkeypatch, capsys):
    """A step of depth 4 takes so many milliseconds if nothing else runs, and as the machine is; of depth 2 a third."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # `configure` sets another
    times = {}
    monkeypatch.setattr("nanochat.plan.step_trial.try_steps", lambda config, *_: times[config.n_layer])

    def chosen(alone: float, busy: float, *arguments: str) -> tuple[str, str]:
        times.update({4: [alone, busy], 2: [alone / 3, busy / 3]})
        with pytest.raises(SystemExit):
            run_as_main("scripts.doctor", [f"--choose={tmp_path / 'choice'}", "--device_type=cpu", *arguments])
        return (tmp_path / "choice").read_text(), capsys.readouterr().out

    assert chosen(400, 400) == ("RANKS=0 DEPTH=4\n", "on this machine this will take about 27 minutes\n")
    variables, out = chosen(400, 2400)
    assert variables == "RANKS=0 DEPTH=4\n"
    assert "about 27 minutes once other processes have ended (beside them, as now, 147)\n" in out
    variables, out = chosen(2500, 2500)
    assert variables == "RANKS=0 DEPTH=2\n" and "about 153 minutes\n" in out
    assert out.endswith("smaller model instead, in about 52 minutes\nbash speedrun.sh --full trains the larger one\n")
    assert chosen(3000, 3000, "--full") == ("RANKS=0 DEPTH=4\n", "")


def test_what_was_chosen_first_stays_chosen(tmp_path):
    for chosen, arguments, depth in (("DEPTH=2", [], 2), ("DEPTH=4", [], 2), ("DEPTH=4", ["--full"], 4)):
        stand_in(tmp_path, f"RANKS=0 {chosen}", gpus=0)
        calls = [line for line in speedrun(tmp_path, *arguments)[1] if "model_tag" in line]
        assert len(calls) == 9 and all(f"--model_tag=assistant-d{depth}" in line for line in calls)
        assert f"--depth={depth} " in calls[0]


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


def what_was_skipped(output: str) -> set[str]:
    lines = [line.removeprefix("done before: ") for line in output.splitlines() if line.startswith("done before: ")]
    return {name for line in lines for name in line.split(", ")}


def test_a_killed_speedrun_does_no_finished_stage_again(base_folder):
    """
    Where meanwhile a byte of a model changes, the last step of that stage is made again, to the same weights, so that
    what came of them stays.
    """
    folder = base_folder / "rehearsal"
    killed = rehearse(until="=== evaluation: sft")
    assert "done before" not in killed and "=== fine-tuning" in killed

    evaluation = "report/sections/tinyworld/rehearsal/base_eval.json"
    finished = {"tokenizer/tinyworld", "base_checkpoints/rehearsal", evaluation}
    kept = [folder / name for name in finished | {"sft_checkpoints/rehearsal"}]
    before = {path: path.stat().st_mtime_ns for top in kept for path in list(top.glob("step_*/*")) or [top]}
    weights = sorted((folder / "mid_checkpoints" / "rehearsal").glob("step_*/model.safetensors"))[-1]
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    output = rehearse()
    assert what_was_skipped(output) == finished and "does not match its checksum" in output
    assert weights.read_bytes() == whole
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert f"everything works; the models in {folder} have learnt nothing" in output
    report = (folder / "report" / "report.md").read_text()
    for title in ("Base model: pretraining", "Mid-training", "Supervised fine-tuning", "Reinforcement learning"):
        assert title in report

