"""The settings of small scripts, in this process and as real ones; what is expected is written out by hand."""
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from configurator import configure

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
total_batch_size = 2**19    # tokens # per step
rate: float = 1             # learning rate
decay = 0.1
name = "a=b"                # not a comment: "# this"
compile = True              # compile by block
quiet = (
    False                   # on its own line
)
# ----------
dtype: Literal["auto", "float32", "bfloat16"] = "auto"
resume_from_step: int | None = None  # step to resume from
clip: float | None = 1.0
batch: int | Literal["auto"] = "auto"
stop_at: None | int = None
_private = 3
home = os.sep
both = total = 5
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


def test_values_come_from_the_globals_not_from_the_source(tmp_path, monkeypatch):
    """A value computed after its plain line is the default; the error hook is installed."""
    path = tmp_path / "script.py"
    path.write_text("from configurator import configure\nimport sys\nsize = 3\nsize = size * 7\n"
                    "config = configure(globals(), argv=[])\nhook = sys.excepthook\n")
    hook_before = sys.excepthook
    scope = run(path, monkeypatch)
    assert scope["config"] == {"size": 21} and scope["hook"] is not hook_before


@pytest.mark.parametrize(("argument", "name", "value"), [
    ("--depth=4", "depth", 4),
    ("--max-seq-len=64", "max_seq_len", 64),
    ("--max_seq-len=64", "max_seq_len", 64),
    ("--total_batch_size=524288*2", "total_batch_size", 1048576),
    ("--total_batch_size=2**19", "total_batch_size", 524288),
    ("--total_batch_size=1e6", "total_batch_size", 1000000),
    ("--total_batch_size=-(7 - 3) + 9//2*10/2", "total_batch_size", 16),
    ("--total_batch_size=1_000", "total_batch_size", 1000),
    ("--depth=-1", "depth", -1),
    ("--rate=3", "rate", 3.0),
    ("--rate=1e-3", "rate", 0.001),
    ("--rate=2**-1", "rate", 0.5),
    ("--decay=3/4", "decay", 0.75),
    ("--name=", "name", ""),
    ("--name=x=y=z", "name", "x=y=z"),
    ("--name= 2**3 ", "name", " 2**3 "),
    ("--name=None", "name", "None"),
    ("--name=True", "name", "True"),
    ("--quiet", "quiet", True),
    *((f"--compile={word}", "compile", True) for word in ("True", "true", "1", "yes")),
    *((f"--compile={word}", "compile", False) for word in ("False", "false", "0", "no")),
    ("--dtype=bfloat16", "dtype", "bfloat16"),
    ("--resume_from_step=None", "resume_from_step", None),
    ("--resume_from_step=1", "resume_from_step", 1),
    ("--clip=None", "clip", None),
    ("--clip=2", "clip", 2.0),
    ("--batch=16", "batch", 16),
    ("--batch=auto", "batch", "auto"),
    ("--stop_at=7", "stop_at", 7),
])
def test_an_override_lands_in_config_and_globals_in_the_settings_type(script, monkeypatch, argument, name, value):
    scope = run(script, monkeypatch, argument)
    assert scope["config"] == DEFAULTS | {name: value}
    assert scope[name] == value and type(scope[name]) is type(value)


@pytest.mark.parametrize(("argument", "said"), [
    ("--depht=4", ["depht", "did you mean 'depth'"]),
    ("--zzzzzz=4", ["zzzzzz", "--help"]),
    ("--_private=4", ["_private"]),
    ("--home=x", ["home"]),
    ("--sizes=3", ["sizes"]),
    ("--after=5", ["after"]),
    ("--config=5", ["config"]),
    ("--depth=four", ["--depth=four", "int"]),
    ("--depth=2.5", ["--depth=2.5", "int"]),
    ("--depth=", ["--depth=", "int"]),
    ("--depth=True", ["--depth=True", "int"]),
    ("--depth=None", ["--depth=None", "int"]),
    ("--depth=9**9**9", ["--depth=9**9**9"]),
    ("--depth=1/0", ["--depth=1/0"]),
    ("--depth=" + "(" * 5000, ["depth takes int"]),
    ("--depth=__import__('os').getpid()", ["depth takes int"]),
    ("--rate=nan", ["rate takes float"]),
    ("--rate=1e999", ["rate takes float"]),
    ("--rate=10.0**999", ["rate takes float"]),
    ("--rate=(-1)**0.5", ["rate takes float"]),
    ("--rate='1'", ["rate takes float"]),
    ("--compile=2", ["compile takes bool"]),
    ("--compile=maybe", ["compile takes bool"]),
    ("--dtype=float16", ["--dtype=float16", "'auto' or 'float32' or 'bfloat16'"]),
    ("--batch=big", ["batch takes", "int", "'auto'"]),
    ("--depth", ["--depth needs a value", "--depth=20"]),
    ("--name", ["--name needs a value"]),
    ("depth=4", ["stray", "depth=4"]),
    ("-depth=4", ["stray", "-depth=4"]),
    ("4", ["stray", "'4'"]),
    ("absent.py", ["absent.py"]),
])
def test_what_does_not_fit_is_one_line_that_names_it(script, monkeypatch, capsys, argument, said):
    line = refused(script, monkeypatch, capsys, argument)
    assert all(words in line for words in said), line


