"""What the doctor says, held to what happens: tensors counted by the profiler, and training under a real limit."""
import json
import os
import re
import resource
import subprocess
import sys
import time

import pytest
import torch

import nanochat.plan.limits
import nanochat.plan.probes
from nanochat.gpt import GPT, GPTConfig, config_from_depth
from nanochat.corpus.make_dataset import make
from nanochat.plan.memory import GIB, largest_rows, needed_bytes, parameter_counts, state_bytes, step_bytes
from nanochat.corpus.learn_tokenizer import train_tokenizer
from conftest import REPO, run_module


@pytest.mark.parametrize("heads, kv_heads, rows, length, dtype, checkpointing", [
    (4, 4, 2, 512, torch.float32, False), (4, 2, 4, 256, torch.bfloat16, False), (1, 1, 4, 256, torch.float32, False), (4, 2, 8, 256, torch.float32, True),
])
def test_the_formula_is_the_bytes_of_the_tensors(heads, kv_heads, rows, length, dtype, checkpointing):
    """Within 3%, as PyTorch's allocator counts them: everything a step allocates beyond what is there between steps (weights, masters and moments)."""
    config = GPTConfig(length, 2000, n_layer=3, n_embd=256, n_head=heads, n_kv_head=kv_heads)
    formula = step_bytes(config, rows, dtype, "cpu", compiled=False, checkpointing=checkpointing)
    gradients = state_bytes(2, 1, dtype, *parameter_counts(config)).gradients
    measured = nanochat.plan.probes.peak_of_a_step(config, rows, dtype, compiled=False, checkpointing=checkpointing)
    assert gradients + formula.activations + formula.transient == pytest.approx(measured, rel=0.03)


def test_parameters_are_counted_as_the_model_has_them():
    for config in (config_from_depth(2, 1000, 64), config_from_depth(4, 777, 64, kv_group=2)):
        with torch.device("meta"):
            named = dict(GPT(config).named_parameters())
        blocks = sum(p.numel() for name, p in named.items() if ".h." in name)
        assert parameter_counts(config) == (sum(p.numel() for p in named.values()) - blocks, blocks)


def test_more_memory_and_more_ranks_allow_more_rows():
    config, ask = config_from_depth(20, 65536, 2048), (torch.bfloat16, "cuda", True)
    rows = {gib: largest_rows([("device", gib * GIB)], 64, config, *ask) for gib in (8, 24, 80, 141)}
    assert rows[8] == 0 < rows[80] < rows[141] and all(count & (count - 1) == 0 for count in rows.values())
    assert needed_bytes(config, 4, *ask, stage=2, ranks=8) < needed_bytes(config, 4, *ask, stage=1, ranks=8) < needed_bytes(config, 4, *ask)
    assert needed_bytes(config, 4, *ask, checkpointing=True) < 0.6 * needed_bytes(config, 4, *ask)
    assert largest_rows([("device", 141 * GIB), ("device", 8 * GIB)], 64, config, *ask) == 0, "the smallest GPU decides"


# ---- Real processes under a real limit


@pytest.fixture
def data(base_folder):
    """A small data set with its tokenizer, in the test's base folder."""
    source = base_folder / "texts"
    source.mkdir(parents=True)
    for i in range(400):
        (source / f"{i}.txt").write_text(f"Document {i} says that {i} plus {i} is {2 * i}, and that {i} minus one is {i - 1}.")
    make(str(source), "sums")
    return train_tokenizer("sums", 400, 10**6, 10**4)


def limited(bytes_: int, module: str, *args: str) -> subprocess.CompletedProcess:
    """`python -m module args…` that may have so many bytes of its own (RLIMIT_DATA)."""
    return subprocess.run(
        [sys.executable, "-m", module, *args], cwd=REPO, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, capture_output=True,
        timeout=500, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (bytes_, bytes_)),
    )


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux only")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.skipif(not os.environ.get("SLOW"), reason="two compilations: SLOW=1"))])
def test_the_recommended_rows_train_under_a_limit_and_twice_as_many_do_not(data, compiled):
    """The limit is set where the doctor's answer is tight: 32 rows, with 2% to spare. Compilers are processes of their own."""
    model = ["--depth=2", "--max_seq_len=256", "--dtype=float32", f"--compile={compiled}"]
    config = config_from_depth(2, data.get_vocab_size(), 256)
    limit = int(1.02 * needed_bytes(config, 32, torch.float32, "cpu", compiled, "data"))
    asked = limited(limit, "scripts.doctor", *model, f"--vocab_size={data.get_vocab_size()}", "--batch_only")
    assert asked.returncode == 0 and asked.stderr == "", asked.stderr
    rows = int(asked.stdout)  # the number and nothing else
    assert rows == 32

    def train(rows: int) -> subprocess.CompletedProcess:
        return limited(limit, "scripts.base_train", *model, "--data=sums", f"--device_batch_size={rows}", f"--total_batch_size={2 * rows * 256}",
                       "--num_iterations=2", "--eval_every=-1", "--sample_every=-1", f"--model_tag=rows{rows}")

    trained = train(rows)
    assert trained.returncode == 0 and "step 00001/00002" in trained.stdout, trained.stderr
    refused = train(2 * rows)
    assert refused.returncode == 1
    assert refused.stderr.strip() == "error: out of memory with device_batch_size=64; try --device_batch_size=32"


