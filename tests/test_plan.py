"""
The planner: seconds of a step against measured ones, GPUs by their names, steps that are tried. What it says of memory
is counted in test_gpu_dry_run.py; a speedrun's size is in test_speedrun.py.
"""
import math
import resource
import subprocess
import sys
import time

import pytest
from conftest import run_module
from page_formulas import PUBLISHED, printed_by

import nanochat.plan.step_trial
from nanochat.model.gpt_config import GPTConfig, config_from_depth
from nanochat.plan.choice import Choice, cost
from nanochat.plan.memory import GIB, samples_at_once
from nanochat.plan.step_time import step_time
from nanochat.plan.step_trial import rows_that_train, try_steps
from nanochat.runtime.devices import choose_device_type
from nanochat.runtime.errors import UserError
from nanochat.runtime.flops import datasheet_gpu, find_gpu


@pytest.mark.parametrize("rows, fp8, seconds", [(32, True, 0.856), (16, True, 0.492), (16, False, 0.610)])
def test_a_step_takes_as_long_as_on_an_h100(rows, fp8, seconds):
    """Depth 22, two micro-steps: measured on one (docs/gpus.md); the constants were fitted to them."""
    config = config_from_depth(22, 49152, 2048, arch="modern")
    step = step_time(config, rows, 2, 1, datasheet_gpu("H100"), fp8)
    assert step.seconds == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize("name, depth, vocab_size, rows, seconds", PUBLISHED)
