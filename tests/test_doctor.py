"""What the doctor says, held to what happens: tensors counted as they come and go, and training under a real limit."""
import dataclasses
import os
import resource
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ALL_PIECES, REPO, make_sums, run_module, warm_python
from dry_step import LiveBytes
from ranks import run_as_main

import nanochat.model.gpt
import nanochat.model.loss
import nanochat.plan.step_trial
from nanochat.model.gpt_config import GPTConfig, architecture, config_from_depth
from nanochat.plan import limits
from nanochat.plan.memory import GIB, RankMemory, largest_rows, needed_bytes
from nanochat.plan.step_trial import rows_that_train, set_up_training, train_step, try_steps
from nanochat.runtime.errors import UserError


@pytest.fixture
def failing_compiler(tmp_path) -> dict[str, str]:
    """An environment in which the C++ compiler fails."""
    (tmp_path / "g++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "g++").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CXX": str(tmp_path / "g++")}
    return path | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}


CPU = [(GPTConfig(length, 2000, n_layer=3, n_embd=256, n_head=heads, n_kv_head=kv_heads), rows, "cpu", dtype, again)
       for heads, kv_heads, rows, length, dtype, again in [
           (4, 4, 2, 512, "float32", False), (4, 2, 2, 256, "bfloat16", True), (1, 1, 4, 256, "float32", False)]]
GPU = [(config_from_depth(depth, vocab_size, 2048, arch=arch), rows, "meta", dtype, again)
       for depth, vocab_size, rows, arch in [
           (12, 65536, 8, "modern"), (20, 65536, 1, "classic"), (4, 8192, 64, ALL_PIECES)]
       for dtype, again in (("float32", False), ("bfloat16", True))]
# Small ones, with the pieces of the modern architecture; and one whose tables are most of it.
MODERN = architecture(ALL_PIECES)
SMALL = [(GPTConfig(256, 500, n_layer=3, n_embd=128, n_head=4, n_kv_head=kv_heads, **pieces), 8, "cpu", dtype, again)
         for kv_heads, pieces, dtype, again in [
             (2, MODERN, "float32", False), (4, MODERN, "bfloat16", True),
             (4, {"short_windows": True}, "float32", False)]]
TABLES = GPTConfig(64, 20_000, n_layer=1, n_embd=64, n_head=1, n_kv_head=1, value_embeddings=True)
SMALL += [(TABLES, 1, "cpu", "float32", False)]


@pytest.mark.parametrize("config, rows, device, dtype, checkpointing", CPU + GPU + SMALL)
def test_the_formula_is_the_bytes_of_the_tensors(monkeypatch, config, rows, device, dtype, checkpointing):
    """
    Of all that an eager step allocates beyond what is there between steps: within 1%, with checkpointing up to 3% less.
    A GPU stands on the meta device, with its kernel and chunks. There a norm is made of other operations, which
    keep float32 in bfloat16 as well: that much is added, and the rest is within 2%.
    """
    if device == "meta":
        monkeypatch.setattr(nanochat.model.gpt, "has_varlen", lambda *_: True)
        monkeypatch.setitem(nanochat.model.loss.CHUNK_LOGITS, "meta", nanochat.model.loss.CHUNK_LOGITS["cuda"])
    kind, place = getattr(torch, dtype), "cpu" if device == "cpu" else "cuda"
    training = set_up_training(config, kind, torch.device(device))
    training[0].activation_checkpointing = checkpointing
    tokens = torch.randint(0, config.vocab_size, (rows, config.sequence_len + 1), device=device)
    with LiveBytes() as live:
        train_step(*training, tokens, micro_steps=2)
    rank = RankMemory(config, rows, kind, place, compiled=False, checkpointing=checkpointing)
    formula = max(rank.moments().values())
    least, most = 0.97 if checkpointing else 0.99, 1.01
    if (device, dtype) == ("meta", "bfloat16"):
        blocks, most = 1 if checkpointing else config.n_layer, 1.02
        formula += 2 * tokens[:, 1:].numel() * blocks * 2 * config.n_embd
    assert least < live.peak / formula < most


