"""What a node with GPUs does to this repo, without one: drivers, Pythons and compilers that are stand-ins."""
import re
import shlex
import subprocess
import sys

import pytest
import torch
from conftest import REPO, run_module, warm_python
from test_speedrun import bash, copy_scripts, write_program, write_python

from nanochat.model.gpt_config import config_from_depth
from nanochat.plan.memory import GIB, needed_bytes
from nanochat.runtime import compiling
from nanochat.runtime.errors import UserError


def node(folder, driver: str | None) -> str:
    """
    A folder with setup.sh and an environment without torch, and a PATH with that NVIDIA driver. What uv installs then
    works on a GPU if it was made for $SUITS.
    """
    copy_scripts(folder)
    write_python(folder, """case "$*" in
    *cuda.init*) grep -q "$SUITS" calls && exit; echo "Traceback\nRuntimeError: too old (version 12020)"; exit 1 ;;
esac
""")
    path = folder / "bin"
    path.mkdir()
    for tool in ("bash", "sh", "cat", "cksum", "id", "dirname", "grep", "uname", "sed", "head"):
        (path / tool).symlink_to(subprocess.check_output(["which", tool], text=True).strip())
    write_program(path / "uv", 'echo "$@" >> calls')
    write_program(path / "nvidia-smi", f'echo "{driver}"' if driver else "exit 9")
    return str(path)


@pytest.mark.parametrize("driver, wheels", [
    ("535.183.01\n535.183.01", "cu126"), ("570.86.10", "cu128"), ("580.65.06", ""), (None, "cpu")])
def test_torch_is_installed_for_the_cuda_that_the_driver_knows(tmp_path, driver, wheels):
    """From torch's own index before anything else is, so that the default wheels are never downloaded for nothing."""
    path = node(tmp_path, driver)
    for _ in range(2):  # the second time there is nothing to do
        done = bash(tmp_path, "-c", ". ./setup.sh", PATH=path, SUITS=wheels)
        assert done.returncode == 0, done.stderr
    *first, last = (tmp_path / "calls").read_text().splitlines()
    assert [re.search(r"--torch-backend=(\S+)", line)[1] for line in first] == ([wheels] if wheels else [])
    assert "pip install" in last and "--editable ." in last


def test_without_torchs_index_a_cpu_takes_a_build_that_lies_on_disk(tmp_path):
    """The package index has CUDA's build only."""
    path = node(tmp_path, None)
    program = '#!/bin/sh\necho "$@" >> calls\ncase "$*" in *torch-backend*) exit 1 ;; esac\n'
    (tmp_path / "bin" / "uv").write_text(program)
    assert bash(tmp_path, "-c", ". ./setup.sh", PATH=path, SUITS="").returncode == 0
    _, build, rest = (tmp_path / "calls").read_text().splitlines()
    assert "--no-index --no-deps torch>=" in build and "--editable ." in rest


@pytest.mark.parametrize("card, extra", [
    ("9.0, 580.65", "hub,gpu,wandb"), ("10.0, 580.65\n10.0, 580.65", "hub,gpu,wandb"), ("9.0, 570.86", "hub,wandb"),
    ("8.0, 580.65", "hub,wandb"), ("NVIDIA-SMI has failed", None), (None, None)])
def test_the_speedrun_installs_flash_attention_4_where_it_is_faster(tmp_path, card, extra):
    """From Hopper on, with a driver for CUDA 13."""
    path = node(tmp_path, card and card[-6:])
    if card:
        answers = f'case "$*" in *compute_cap*) echo "{card}" ;; *) echo 580.65 ;; esac'
        write_program(tmp_path / "bin/nvidia-smi", answers)
    bash(tmp_path, "speedrun.sh", "--run=mine", PATH=path, SUITS="")
    installed = re.findall(r"--editable (\S+)", (tmp_path / "calls").read_text())
    assert installed == [f".[{extra}]" if extra else "."]


