"""The pretraining script on several ranks: one loss curve for any ranks and stage, and no way to lose a run."""
import contextlib
import fcntl
import io
import itertools
import os
import re
import select
import shutil
import signal
import subprocess
import termios
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from conftest import ALL_PIECES, REPO, assert_same_run, base_run, losses, warm_python
from ranks import run_as_main, run_on_ranks
from safetensors.torch import load_file
from warm_python import Job

from nanochat.corpus.make_dataset import make
from nanochat.runtime import distributed
from nanochat.training.checkpoint import problem_with
from nanochat.training.records import read_metrics

TINY = {"data": "sums", "depth": 1, "max_seq_len": 32, "device_batch_size": 4, "total_batch_size": 512,
        "num_iterations": 30, "compile": False, "eval_tokens": 512, "sample_every": -1, "eval_every": -1,
        "dtype": "float32", "grad_clip": 1.0, "weight_decay": 0.1,
        "device_type": "cuda" if torch.cuda.device_count() >= 4 else "cpu"}
STEPS = 28  # of runs that are killed


@pytest.fixture(autouse=True)
def base(made, monkeypatch):
    """All tests share one folder: each trains under a tag of its own."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(made))
    return made


def arguments(tag: str, settings: dict) -> list[str]:
    return [f"--{key}={value}" for key, value in (TINY | settings | {"model_tag": tag}).items()]


def script(rank: int, world_size: int, args: list[str], nan_step: int = -1) -> str:
    """Run scripts.base_train here; returns what it printed. In nan_step the last rank's gradient is not finite."""
    from nanochat.model.gpt import GPT

    forward, passes = GPT.forward, itertools.count()

    def spoilt(self, *args, **settings):
        loss = forward(self, *args, **settings)
        if torch.is_grad_enabled() and next(passes) == nan_step * 4 // world_size:
            loss = loss * torch.tensor(float("nan"))
        return loss

    if rank == world_size - 1:
        GPT.forward = spoilt
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):  # an early end is no error
        run_as_main("scripts.base_train", args)
    return printed.getvalue()


def train(world_size: int, tag: str, nan_step: int = -1, **settings) -> str:
    """A whole run on these ranks: what rank 0 printed."""
    return run_on_ranks(world_size, script, arguments(tag, settings), nan_step)[0]


def difference(a: dict[int, float], b: dict[int, float]) -> float:
    assert a.keys() == b.keys()
    return max(abs(a[step] - b[step]) for step in a)