@pytest.mark.parametrize(("argv", "changed"), [
    (["--depth", "4", "--name", "x y", "--total-batch-size", "2**4"],
     {"depth": 4, "name": "x y", "total_batch_size": 16}),
    (["--depth", "-1", "--clip", "None", "--name", "file.py"], {"depth": -1, "clip": None, "name": "file.py"}),
    (["--compile", "False", "--quiet", "--depth=4"], {"compile": False, "quiet": True, "depth": 4}),
    (["--compile", "no", "--quiet", "settings.py"], {"compile": False, "quiet": True, "decay": 0.5}),
])
def test_a_blank_does_for_the_equals_sign(script, monkeypatch, tmp_path, argv, changed):
    (tmp_path / "settings.py").write_text("decay = 0.5\n")
    monkeypatch.chdir(tmp_path)
    assert run(script, monkeypatch, *argv)["config"] == DEFAULTS | changed


@pytest.mark.parametrize(("argv", "said"), [
    (["--depth", "four"], "--depth=four: depth takes int"),
    (["--depth", "--name", "x"], "--depth needs a value"),
    (["--depth", "4", "5"], "stray argument '5'"),
    (["--compile", "4"], "stray argument '4'"),
])
def test_a_value_after_a_blank_is_checked_as_well(script, monkeypatch, capsys, argv, said):
    assert said in refused(script, monkeypatch, capsys, *argv)