def test_a_driver_that_torch_cannot_use_ends_the_setup(tmp_path):
    """Also when all is installed, as on another node with the same disk; not where the GPUs are hidden."""
    path = node(tmp_path, "550.54.15")
    for _ in range(2):
        done = bash(tmp_path, "speedrun.sh", PATH=path, SUITS="no such index")
        assert done.returncode == 1
        line, advice = done.stderr.splitlines()
        assert line.endswith("the GPUs here (NVIDIA driver 550): RuntimeError: too old (version 12020)")
        assert "rm -r .venv" in advice and "scripts." not in (tmp_path / "calls").read_text()
    assert bash(tmp_path, "-c", ". ./setup.sh", PATH=path, SUITS="no such", CUDA_VISIBLE_DEVICES="").returncode == 0
    write_program(tmp_path / "bin/nvidia-smi", "echo 470.1")
    (tmp_path / "calls").unlink()
    done = bash(tmp_path, "-c", ". ./setup.sh", PATH=path)
    assert done.returncode == 1 and "NVIDIA driver 470 is too old" in done.stderr and not (tmp_path / "calls").exists()


def as_a_gpu_node(change: str, *args: str) -> subprocess.CompletedProcess:
    """scripts.plan in a process whose torch was changed before."""
    program = f"import torch, runpy\n{change}\nrunpy.run_module('scripts.plan', run_name='__main__', alter_sys=True)"
    return subprocess.run([warm_python(), "-c", program, *args], cwd=REPO, text=True, capture_output=True, timeout=200)


def test_gpus_that_are_counted_but_not_available_are_an_error():
    """As with a driver that is older than torch's CUDA."""
    refused = as_a_gpu_node("""
torch.cuda.is_available, torch.cuda.device_count = lambda: False, lambda: 8
def init():
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\\nMore")
torch.cuda.init = init
""")
    assert refused.returncode == 1 and refused.stdout == ""
    assert "8 GPU(s)" in refused.stderr and "too old (found version 12020)" in refused.stderr


H100S = """
import shutil, types
import nanochat.plan.step_trial as trial
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 8
torch.cuda.get_device_capability = lambda device: (9, 0)
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=79e9)
shutil.disk_usage = lambda folder: types.SimpleNamespace(free=1e12)
def try_steps(config, rows, *args, **settings):
    if rows > 16:
        raise trial.UserError("{problem}")
trial.try_steps = try_steps
"""


def test_the_plan_for_a_machine_with_gpus_is_made_by_trial(tmp_path):
    """Eight stand-ins of an H100, on which 16 rows fit; where nothing can be compiled, it ends."""
    file = f"--file={tmp_path / 'gpus'}"
    fine = as_a_gpu_node(H100S.replace("{problem}", "out of memory"), "--depth=20", file)
    assert "RANKS=8 DEPTH=20 ROWS=16 FEW=4 RECOMPUTE=False " in (tmp_path / "gpus").read_text(), fine.stderr
    assert "pretraining on 8 x H100 of 74 GB" in fine.stdout
    refused = as_a_gpu_node(H100S.replace("{problem}", "no C compiler"), "--depth=20", f"{file}-none")
    assert refused.returncode == 1 and refused.stderr.endswith("\nerror: no C compiler\n")