@pytest.fixture(scope="module")
def undisturbed(made):
    """Two ranks, stage 2, so many steps: what interrupted runs are compared with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(made))
        train(2, "undisturbed", num_iterations=STEPS, save_every=4)
    return "undisturbed"


def test_one_two_and_four_ranks_draw_the_same_curve_on_every_stage():
    """
    Losses within 1e-5 over 12 steps: float32 sums in another order (a learning rate that is off by a thousandth makes
    8e-5). One of the runs begins by removing another, which only one rank may do; one
    on stage 3 is evaluated on its way.
    """
    train(1, "1", num_iterations=12)
    train(1, "2-0", num_iterations=1)
    one = losses("1")
    assert one[11] < one[0] - 1, "a curve that falls"
    for world_size, stage in ((2, 0), (2, 3), (4, 1), (4, 2), (4, 3)):
        tag = f"{world_size}-{stage}"
        also = dict(eval_every=12, sample_every=12) if tag == "2-3" else {}
        train(world_size, tag, num_iterations=12, zero_stage=stage, overwrite=True, **also)
        assert difference(losses(tag), one) < 1e-5, tag


def test_sizes_that_are_left_to_the_device_do_not_depend_on_the_ranks():
    """Two steps of as few tokens as are chosen."""
    for world_size in (1, 4):
        train(world_size, f"chosen-{world_size}", max_seq_len=-1, device_batch_size=-1, total_batch_size=-1,
              num_iterations=2)
    assert difference(losses("chosen-1"), losses("chosen-4")) < 1e-5


def test_bfloat16_does_not_depend_on_the_cut():
    """
    Within a few last bits of a loss (4.8e-7): sums of bfloat16 gradients are nearly exact in float32, and so is the
    norm that clips. With a norm of float32 the third and fourth loss are 7e-5 and 1e-5 off. A small model: where the
    processor has no products in bfloat16, one takes 70 times as long.
    """
    settings = dict(num_iterations=4, dtype="bfloat16", depth=2, arch=ALL_PIECES, total_batch_size=256,
                    device_batch_size=2)
    train(1, "bf16", **settings)
    for world_size, stage in ((4, 2), (2, 3)):
        tag = f"bf16-{world_size}-{stage}"
        train(world_size, tag, zero_stage=stage, **settings)
        assert difference(losses(tag), losses("bf16")) <= 1.5e-6, tag


def test_two_ranks_stopped_and_resumed_are_the_run_that_was_not():
    """
    2N = N + stop + resume + N on stage 3, bit for bit: weights, masters, moments, losses. On stage 2 ranks are killed,
    below.
    """
    settings = dict(num_iterations=8, save_every=4, zero_stage=3, dtype="bfloat16", arch=ALL_PIECES)
    train(2, "straight", **settings)
    shutil.copytree(base_run("straight") / "step_000004", base_run("resumed") / "step_000004")
    shutil.copy(base_run("straight") / "metrics.jsonl", base_run("resumed"))
    printed = train(2, "resumed", resume="auto", **settings)
    assert "step 00004/" in printed and "step 00003/" not in printed
    assert_same_run("straight", "resumed", 8)


def test_a_run_moves_between_ranks_and_stages():
    """
    2 ranks on stage 2, then 4 on stage 3, then 3, among which four micro-batches do not divide, then 1: the losses
    stay within 1e-4 of the run that stayed.
    """
    settings = dict(num_iterations=12, save_every=3, depth=3, arch=ALL_PIECES)
    train(2, "stayed", zero_stage=2, **settings)
    before = "stayed"
    for world_size, stage, step in ((4, 3, 3), (3, 2, 6), (1, 1, 9)):
        tag = f"moved-{world_size}"
        shutil.copytree(base_run(before) / f"step_{step:06d}", base_run(tag) / f"step_{step:06d}")
        shutil.copy(base_run(before) / "metrics.jsonl", base_run(tag))
        train(world_size, tag, zero_stage=stage, resume="auto", **settings)
        before = tag
    assert difference(losses(before), losses("stayed")) < 1e-4


def test_a_model_that_is_trained_further_on_two_data_sets_does_not_depend_on_ranks(base):
    """One rank, four, stage 3 and a pipeline: they read the same weights and rows."""
    make(str(base / "texts"), "half", shard_mb=0.005)
    further = dict(data="sums*9, half", begin_from="source", depth=-1, num_iterations=8)
    train(1, "source", depth=2, num_iterations=6, arch=ALL_PIECES)
    train(1, "further", **further)
    assert losses("further")[0] < losses("source")[0] - 1, "with the weights of the other"
    for world_size, settings in ((4, {}), (2, dict(zero_stage=3)), (2, dict(zero_stage=1, pipeline_stages=2))):
        tag = f"further-{world_size}-{len(settings)}"
        train(world_size, tag, **further, **settings)
        assert difference(losses(tag), losses("further")) < 1e-5, tag


def test_a_bad_step_is_nobodys_update():
    """A NaN on one of two ranks: both skip that step, count it, and go on."""
    printed = train(2, "nan", nan_step=5, num_iterations=8, save_every=4)
    assert "step 00005: skipped on every rank" in printed and printed.count("skipped on every rank") == 1
    records = {record["step"]: record for record in read_metrics(base_run("nan") / "metrics.jsonl")}
    assert [step for step in records if "train/loss" not in records[step]] == [5] and records[5]["train/skipped"] == 1
    assert all(t.isfinite().all() for t in load_file(base_run("nan") / "step_000008" / "model.safetensors").values())


# ---- Real kills, under torchrun

def start_job(log: Path, tag: str, launcher: tuple[str, ...] = (), kill: tuple[str, Path] | None = None,
              by: int = signal.SIGKILL, environment: dict | None = None, **settings) -> Job:
    settings = {"num_iterations": STEPS, "save_every": 4} | settings
    return Job(log, "scripts.base_train", arguments(tag, settings), launcher, kill, by, **(environment or {}))


def wait_less() -> None:
    distributed.TRAINING_TIMEOUT = timedelta(seconds=10)


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_falls_silent_is_brought_back_by_torchrun(tmp_path, undisturbed, by):
    """
    In mid-step; a stopped rank when the others' collective has timed out. With --max-restarts the same command ends,
    and matches the undisturbed run.
    """
    environment = {"CHANGE": f"{__name__}.{wait_less.__name__}", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
    job = start_job(tmp_path / "log", by.name, ("--max-restarts=1",), ("1", base_run(by.name) / "step_000012"), by,
                    environment)
    assert job.end() == 0, job.text()
    assert re.search(r"resuming from .*step_0000(08|12|16|20|24)", job.text())
    assert_same_run(undisturbed, by.name, STEPS)


def test_a_job_killed_while_it_saves_goes_on_from_what_is_whole(tmp_path, undisturbed):
    """SIGKILL of both ranks when a save has begun; then the newest checkpoint is damaged, named and passed over."""
    job = start_job(tmp_path / "log", "saving", kill=("01", base_run("saving") / ".step_0000[12]*/*"))
    assert job.end() != 0 and "SIGKILL" in job.text(), job.text()
    newest = max(base_run("saving").glob("step_*"))
    shard = newest / "optimizer_rank_00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    printed = train(2, "saving", resume="auto", num_iterations=STEPS, save_every=4)
    assert f"warning: {newest}: optimizer_rank_00001.safetensors does not match its checksum" in printed
    assert "resuming from" in printed and not list(base_run("saving").glob(".step*"))
    assert_same_run(undisturbed, "saving", STEPS)


def test_sigterm_finishes_the_step_saves_and_ends_well(tmp_path, undisturbed):
    """To the launcher, as schedulers do: every worker exits 0 with a checkpoint of the step it was in."""
    job = start_job(tmp_path / "log", "stopped", kill=("0", base_run("stopped") / "step_000010"), by=signal.SIGTERM,
                    save_every=10)
    job.end()  # torchrun's own status is 1
    step = int(re.search(r"stopped after step (\d+); --resume=auto continues", job.text())[1])
    assert 10 < step < STEPS and "exitcode" not in job.text(), job.text()
    assert max(base_run("stopped").glob("step_*")).name == f"step_{step:06d}"
    train(2, "stopped", resume="auto", num_iterations=STEPS, save_every=-1)
    assert_same_run(undisturbed, "stopped", STEPS)


def evaluate_until_stopped(rank: int, world_size: int, args: list[str]) -> tuple[str, int]:
    """What is printed, and how many batches are evaluated; in the third of them rank 0 gets SIGTERM."""
    from nanochat.model.gpt import GPT

    forward, calls = GPT.forward, itertools.count()

    def counted(*args, **settings):
        if settings.get("reduction") == "none" and next(calls) == 2 and rank == 0:  # each token's loss is wanted
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(*args, **settings)

    GPT.forward = counted
    return script(rank, world_size, args), next(calls)


def test_sigterm_to_one_rank_ends_an_evaluation_on_all_and_saves_at_once():
    """
    At step 4 in the first of two batches, as at step 0. No step is taken any more, and no other evaluation begins; it
    comes with the resume.
    """
    settings = dict(num_iterations=5, eval_every=4, sample_every=4, zero_stage=3)
    ranks = run_on_ranks(2, evaluate_until_stopped, arguments("left", settings))
    printed = ranks[0][0]
    assert [count for _, count in ranks] == [3, 3]
    assert printed.splitlines()[-1] == "stopped after step 4; --resume=auto continues"
    assert "step 00003/00005 (" in printed and "step 00004/00005 (" not in printed
    assert [path.name for path in base_run("left").glob("step_*")] == ["step_000004"]
    assert "step 00004/00005 | validation" in train(2, "left", resume="auto", **settings)
    [again, _] = run_on_ranks(2, evaluate_until_stopped, arguments("again", settings | {"resume": "auto"}))
    assert "resume" not in again[0].splitlines()[-1], "the same command goes on: speedrun.sh takes no --resume"


def test_a_lost_connection_saves_and_ends():
    """torchrun in a terminal that goes away, as with a dropped ssh session: SIGHUP, and no output can be written."""
    ours, theirs = os.openpty()

    def in_a_terminal() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as in a terminal, also where these tests run under nohup
        fcntl.ioctl(theirs, termios.TIOCSCTTY)

    command = [Path(warm_python()).with_name("torchrun"), "--standalone", "--nproc_per_node=2", "-m",
               "scripts.base_train", "--", *arguments("hung-up", dict(num_iterations=10**6, save_every=-1))]
    env = {name: value for name, value in os.environ.items() if name != "PET_SIGNALS_TO_HANDLE"}  # of nohup, as well
    job = subprocess.Popen(command, cwd=REPO, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
                           env=env | {"OMP_NUM_THREADS": "1"}, preexec_fn=in_a_terminal)
    os.close(theirs)
    printed = b""
    while b"step 00002/" not in printed:
        assert select.select([ours], [], [], 300)[0], printed
        printed += os.read(ours, 4096)
    os.close(ours)
    job.wait(300)
    [saved] = base_run("hung-up").glob("step_*")
    assert saved.name > "step_000002"
    assert problem_with(saved) is None


def test_what_the_user_has_to_mend_is_not_tried_again(tmp_path):
    """torchrun has a restart left when the loss is not finite any more: it ends with the same line, before training."""
    job = start_job(tmp_path / "log", "diverged", ("--max-restarts=1",), matrix_lr=1e38, num_iterations=20)
    assert job.end() == 1
    assert len(re.findall("^step 00000/", job.text(), re.MULTILINE)) == 1, job.text()
    line, again = re.findall("^error: loss or gradient not finite.*[^)]$", job.text(), re.MULTILINE)
    assert line == again


def test_a_disk_that_only_rank_0_finds_read_only_is_one_line(base, tmp_path, monkeypatch):
    """The other rank waits for it, and must not report a lost connection."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(disk)]).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        for name in ("data", "tokenizer"):
            shutil.copytree(base / name, disk / name)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        monkeypatch.setenv("NANOCHAT_BASE_DIR", str(disk))
        job = start_job(tmp_path / "log", "refused")
        assert job.end() == 1
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    [line] = re.findall("^error: .*", job.text(), re.MULTILINE)
    assert f"Read-only file system: {disk}/" in line and "onnection" not in job.text()