# ---- Real processes under a real limit


UNDER_A_LIMIT = """
import resource, runpy, sys
_, limit, module, *sys.argv[1:] = sys.argv
resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit)))
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def limited(bytes_: int, module: str, *args: str, **env: str) -> subprocess.CompletedProcess:
    """`python -m module args…` with a limit on its own memory (RLIMIT_DATA)."""
    return subprocess.run(
        [warm_python(), "-c", UNDER_A_LIMIT, str(bytes_), module, *args], cwd=REPO,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env, text=True, capture_output=True, timeout=500,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux only")
def test_the_recommended_rows_train_under_a_limit_and_twice_as_many_do_not(base_folder):
    """The limit is set where the formula's answer is tight: 32 rows, with 2% to spare."""
    vocab_size = make_sums(base_folder).get_vocab_size()
    limit = int(1.02 * needed_bytes(config_from_depth(2, vocab_size, 256), 32, torch.float32, "cpu", compiled=False))
    model = ["--depth=2", "--max_seq_len=256", "--dtype=float32", "--arch=classic"]
    asked = limited(limit, "scripts.doctor", *model, f"--vocab_size={vocab_size}", "--batch_only", CXX="none")
    assert (asked.stdout, asked.stderr) == ("32\n", ""), "the number and nothing else"

    def train(rows: int) -> subprocess.CompletedProcess:
        return limited(limit, "scripts.base_train", *model, "--data=sums", f"--device_batch_size={rows}",
                       f"--total_batch_size={2 * rows * 256}", "--num_iterations=2", "--eval_every=-1",
                       "--sample_every=-1", f"--model_tag=rows{rows}", "--compile=False")

    trained, refused = train(32), train(64)
    assert trained.returncode == 0 and "step 00001/00002" in trained.stdout, trained.stderr
    assert refused.returncode == 1
    assert refused.stderr.strip() == "error: out of memory with device_batch_size=64; try --device_batch_size=32"


# ---- Trials


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux only")
def test_rows_are_halved_for_a_lack_of_memory_and_for_nothing_else(monkeypatch):
    """A real process that runs out of memory; one that fails otherwise; one that the kernel ends."""
    config = config_from_depth(1, 64, 64)
    run = subprocess.run
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *args, **settings: run(*args, **settings, preexec_fn=limit_memory))
        with pytest.raises(UserError, match="fails: out of memory with device_batch_size=32768; try --device_batch"):
            try_steps(config, 2**15, torch.float32, "cpu", compiled=False)
    ask = (5, config, torch.float32, "cpu", False)
    answers = {4: "out of memory with device_batch_size=4", 2: "the process was ended by SIGKILL"}

    def try_steps_of(config: GPTConfig, rows: int, *how, **settings) -> None:
        if rows in answers:
            raise UserError(answers[rows])

    monkeypatch.setattr(nanochat.plan.step_trial, "try_steps", try_steps_of)
    assert rows_that_train(*ask) == 1
    answers[2] = "RuntimeError: no kernel image is available"
    with pytest.raises(UserError, match="no kernel image is available"):
        rows_that_train(*ask)


def test_a_process_that_dies_is_reported(tmp_path, monkeypatch):
    """A stand-in for Python that dies of a segmentation fault."""
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nkill -SEGV $$\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(UserError, match="the process was ended by SIGSEGV"):
        try_steps(config_from_depth(1, 64, 64), 1, torch.float32, "cpu", False)


def test_a_whole_examination_on_two_ranks(failing_compiler):
    result = run_module("scripts.doctor", "--depth=2", "--max_seq_len=64", "--ranks=2", "--arch=modern,smear=False",
                        env=failing_compiler)
    out = result.stdout
    assert result.returncode == 0, out + result.stderr
    assert out.index("memory available: ") < out.index("## Largest device_batch_size")
    train = "torchrun --standalone --nproc_per_node=2 -m scripts.base_train --depth=2 --max_seq_len=64 "
    assert out.endswith(f"{train}--arch=modern,smear=False --device_batch_size=64\n")