@pytest.mark.parametrize("series", ["miniseries.sh", "scaling_laws.sh"])
def test_a_series_begins_on_a_machine_with_gpus(tmp_path, series):
    """With as many rows as its trial finds, at a depth that no speedrun has; the tasks' datasets are not installed."""
    copy_scripts(tmp_path)
    for name in (series, "machine.sh"):
        (tmp_path / "runs" / name).write_bytes((REPO / "runs" / name).read_bytes())
    node = H100S.replace("{problem}", "out of memory").replace("rows > 16", "rows > 8") + """
import importlib.util
importlib.util.find_spec = lambda name, find=importlib.util.find_spec: None if name == "datasets" else find(name)
"""
    plan = f"import torch, runpy\n{node}\nrunpy.run_module('scripts.plan', run_name='__main__', alter_sys=True)"
    write_python(tmp_path, f"""case "$*" in
    *scripts.plan*) shift 2; cd {REPO}; exec {warm_python()} -c {shlex.quote(plan)} "$@" ;;
    *) echo "$@" >> calls ;;
esac
""")
    write_program(tmp_path / ".venv/bin/nvidia-smi", "echo GPU 0; echo GPU 1")
    done = bash(tmp_path, f"runs/{series}", NANOCHAT_NO_VENV="1", NANOCHAT_BASE_DIR=f"{tmp_path}", DEPTHS="11",
                BUDGETS="1e18", PATH=f"{tmp_path}/.venv/bin:/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    (trained,) = (line for line in (tmp_path / "calls").read_text().splitlines() if "scripts.base_train" in line)
    assert "--nproc_per_node=2" in trained and " --depth=11 " in trained and " --device_batch_size=8 " in trained


def test_a_gpu_is_not_trained_on_eagerly_unless_asked_for(monkeypatch):
    """A CPU is: tests/test_plan.py."""
    def fails(function):
        raise RuntimeError("Failed to find C compiler.\nMore")

    monkeypatch.setattr(compiling, "compiled", fails)
    with pytest.raises(UserError, match=r"python3-dev\), or --compile=False .*: Failed to find C compiler\.$"):
        compiling.set_compile(True, "cuda")
    assert compiling.set_compile(False, "cuda") is False and compiling.set_compile(True, "cpu") is False


def test_the_defaults_of_pretraining_fit_into_80_gb():
    """By the planner's formula, on one GPU and on eight; an H100 has 79.6 GiB, some of which is not free."""
    help_text = run_module("scripts.base_train", "--help").stdout
    depth, rows, length = (
        int(re.search(rf"--{name}=-1 .*-1: (?:up to )?([\d,]+) on a CUDA GPU", help_text)[1].replace(",", ""))
        for name in ("depth", "device_batch_size", "max_seq_len"))
    config = config_from_depth(depth, 65536, length, arch="modern")
    for ranks in (1, 8):
        assert needed_bytes(config, rows, torch.bfloat16, ranks) < 79 * GIB
    assert needed_bytes(config, 4 * rows, torch.bfloat16) > 79 * GIB


def test_the_first_hour_runs_to_its_end_without_a_gpu(base_folder):
    """In small: every part in a process of its own that ends well, and each arm is another model."""
    done = run_module("bench.gpu_first_hour", "--rehearse")
    assert done.returncode == 0, done.stderr
    page = (base_folder / "gpu_first_hour.md").read_text()
    assert page.count(" s, exit code 0\n") == page.count("\n## ") == 6, page
    measured = dict(re.findall(r"\| (.+): bits per byte \| (\S+) ", page))
    assert list(measured) == ["8 bits", "bfloat16", "offset keys", "no offset"] and len(set(measured.values())) == 4


def test_ours_beside_nanochat_is_one_table(tmp_path):
    """Stand-ins print the lines of the two programs, nanochat's as in its scripts/base_train.py."""
    copy_scripts(tmp_path)
    (tmp_path / "runs" / "beside.sh").write_bytes((REPO / "runs" / "beside.sh").read_bytes())
    write_python(tmp_path, """case $1 in torchrun) echo "run: 9 steps, 1,024 tokens, 7e17 FLOPs
step 00000/00009 | validation 3.1000 bits per byte
step 00008/00009 (100.0%) | smoothed loss 3.0 | lrm 0.05 | 120 ms | 4,400,000 tok/s | mfu 30.0% | 3m done, 0s left
step 00009/00009 | validation 0.8123 bits per byte" ;; esac
""")
    write_python(tmp_path / "peer", """case $* in *base_train*) echo "Total number of training tokens: 1,026
step 00008/00009 (99.00%) | loss: 3.0 | dt: 120.00ms | tok/sec: 4,300,000 | bf16_mfu: 30.00"
echo "Step 00009 | Validation bpb: 0.812345
Minimum validation bpb: 0.800000 $*" ;; esac
""")
    write_program(tmp_path / ".venv/bin/nvidia-smi", "echo GPU 0; echo GPU 1")
    done = bash(tmp_path, "runs/beside.sh", "peer", NANOCHAT_NO_VENV="1", NANOCHAT_BASE_DIR=f"{tmp_path}",
                PATH=f"{tmp_path}/.venv/bin:/usr/bin:/bin")
    assert done.stdout.splitlines()[-2:] == [
        "| ours | 1,024 | 0.8123 | 4,400,000 |", "| nanochat | 1,026 | 0.812345 | 4,300,000 |"], done.stderr
    assert "-m torch.distributed.run --standalone --nproc_per_node=2 -m scripts.base_train -- --" in done.stdout


ALONE = """
import torch
from nanochat.training.metrics import peak_memory
torch.ones(2**28)  # 1 GiB
assert 1.05 < peak_memory() < 2, peak_memory()
"""


def test_peak_memory_is_what_was_held():
    """In a process of its own, which has held nothing before."""
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=REPO, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