def test_a_step_is_not_far_below_those_that_others_published(name, depth, vocab_size, rows, seconds):
    """nanochat's, on eight H100: other code, also with the time of communication."""
    config = config_from_depth(depth, vocab_size, 2048, arch="modern")
    step = step_time(config, rows, 64 // rows, 8, datasheet_gpu("H100"), fp8=True)
    assert 0.8 * seconds < step.seconds < seconds


def test_the_hours_of_each_stage_by_hand():
    """
    One H100 at depth 14, width 896: 12 * 14 * 896^2 + 32,768 * 896 = 164.2 million parameters, 8.5 tokens for each:
    1,396 million at 389,700 a second. A fifth of that is 40 million and 217,451 conversations of 1,100. Evaluations:
    30 million, and 3,700 answers, 32 at a time, of 150 to 256 tokens of 14.25 ms. At most training takes 1.2 as long.
    """
    choice = Choice(14, 32, False, 8.5, 0)
    assert (choice.talk, choice.shards) == (217_451, 32)
    whole = cost(choice, 1, datasheet_gpu("H100"))
    expected = {"pretraining": (0.995, 1.194), "mid-training and SFT": (0.199, 0.239), "RL": (0, 0),
                "evaluations": (0.090, 0.143), "downloads and compiling": (0.4, 0.4)}
    assert {name: pytest.approx(hours, abs=1e-3) for name, hours in expected.items()} == whole.stages
    assert (whole.least, whole.most) == pytest.approx((1.684, 1.976), abs=2e-3)


def test_a_gpu_is_found_by_the_names_that_people_and_cuda_write():
    for text, name, memory in (
            ("RTX4090", "RTX 4090", 24), ("rtx-4090,48", "RTX 4090", 48), ("NVIDIA GeForce RTX 4090", "RTX 4090", 24),
            ("a6000", "RTX A6000", 48), ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000", 96)):
        assert datasheet_gpu(text)[::3] == (name, memory)
    # torch reports less memory than is printed on the box.
    assert [find_gpu("NVIDIA A100-SXM4", memory).bandwidth for memory in (79.1, 39.4)] == [2.039e12, 1.555e12]
    assert find_gpu("NVIDIA RTX A4000") is None
    assert "cost $? for" in printed_by("scripts.plan", "--gpus=1", "--gpu=L40S"), "its price is not known"


def test_a_command_line_that_is_wrong_ends_with_2():
    """In one line, which says what is wanted; several machines have a page. Hours that are too short end with 1."""
    one = "--gpus=1", "--gpu=H100"
    for wrong, words in (((*one, "--gpu=H100,abc"), "H100,80"), ((*one, "--gpu=H100,8O"), "H100,80"),
                         ((*one, "--gpu=H100,"), "H100,80"), ((*one, "--gpu=A100,20"), "A100,40"),
                         ((*one, "--gpu=H1000"), "RTX4090,24"), (("--gpus=1",), "--gpu=H100"),
                         ((*one, "--gpus=16"), "docs/many_hosts.md"), ((*one, "--price=0"), "price"),
                         ((*one, "--depth=17"), "18, 16")):
        refused = run_module("scripts.plan", *wrong)
        errors = [line for line in refused.stderr.splitlines() if not line.startswith("calculating")]
        assert refused.returncode == 2 and len(errors) == 1 and words in errors[0], refused
    short = run_module("scripts.plan", *one, "--hours=0.1")
    assert short.returncode == 1 and "takes up to" in short.stderr and "calculating what 1 x H100" in short.stderr


def test_a_mac_trains_on_its_cpu_unless_asked(monkeypatch):
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert [choose_device_type(asked) for asked in ("", "mps")] == ["cpu", "mps"]


def test_samples_at_once_fit_with_the_states():
    """By hand for depth 22 on one GPU: 2 bytes and a master of 4, two moments or, of Muon, one; 63 MB a row."""
    config = config_from_depth(22, 49152, 2048, arch="modern")
    states, row = 14 * 1.423e9 - 4 * 12 * 22 * 1408**2, 2 * 22 * 1408 * 512 * 2
    for memory, samples in ((80, 256), (24, 32)):
        assert samples_at_once(config, 1, datasheet_gpu("H100")._replace(memory=memory)) == samples
        rows = ((memory - 1.5) * GIB / 1.15 - states) / row
        assert samples == min(256, 2 ** int(math.log2(rows)))


# ---- Steps that are tried


@pytest.fixture
def eager(monkeypatch):
    """In processes started here, which see no GPU."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux only")
def test_rows_are_halved_for_a_lack_of_memory_and_for_nothing_else(eager, monkeypatch):
    """A real process that runs out of memory; one that the kernel ends; one that fails otherwise."""
    config = config_from_depth(1, 64, 64)
    run = subprocess.run
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *args, **settings: run(*args, **settings, preexec_fn=limit_memory))
        with pytest.raises(UserError, match="out of memory"):
            try_steps(config, 2**15)
        # The kernel has ended it, or one of several ranks.
        for code, written in ((-9, ""), (1, "Signal 9 (SIGKILL) received by PID 1")):
            done = subprocess.CompletedProcess([], code, "", written)
            patch.setattr(subprocess, "run", lambda *_, done=done, **settings: done)
            with pytest.raises(UserError, match="out of memory"):
                try_steps(config, 1)
    answers = {rows: f"out of memory with device_batch_size={rows}" for rows in (4, 2)}

    def try_steps_of(config: GPTConfig, rows: int, *how, **settings) -> None:
        if rows in answers:
            raise UserError(answers[rows])

    monkeypatch.setattr(nanochat.plan.step_trial, "try_steps", try_steps_of)
    assert rows_that_train(5, config, False, 1) == 1
    answers[2] = "RuntimeError: no kernel image is available"
    with pytest.raises(UserError, match="no kernel image is available"):
        rows_that_train(5, config, False, 1)


def test_the_time_of_a_step_is_measured_here(eager):
    """Three steps take less than the whole command, and one step's products cannot be done at 20 TFLOP/s."""
    began = time.monotonic()
    seconds = try_steps(config_from_depth(1, 8192, 256), 16) / 1000
    head_flops = 6 * 128 * 8192 * 16 * 256
    assert head_flops / 20e12 < seconds < (time.monotonic() - began) / 3