def test_a_whole_examination_goes_on_after_a_kernel_that_fails(data, base_folder, tmp_path):
    """A C++ compiler that fails: the compiled kernels are reported as such, everything else is told, and one can train."""
    (tmp_path / "g++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "g++").chmod(0o755)
    (base_folder / "data" / "broken").mkdir()
    env = {"CXX": str(tmp_path / "g++"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    result = run_module("scripts.doctor", "--data=sums", "--depth=2", "--max_seq_len=64", env=env)
    out = result.stdout
    assert result.returncode == 0, out + result.stderr
    assert "NOT compiled block: " in out and ", eager, " in out, "the table is that of eager training then"
    for kernel in ("matmul", "rms_norm", "attention", "loss with softcap", "Muon", "engine", "collectives"):
        assert re.search(rf"^OK  {kernel}.*: error [\d.e+-]+, allowed", out, re.M), (kernel, out)
    assert "data sums: " in out and "data broken: no data set 'broken'" in out and f"tokenizer sums: {data.get_vocab_size()} tokens" in out
    assert re.search(r"^data: ready$", out, re.M) and re.search(r"^base_train: ready$", out, re.M)
    assert "mid_train: NOT ready: no base model; python -m scripts.base_train" in out


def test_a_kernel_that_ends_its_process_costs_only_its_own_verdict(tmp_path, monkeypatch):
    """A stand-in for Python that dies of a segmentation fault in the middle of its second probe."""
    fake = tmp_path / "python"
    lines = [json.dumps(line) for line in ({"name": "a"}, {"name": "a", "ok": True, "text": "fine"}, {"name": "b"})]
    last = [json.dumps(line) for line in ({"name": "c"}, {"name": "c", "ok": True, "text": "fine"})]
    fake.write_text("#!/bin/sh\ncase \"$*\" in *' b'*) " + "; ".join(f"echo '{line}'" for line in last)
                    + "; exit 0;; esac\n" + "; ".join(f"echo '{line}'" for line in lines) + "\nkill -SEGV $$\n")
    fake.chmod(0o755)
    monkeypatch.setattr(nanochat.plan.probes.sys, "executable", str(fake))
    found = list(nanochat.plan.probes.probe_all("cpu", "float32", False))
    assert [(one.name, one.ok) for one in found] == [("a", True), ("b", False), ("c", True)]
    assert "SIGSEGV" in found[1].text


def test_questions_about_a_gpu_that_is_not_here():
    answers = {}
    for gib in ("12", "24"):
        result = run_module("scripts.doctor", "--depth=12", "--batch_only", f"--memory_gib={gib}")
        answers[gib] = int(result.stdout)
        assert result.returncode == 0
    assert 0 < answers["12"] < answers["24"]
    nothing = run_module("scripts.doctor", "--depth=32", "--batch_only", "--memory_gib=6")
    assert nothing.returncode == 0 and nothing.stdout == "0\n" and "not one row" in nothing.stderr
    wrong = run_module("scripts.doctor", "--memory_gib=0")
    assert wrong.returncode == 1 and wrong.stderr == "error: memory_gib=0.0 must be above 0, or -1\n"


def test_the_time_of_a_step_is_measured_here(tmp_path):
    """
    Milliseconds: two steps take less than the whole command, and one step's products cannot be done at 20 TFLOP/s. Nothing
    else is on stdout, also where compiling fails.
    """
    (tmp_path / "g++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "g++").chmod(0o755)
    env = {"CXX": str(tmp_path / "g++"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    result = run_module("scripts.doctor", "--depth=1", "--max_seq_len=256", "--vocab_size=8192", "--device_type=cpu", "--time_only", env=env, fresh=True)
    assert result.returncode == 0 and "not compiling" in result.stderr, result.stderr
    head_flops = 6 * 64 * 8192 * 16 * 256
    assert head_flops / 20e12 < int(result.stdout) / 1000 < (time.monotonic() - began) / 2
    wrong = run_module("scripts.doctor", "--time_only", "--memory_gib=24")
    assert wrong.returncode == 1 and wrong.stderr == "error: time_only measures what is here; leave out memory_gib\n"


def test_limits_of_control_groups(tmp_path, monkeypatch):
    """Both versions, the parents' limits as well; cached files do not count as used, and 'max' is no limit."""
    files = {"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 300\ninactive_file 200\n"}
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / "a" / name).write_text(text)
    (tmp_path / "a" / "b" / "memory.max").write_text("max")
    assert nanochat.plan.limits.left_of([tmp_path / "a" / "b", tmp_path / "a"], "memory.max", "memory.current") == [500]
    (tmp_path / "memory.limit_in_bytes").write_text("9223372036854771712")
    assert nanochat.plan.limits.left_of([tmp_path], "memory.limit_in_bytes", "memory.usage_in_bytes") == []
