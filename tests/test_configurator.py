"""The settings of small scripts, in this process and as real ones; what is expected is written out by hand."""
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

SCRIPT = '''"""
Train a little.

    python script.py
"""
import os
from typing import Literal
from configurator import configure
# ---- Model
depth = 20                  # layers; the width follows
max_seq_len = 2048          # tokens per row
# ---- Batch and rate
total_batch_size = 524288   # tokens # per step
rate: float = 1             # learning rate
decay = 0.1
name = "a=b"                # not a comment: "# this"
compile = True              # compile by block
quiet = False
# ----------
dtype: Literal["auto", "float32", "bfloat16"] = "auto"
resume_from_step: int | None = None  # step to resume from
clip: float | None = 1.0
batch: int | Literal["auto"] = "auto"
stop_at: None | int = None
home = os.sep
doubled = depth * 2
sizes = [1, 2]
config = configure(globals())
after = 4
'''


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def run(script: Path, monkeypatch: pytest.MonkeyPatch, *argv: str) -> dict[str, Any]:
    """The globals of the script after it ran in this process with that command line."""
    monkeypatch.setattr(sys, "argv", [str(script), *argv])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # put back afterwards: configure installs its own
    return runpy.run_path(str(script))


def refused(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line of a run that ends with exit code 2."""
    with pytest.raises(SystemExit) as stop:
        run(script, monkeypatch, *argv)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err.strip()


DEFAULTS = {"depth": 20, "max_seq_len": 2048, "total_batch_size": 524288, "rate": 1, "decay": 0.1, "name": "a=b",
            "compile": True, "quiet": False, "dtype": "auto", "resume_from_step": None, "clip": 1.0, "batch": "auto",
            "stop_at": None}


def test_settings_are_the_plain_assignments_above_the_call_in_source_order(script, monkeypatch):
    config = run(script, monkeypatch)["config"]
    assert config == DEFAULTS and list(config) == list(DEFAULTS) and json.loads(json.dumps(config)) == config


@pytest.mark.parametrize(("argv", "changed"), [
    (["--depth=4", "--max_seq_len=64", "--rate=3"], {"depth": 4, "max_seq_len": 64, "rate": 3.0}),
    (["--total_batch_size=1e6", "--depth=-1", "--clip=None"], {"total_batch_size": 1000000, "depth": -1, "clip": None}),
    (["--name=x=y=z", "--quiet", "--compile=no"], {"name": "x=y=z", "quiet": True, "compile": False}),
    (["--name=None", "--compile=0", "--batch=16"], {"name": "None", "compile": False, "batch": 16}),
    (["--name=", "--dtype=bfloat16", "--clip=2"], {"name": "", "dtype": "bfloat16", "clip": 2.0}),
    (["--", "--depth", "4", "--name", "x y"], {"depth": 4, "name": "x y"}),  # torchrun's separator
    (["--compile", "False", "--quiet", "--depth=4"], {"compile": False, "quiet": True, "depth": 4}),
])
def test_an_override_lands_in_config_and_globals_in_the_settings_type(script, monkeypatch, argv, changed):
    scope = run(script, monkeypatch, *argv)
    assert scope["config"] == DEFAULTS | changed
    for name, value in changed.items():
        assert scope[name] == value and type(scope[name]) is type(value)


@pytest.mark.parametrize(("argv", "said"), [
    (["--depht=4"], "--depht=4: there is no setting 'depht'; did you mean 'depth'"),
    (["--max-seq-len=64"], "no setting 'max-seq-len'; did you mean 'max_seq_len'"),
    (["--after=5"], "no setting 'after'"),
    (["--depth=2.5"], "--depth=2.5: depth takes int (default: 20)"),
    (["--depth=__import__('os').getpid()"], "depth takes int"),
    (["--rate=nan"], "rate takes float"),
    (["--dtype=float16"], "dtype takes 'auto' or 'float32' or 'bfloat16'"),
    (["--depth", "--name", "x"], "--depth: expected one argument"),
    (["depth=4"], "stray argument 'depth=4'"),
    (["--compile", "4"], "compile takes bool"),
])
def test_what_does_not_fit_is_one_line_that_names_it(script, monkeypatch, capsys, argv, said):
    assert said in refused(script, monkeypatch, capsys, *argv)


def test_every_command_refuses_a_mistyped_setting_before_torch_is_imported(tmp_path):
    """A stand-in for torch says that it was imported, and ends the process."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    commands = [f"scripts.{path.stem}" for path in sorted((ROOT / "scripts").glob("[!_]*.py")) if path.stem != "once"]
    assert len(commands) >= 15
    for command in commands:
        done = subprocess.run([sys.executable, "-m", command, "--no_such_setting", "4"], cwd=tmp_path, env=environment,
                              capture_output=True, text=True, timeout=300)
        assert done.returncode == 2, (command, done.stderr)
        assert done.stderr.startswith("error: --no_such_setting: there is no setting")


HELP = '''Train a little.

    python script.py

Model
  --depth=20                 layers; the width follows
  --max_seq_len=2048         tokens per row

Batch and rate
  --total_batch_size=524288  tokens # per step
  --rate=1                   learning rate
  --decay=0.1
  --name=a=b                 not a comment: "# this"
  --compile=True             compile by block
  --quiet=False

Settings
  --dtype=auto               [auto, float32, bfloat16]
  --resume_from_step=None    step to resume from
  --clip=1.0
  --batch=auto               [auto]
  --stop_at=None
'''


def test_help_prints_docstring_sections_defaults_and_comments(script, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        run(script, monkeypatch, "--depth=3", "--help")
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err) == (0, HELP, "")


RANGED = """from configurator import configure
depth = 20       # [1..] layers
part = 0.4       # [0..1] of the run
steps = -1       # [-1, 1..] of training
heat = 1.0       # [0.1..] of the samples
top: int | None = None  # [1..] likeliest tokens
config = configure(globals())
"""


@pytest.mark.parametrize(("argument", "value"), [
    ("--depth=1", 1), ("--depth=0", None), ("--part=0", 0.0), ("--part=1.01", None), ("--steps=-1", -1),
    ("--steps=0", None), ("--heat=0.1", 0.1), ("--heat=0", None), ("--top=None", "None"), ("--top=0", None),
])
def test_numbers_stay_in_the_range_that_the_comment_declares(tmp_path, monkeypatch, capsys, argument, value):
    """None here: refused, with the range in the line."""
    script = tmp_path / "script.py"
    script.write_text(RANGED)
    name = argument[2:].partition("=")[0]
    if value is not None:
        assert run(script, monkeypatch, argument)["config"][name] == (None if value == "None" else value)
    else:
        ranges = {"depth": "[1..]", "part": "[0..1]", "steps": "[-1, 1..]", "heat": "[0.1..]", "top": "[1..]"}
        line = refused(script, monkeypatch, capsys, argument)
        assert line.startswith(f"error: {argument}: {name} takes ") and f" in {ranges[name]} (default: " in line


def test_what_a_terminal_or_log_cannot_show_is_escaped_and_ends_no_run(tmp_path):
    """Also --help, which holds such a character; importing the library alone changes nothing."""
    path = tmp_path / "printing.py"
    path.write_text('"""Prints …"""\nfrom configurator import configure\nk = 1\nconfigure(globals())\nprint("日é")\n')
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "latin-1"}

    def output(*command: str) -> bytes:
        return subprocess.run([sys.executable, *command], env=environment, capture_output=True, timeout=60).stdout

    assert output(str(path)) == b"\\u65e5\xe9\n"
    assert output(str(path), "--help").startswith(b"Prints \\u2026\n")
    library = "import nanochat.runtime.console, configurator, sys; print(sys.stdout.errors)"
    assert output("-c", library) == b"strict\n"