def test_a_disk_without_room_is_no_machine_to_train_on(base_folder, monkeypatch):
    """3 MB free; where half of a GiB was taken by an earlier run, the other half is enough."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # `configure` sets another
    base_folder.mkdir()
    for free, taken, fits in ((3e6, 0, False), (0.6 * GIB, GIB // 2, True), (0.4 * GIB, GIB // 2, False)):
        with open(base_folder / "shard", "wb") as file:
            file.truncate(taken)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        expected = (SystemExit, None) if fits else (UserError, "GiB free, and training takes 1; ")
        with pytest.raises(expected[0], match=expected[1]):
            run_as_main("scripts.doctor", ["--device_type=cpu"])


def test_questions_about_a_gpu_that_is_not_here():
    """The table has what --batch_only answers; ranks share states, and without activations more rows fit."""
    ask = (torch.bfloat16, "cuda", True)
    twelve, config = config_from_depth(12, 65536, 2048), config_from_depth(20, 65536, 2048)
    assert largest_rows(12 * GIB, 64, twelve, *ask) < largest_rows(24 * GIB, 64, twelve, *ask) == 32
    one_rank = needed_bytes(config, 4, *ask)
    assert needed_bytes(config, 4, *ask, 8) < needed_bytes(config, 4, *ask, 8, zero_stage=1) < one_rank
    told = run_module("scripts.doctor", "--depth=12", "--memory_gib=24", "--arch=classic")
    assert told.returncode == 0 and "| 12 | 32 | 64 |" in told.stdout
    none = run_module("scripts.doctor", "--depth=32", "--batch_only", "--memory_gib=6")
    assert (none.returncode, none.stdout) == (0, "0\n") and "not one row" in none.stderr


def test_the_time_of_a_step_is_measured_here(failing_compiler, monkeypatch):
    """
    Milliseconds: three steps take less than the whole command, and one step's products cannot be done at 20 TFLOP/s;
    also where compiling fails.
    """
    for name, value in failing_compiler.items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    alone, busy = try_steps(config_from_depth(1, 8192, 256), 16, torch.float32, "cpu", compiled=True)
    head_flops = 6 * 128 * 8192 * 16 * 256
    assert head_flops / 20e12 < alone / 1000 <= 1.1 * busy / 1000 < (time.monotonic() - began) / 2


def test_waiting_for_other_processes_is_no_part_of_a_step(monkeypatch, capsys):
    """A step that waits 0.1 s, as for a core, and computes nothing."""
    monkeypatch.setattr(nanochat.plan.step_trial, "compute_init", lambda _: (0, 1, torch.device("cpu")))
    monkeypatch.setattr(nanochat.plan.step_trial, "train_step", lambda *_: time.sleep(0.1))
    config = dataclasses.asdict(config_from_depth(1, 64, 64))
    nanochat.plan.step_trial.main(config, 1, "float32", "cpu", False, False, 1)
    alone, busy = map(float, capsys.readouterr().out.split())
    assert alone < 50 and busy >= 100


def test_limits_of_control_groups(tmp_path, monkeypatch):
    """Groups around a process's own count, and cached files do not; "max" and a missing file are no limit."""
    (tmp_path / "job").mkdir()
    files = {"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 300\ninactive_file 200\n",
             "job/memory.max": "max\n", "own": "9:cpu:/\n0::/job/task\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(limits, "CGROUPS", tmp_path)
    monkeypatch.setattr(limits, "OWN_CGROUP", tmp_path / "own")
    found = {name: left for name, left in limits.memory_limits().items() if name.startswith("cgroup")}
    assert found == {f"cgroup {tmp_path}": 500}