def test_every_command_refuses_a_mistyped_setting_or_name_before_torch_is_imported(tmp_path):
    """A stand-in for torch says that it was imported, and ends the process."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    commands = [f"scripts.{path.stem}" for path in sorted((ROOT / "scripts").glob("[!_]*.py")) if path.stem != "once"]
    assert len(commands) >= 16
    for command in commands:
        done = subprocess.run([sys.executable, "-m", command, "--no_such_setting", "4"], cwd=tmp_path, env=environment,
                              capture_output=True, text=True, timeout=300)
        assert done.returncode == 2, (command, done.stderr)
        assert done.stderr.startswith("error: --no_such_setting: there is no setting")
    for command, name in (("base_train", "data"), ("mid_train", "tasks"), ("chat_rl", "task")):
        done = subprocess.run([sys.executable, "-m", f"scripts.{command}", f"--{name}=tinywrld"], cwd=tmp_path,
                              env=environment, capture_output=True, text=True, timeout=60)
        assert re.fullmatch("error: .*no .*'tinywrld'.*; did you mean 'tinyworld'[?]\n", done.stderr), done.stderr


def test_a_key_given_twice_is_refused_however_it_is_spelled(script, monkeypatch, capsys):
    assert "--max-seq-len is given twice" in refused(script, monkeypatch, capsys, "--max_seq_len=1", "--max-seq-len=1")


def test_torchruns_separator_is_ignored(script, monkeypatch):
    assert run(script, monkeypatch, "--", "--depth=4")["depth"] == 4


def test_a_file_of_settings_and_the_command_line_beats_it_on_either_side(script, monkeypatch, tmp_path):
    small, smaller = tmp_path / "small.py", tmp_path / "smaller.py"
    small.write_text("# small\ndepth = 2 * 4\nrate = 3  # fast\nclip = None\nname: str = 'x'\ntotal_batch_size = 1e3\n")
    smaller.write_text("depth = -2\n")
    for argv in ([str(small), "--depth=6"], ["--depth=6", str(small)]):
        scope = run(script, monkeypatch, *argv)
        changed = {"depth": 6, "rate": 3.0, "clip": None, "name": "x", "total_batch_size": 1000}
        assert scope["config"] == DEFAULTS | changed
        assert type(scope["rate"]) is float and type(scope["total_batch_size"]) is int
    assert run(script, monkeypatch, str(small), str(smaller))["depth"] == -2


@pytest.mark.parametrize(("body", "said"), [
    ("import os", "key = 1"),
    ("from os import sep as name", "key = 1"),
    ("print('hi')", "key = 1"),
    ("name = open('/etc/passwd').read()", "key = 1"),
    ("depth, rate = 1, 2", "key = 1"),
    ("depth += 1", "key = 1"),
    ("if True:\n    depth = 3", "key = 1"),
    ("decay = rate", "key = 1"),
    ("name = 'a' * 10**9", "key = 1"),
    ("depth = (", ""),
    ("depth = '4'", "depth takes int"),
    ("compile = 1", "compile takes bool"),
    ("compile = 'yes'", "compile takes bool"),
    ("name = 4", "name takes str"),
    ("name = None", "name takes str"),
    ("depht = 4", "did you mean 'depth'"),
    ("rate = 2\nrate = 3", "rate is given twice"),
])
def test_anything_else_in_a_file_is_refused_with_file_and_line(script, monkeypatch, capsys, tmp_path, body, said):
    path = tmp_path / "bad.py"
    path.write_text("# first line\n" + body + "\n")
    line = refused(script, monkeypatch, capsys, str(path))
    assert f"{path}:{3 if 'twice' in said else 2}: " in line and said in line


def test_files_that_are_no_text_are_refused(script, monkeypatch, capsys, tmp_path):
    (tmp_path / "latin.py").write_bytes(b"name = '\xe9'\n")
    (tmp_path / "nul.py").write_bytes(b"name = '\0'\n")
    (tmp_path / "folder.py").mkdir()
    for name in ("latin.py", "nul.py", "folder.py"):
        assert name in refused(script, monkeypatch, capsys, str(tmp_path / name))


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
  --quiet=False              on its own line

Settings
  --dtype=auto               [auto, float32, bfloat16]
  --resume_from_step=None    step to resume from
  --clip=1.0
  --batch=auto               [auto]
  --stop_at=None
'''


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_prints_docstring_sections_defaults_and_comments(script, monkeypatch, capsys, flag):
    with pytest.raises(SystemExit) as stop:
        run(script, monkeypatch, "--depth=3", flag)
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err) == (0, HELP, "")


RANGED = """from configurator import configure
depth = 20       # [1..] layers
part = 0.4       # [0..1] of the run
steps = -1       # [-1, 1..] of training
heat = 1.0       # [>0] of the samples
top: int | None = None  # [1..] likeliest tokens
config = configure(globals())
"""


@pytest.mark.parametrize(("argument", "value"), [
    ("--depth=1", 1), ("--depth=0", None), ("--part=0", 0.0), ("--part=1", 1.0), ("--part=1.01", None),
    ("--part=-0.01", None), ("--steps=-1", -1), ("--steps=7", 7), ("--steps=0", None), ("--steps=-2", None),
    ("--heat=1e-9", 1e-9), ("--heat=0", None), ("--top=None", "None"), ("--top=5", 5), ("--top=0", None),
])
def test_numbers_stay_in_the_range_that_the_comment_declares(tmp_path, monkeypatch, capsys, argument, value):
    """None here: refused, with the range in the line."""
    script = tmp_path / "script.py"
    script.write_text(RANGED)
    name = argument[2:].partition("=")[0]
    if value is not None:
        assert run(script, monkeypatch, argument)["config"][name] == (None if value == "None" else value)
    else:
        ranges = {"depth": "[1..]", "part": "[0..1]", "steps": "[-1, 1..]", "heat": "[>0]", "top": "[1..]"}
        line = refused(script, monkeypatch, capsys, argument)
        assert line.startswith(f"error: {argument}: {name} takes ") and f" in {ranges[name]} (default: " in line


def test_as_a_process_errors_are_one_line_with_codes_2_and_1(tmp_path):
    path = tmp_path / "failing.py"
    path.write_text("from configurator import configure\nfrom nanochat.runtime.errors import UserError\ndepth = 4\n"
                    "configure(globals())\nraise UserError(f'depth={depth} is too deep')\n")
    for argument, code, line in (("--depth=x", 2, "error: --depth=x: depth takes int (default: 4)\n"),
                                 ("--depth=8", 1, "error: depth=8 is too deep\n")):
        done = subprocess.run([sys.executable, str(path), argument], env=os.environ | {"PYTHONPATH": str(ROOT)},
                              capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stdout, done.stderr) == (code, "", line)


@pytest.mark.parametrize(("body", "said"), [
    ("depth = 4\n", "does not call"),
    ("depth = None\nconfigure(globals())\n", "annotation"),
    ("depth: str = 4\nconfigure(globals())\n", "annotation"),
    ("depth = 0  # [1..] layers\nconfigure(globals())\n", "range"),
])
def test_a_script_that_is_wrong_itself_gets_a_traceback(tmp_path, body, said):
    path = tmp_path / "wrong.py"
    path.write_text(body)
    with pytest.raises(ValueError, match=said):
        configure({"__file__": str(path)}, argv=[])
