"""The whole pretraining script, as its users run it: real processes, real files, real kills."""
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ALL_PIECES, REPO, assert_same_run, losses, make_sums, run_module, warm_python
from safetensors.torch import load_file

from nanochat.corpus import sources
from nanochat.corpus.learn_tokenizer import train_tokenizer
from nanochat.corpus.make_dataset import make
from nanochat.data.shard_reader import load_manifest
from nanochat.model.gpt import Block
from nanochat.optim import recipe
from nanochat.runtime import compiling
from nanochat.training.checkpoint import find_model
from nanochat.training.records import read_metrics

TINY = ["--data=sums", "--depth=1", "--max_seq_len=32", "--device_batch_size=2", "--total_batch_size=128",
        "--compile=False", "--eval_tokens=512", "--sample_every=-1", "--eval_every=-1"]


@pytest.fixture
def base(made, base_folder):
    shutil.copytree(made, base_folder)
    return base_folder


def arguments(*args):
    """The tiny run with some settings replaced: giving one twice is an error, as it should be."""
    return list({arg.split("=")[0]: arg for arg in (*TINY, *args)}.values())


def train(*args, **settings):
    return run_module("scripts.base_train", *arguments(*args), **settings)


def trained(*args, **settings):
    """A run that must end well."""
    result = train(*args, **settings)
    assert result.returncode == 0, result.stderr
    return result


RUN = "import runpy\nrunpy.run_module('scripts.base_train', run_name='__main__', alter_sys=True)"


def small_world() -> None:
    sources.TINYWORLD_BYTES = 2_000_000


def test_an_empty_base_folder_is_enough(base_folder, monkeypatch):
    """
    The first command of the script's docstring with two layers and eager (compiled runs come below): the embedded
    corpus (a twelfth of it) and a tokenizer are made first, then everything is there.
    """
    settings = ["--depth=2", "--max_seq_len=512", "--device_batch_size=1", "--total_batch_size=512",
                "--num_iterations=20", "--eval_tokens=2048", "--compile=False"]
    monkeypatch.setenv("CHANGE", f"{__name__}.{small_world.__name__}")
    result = run_module("scripts.base_train", *settings, timeout=500)
    assert result.returncode == 0, result.stderr
    assert re.findall(r"(?m)^.* python -m (scripts\.\w+) --\w+=tinyworld", result.stdout) == [
        "scripts.dataset", "scripts.tok_train"]
    manifest = load_manifest("tinyworld")
    assert 1.9e6 < manifest["text_bytes"] < 2.1e6
    first, last = re.findall(r"(?m)^(.*)\n.*The capital of France is", result.stdout)
    assert "noise" in first and "noise" not in last, "what a beginner sees first looks broken"
    folder = base_folder / "base_checkpoints" / "d2"
    records = read_metrics(folder / "metrics.jsonl")
    steps = [record for record in records if "train/loss" in record]
    validations = {record["step"]: record["val/bpb"] for record in records if "val/bpb" in record}
    assert [record["step"] for record in steps] == list(range(20))
    assert {record["val/floor"] for record in records if "val/bpb" in record} == {manifest["floor"]}
    assert set(validations) == {0, 20} and validations[20] < 0.6 * validations[0], "before the first and after the last"
    for record in steps:
        assert record["train/tok_per_sec"] == pytest.approx(512 / record["train/dt"])
        assert 0 < record["train/mfu"] <= 1 and 0 <= record["train/lrm"] <= 1
    meta = json.loads((folder / "step_000020" / "meta.json").read_text())
    assert (meta["config"]["depth"], meta["model_config"]["n_embd"], meta["data_state"]["epoch"]) == (2, 128, 0)
    evaluation = run_module("scripts.base_eval", "--eval_tokens=2048", "--core_metric_max_per_task=0")
    assert evaluation.returncode == 0 and "excess over the floor" in evaluation.stdout, evaluation.stderr
    assert run_module("scripts.report").returncode == 0
    assert "- Model: d2 (trained on tinyworld)\n" in (base_folder / "report" / "report.md").read_text()


def blocks_alone() -> None:
    """What is compiled besides the blocks runs eagerly. A long run's recipe, but it ends with the average."""
    compiling.with_compiler = lambda function, dynamic=False: function
    recipe.choose_recipe = lambda *_: recipe.LONG_RUN._replace(final_average=1.0)


def all_but_blocks() -> None:
    Block.compile_body = lambda block, device: None


@pytest.mark.parametrize("dtype, arch, compiled", [
    ("float32", ALL_PIECES, None), ("bfloat16", "classic", all_but_blocks), ("bfloat16", ALL_PIECES, blocks_alone)])
def test_stopped_and_resumed_is_bit_for_bit_the_run_that_was_not(base, monkeypatch, dtype, arch, compiled):
    """
    2N = N + stop + resume + N: parameters, masters, moments, and every loss in the log. Code is compiled in two halves:
    with an empty cache a processor takes more than a second for each kernel.
    """
    half, whole = (4, 8) if not compiled else (1, 3)
    if compiled:
        monkeypatch.setenv("CHANGE", f"{__name__}.{compiled.__name__}")
    args = [f"--dtype={dtype}", f"--compile={bool(compiled)}", f"--num_iterations={whole}", f"--save_every={half}",
            "--weight_decay=0.1", f"--arch={arch}"]
    straight = trained("--model_tag=straight", *args)
    assert f", {dtype}\n" in straight.stdout
    assert ("\ncompiling, " in straight.stdout) == bool(compiled), "there is no compiler"
    folder = base / "base_checkpoints"
    (folder / "resumed").mkdir()
    shutil.copytree(folder / "straight" / f"step_{half:06d}", folder / "resumed" / f"step_{half:06d}")
    lines = (folder / "straight" / "metrics.jsonl").read_text().splitlines(keepends=True)
    # As the stopped run would have left it: one step further than its checkpoint, cut short by the kill.
    (folder / "resumed" / "metrics.jsonl").write_text("".join(lines[: half + 1]) + lines[half + 1][:20])
    resumed = trained("--model_tag=resumed", f"--resume_from_step={half}", *args)
    assert f"step {half:05d}" in resumed.stdout and f"step {half - 1:05d}/" not in resumed.stdout
    assert_same_run("straight", "resumed", whole)
    lines = [[line for line in run.stdout.splitlines() if f"{whole - 1:05d}/" in line] for run in (straight, resumed)]
    assert lines[0][0].split("|")[1] == lines[1][0].split("|")[1], "the smoothed loss goes on too"
    if compiled == blocks_alone:
        kept = load_file(folder / "resumed" / f"step_{whole:06d}" / "optimizer_rank_00000.safetensors")
        for name, is_average in {"lm_head.weight": True, "transformer.wte.weight": False}.items():
            assert torch.equal(kept[f"master.{name}"], kept[f"ema_nesterov.average.{name}"]) == is_average


def test_a_longer_run_says_what_it_goes_on_from(base, monkeypatch):
    """From weights that a long run's end has blended; weights of a run that was stopped are not."""
    monkeypatch.setenv("CHANGE", f"{__name__}.{blocks_alone.__name__}")
    trained("--num_iterations=2", "--save_every=1")
    for step, steps in ((1, 3), (3, 4)):
        printed = trained(f"--num_iterations={steps}", f"--resume_from_step={step}", "--overwrite").stdout
        assert f"the run has {steps} steps now" in printed and ("blended" in printed) == (step == 3), printed


def test_a_chosen_batch_scales_the_rates_and_a_resumed_run_keeps_both(base):
    """--total_batch_size=-1 anew would choose from another horizon when a run goes on for longer, or for less."""
    args = ["--total_batch_size=-1", "--num_iterations=2", "--save_every=1", "--device_batch_size=64",
            "--dtype=bfloat16", "--weight_decay=0.1", "--warmup_steps=40", "--arch=classic"]
    straight = trained("--model_tag=straight", *args)
    printed = re.search("rates: all x (.*) for this batch; weight decay x (.*) for", straight.stdout)
    lr, decay = map(float, printed.groups())
    assert lr == 0.5, "8,192 tokens are few"
    assert lr * decay * 2 == pytest.approx(1.2e9 / 2**19, rel=1e-3), "rate times decay times steps is that of the rule"
    folder = base / "base_checkpoints"
    (folder / "resumed").mkdir()
    shutil.copytree(folder / "straight" / "step_000001", folder / "resumed" / "step_000001")
    shutil.copy(folder / "straight" / "metrics.jsonl", folder / "resumed")
    trained("--model_tag=resumed", "--resume=auto", *args)
    assert_same_run("straight", "resumed", 2)
    meta = json.loads((folder / "straight" / "step_000002" / "meta.json").read_text())
    trained("--model_tag=given", *args, f"--total_batch_size={meta['total_batch_size']}", "--matrix_lr=0.01",
            "--embedding_lr=0.1", "--unembedding_lr=0.002", f"--weight_decay={0.1 * meta['rate_scales'][1]}")
    assert_same_run("straight", "given", 2)


def start(*args, command=(sys.executable, "-m", "scripts.base_train"), **environment):
    """The tiny run in a process of its own, which answers on `stdout`."""
    return subprocess.Popen([*command, *arguments(*args)], cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment)


def test_a_second_run_in_the_same_folder_ends_at_once_and_the_first_goes_on(base):
    """Also one that would remove the first's checkpoints. Then the first is stopped and resumed."""
    first = start("--num_iterations=1000000", "--model_tag=one", "--save_every=50", "--keep_last=2")
    try:
        assert any(line.startswith("saved ") for line in first.stdout)
        for args in (["--resume=auto"], ["--overwrite"]):
            second = train("--model_tag=one", "--num_iterations=3", *args)
            assert second.returncode == 1 and second.stderr.count("\n") == 1 and "step 00000" not in second.stdout
            assert "/one is in use by another run" in second.stderr
        first.send_signal(signal.SIGTERM)
        printed, errors = first.communicate(timeout=300)
        assert first.returncode == 143, printed + errors
        assert "stopped after step" in printed and "warning" not in printed
    finally:
        first.kill()
        first.communicate()
    step = int(re.search(r"stopped after step (\d+)", printed)[1])
    resumed = trained("--model_tag=one", f"--num_iterations={step + 1}", "--resume=auto")
    assert f"step {step:05d}/" in resumed.stdout and f"step {step - 1:05d}/" not in resumed.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_built_on_a_stopped_run_unless_its_step_is_named(base, number):
    """It saves and ends with the code of its signal; the next stages refuse its model."""
    command = [warm_python(), "-m", "scripts.base_train", *arguments("--num_iterations=1000000", "--model_tag=half")]
    run = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)
    assert any(line.startswith("step 00003/") for line in run.stdout)
    run.send_signal(number)
    printed, _ = run.communicate(timeout=300)
    assert run.returncode == 128 + number, printed
    [saved] = (base / "base_checkpoints" / "half").glob("step_*")
    step = int(saved.name.removeprefix("step_"))
    stages = {"mid_train": ["--total_batch_size=32"], "chat_sft": ["--source=base"], "chat_rl": ["--source=base"]}
    for script, settings in stages.items():
        refused = run_module(f"scripts.{script}", *settings, "--compile=False")
        assert refused.returncode == 1 and f"--source_step={step}" in refused.stderr
    named = run_module("scripts.mid_train", "--tasks=arithmetic[:9]", "--compile=False", f"--source_step={step}")
    assert f"starting from {saved}\n" in named.stdout, named.stderr


def test_a_laptop_trains_without_sizes_and_mid_training_takes_the_batch_of_pretraining(base):
    """Vocabulary and layers as small as a test needs; the rest is what this processor gets."""
    laptop = run_module("scripts.base_train", "--data=sums", "--depth=1", "--num_iterations=1", "--compile=False",
                        "--device_type=cpu", "--sample_every=-1")
    assert "batch: 8,192 tokens = 8 rows x 512 x 1 rank(s)" in laptop.stdout, laptop.stderr
    went_on = run_module("scripts.mid_train", "--tasks=arithmetic:easy[:99]", "--num_iterations=1", "--compile=False",
                         "--device_type=cpu", "--eval_every=-1", "--device_batch_size=4")
    assert went_on.returncode == 0 and "1 steps of 16 rows" in went_on.stdout, went_on.stderr


NO_DRAW = """
from nanochat.model.gpt import GPT
del GPT.draw
"""
def start_with(change, *args, python=sys.executable, **environment):
    """`start`, in a process that has done something else first."""
    return start(*args, command=[python, "-c", change + RUN], **environment)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_resumed_run_draws_no_weights(base, stage):
    """They are the checkpoint's; drawing takes ten seconds for a billion, on every rank."""
    trained("--num_iterations=1", f"--zero_stage={stage}")
    resumed = start_with(NO_DRAW, "--num_iterations=2", "--resume=auto", f"--zero_stage={stage}", python=warm_python())
    printed, errors = resumed.communicate(timeout=300)
    assert resumed.returncode == 0 and "step 00001/" in printed, errors


def test_going_back_to_an_older_step_needs_a_word_and_other_settings_are_named(base):
    """Newer checkpoints are never dropped in silence. A horizon that the checkpoint is past is refused."""
    args = ["--num_iterations=9", "--save_every=3", "--model_tag=branch"]
    trained(*args)
    refused = train(*args, "--resume_from_step=3")
    assert refused.returncode == 1 and "6, 9; --overwrite removes them" in refused.stderr
    back = trained("--num_iterations=5", "--save_every=3", "--keep_last=2", "--model_tag=branch",
                   "--resume_from_step=3", "--overwrite", "--matrix_lr=0.01")
    assert "with another matrix_lr: 0.02 before, 0.01 now" in back.stdout
    folder = base / "base_checkpoints" / "branch"
    assert sorted(path.name for path in folder.glob("step_*")) == ["step_000003", "step_000005"]
    assert losses("branch").keys() == set(range(5)), "the log is that of the branch that is left"
    trained("--num_iterations=9", "--model_tag=branch", "--resume=auto")
    report = {path: path.read_bytes() for path in (base / "report").rglob("*.json")}
    shorter = train("--num_iterations=7", "--model_tag=branch", "--resume=auto")
    assert shorter.returncode == 1 and "--num_iterations=9" in shorter.stderr
    assert report and {path: path.read_bytes() for path in (base / "report").rglob("*.json")} == report


NO_MEMORY = """
from nanochat.optim import muon
def update(self, stats):
    raise MemoryError
muon.DistMuon.step = update
"""
STOPPED = """
import os, signal
from nanochat.eval import loss_eval
def evaluate(*args, evaluate=loss_eval.evaluate_bpb):
    os.kill(os.getpid(), signal.SIGTERM)
    return evaluate(*args)
loss_eval.evaluate_bpb = evaluate
"""
KILLED = """
import os, signal
from nanochat.training.metrics import Metrics
def log_step(self, step, *others, log_step=Metrics.log_step):
    if step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    log_step(self, step, *others)
Metrics.log_step = log_step
"""


def test_a_run_replaces_another_only_when_its_first_checkpoint_is_whole(base):
    """
    Refused, out of memory in its first step, or stopped before it: all is there to the byte.
    Killed two steps after the one it went back to: the old model still answers, but the run goes on from that step.
    """
    trained("--num_iterations=12", "--save_every=3", "--model_tag=both")
    folder = base / "base_checkpoints" / "both"

    def left():
        return {path: path.read_bytes() for top in (folder, base / "report") for path in top.rglob("*.*")}

    before = left()
    anew = ["--model_tag=both", "--overwrite"]
    refused = train("--num_iterations=5", "--resume_from_step=6", *anew)
    assert "5 steps, but the checkpoint is at step 6" in refused.stderr and before == left()
    full = start_with(NO_MEMORY, "--num_iterations=5", "--eval_every=1", *anew, python=warm_python())
    assert "out of memory" in full.communicate(timeout=300)[1]
    stopped = start_with(STOPPED, "--num_iterations=5", "--eval_every=1", *anew, python=warm_python())
    printed = "".join(stopped.communicate(timeout=300))
    assert [run.returncode for run in (refused, full, stopped)] == [1, 1, 143] and before == left()
    assert "stopped before the first step" in printed and "--resume" not in printed

    killed = start_with(KILLED.replace("2", "8"), "--num_iterations=12", "--resume_from_step=6", *anew,
                        python=warm_python())
    killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert find_model("base", "both").name == "step_000012" and losses("both").keys() == set(range(8))
    resumed = trained("--num_iterations=12", "--save_every=4", "--model_tag=both", "--resume=auto")
    assert "step 00006/" in resumed.stdout and "step 00005/" not in resumed.stdout
    kept = [int(path.name[5:]) for path in sorted(folder.iterdir()) if path.is_dir()]
    assert kept == [3, 6, 8, 12]


def test_a_finished_model_is_not_replaced_because_its_optimizer_is_damaged(base):
    """--resume=auto goes on from what is whole; the folder with the finished weights stays, under another name."""
    trained("--num_iterations=6", "--save_every=3", "--model_tag=half")
    folder = base / "base_checkpoints" / "half"
    model = (folder / "step_000006" / "model.safetensors").read_bytes()
    os.truncate(folder / "step_000006" / "optimizer_rank_00000.safetensors", 99)
    resumed = trained("--num_iterations=6", "--model_tag=half", "--resume=auto", "--matrix_lr=0.01")
    [kept] = folder.glob("step_000006.damaged*")
    assert (kept / "model.safetensors").read_bytes() == model and str(kept) in resumed.stdout
    assert sorted(path.name for path in folder.glob("step_*") if path != kept) == ["step_000003", "step_000006"]


def test_a_run_that_saved_nothing_costs_nothing_of_what_it_would_have_replaced(base):
    """Killed in its third step: then only a word makes way with the old checkpoints, and two ways lead back."""
    args = ["--num_iterations=6", "--save_every=3", "--dtype=float32"]
    folder = base / "base_checkpoints" / "d1"
    trained(*args)
    model = (folder / "step_000006" / "model.safetensors").read_bytes()

    def overwritten() -> None:
        process = start_with(KILLED, "--num_iterations=8", "--overwrite", python=warm_python())
        printed, errors = process.communicate(timeout=300)
        assert process.returncode == -signal.SIGKILL and "step 00001/" in printed, printed + errors
        assert len(list(folder.glob("*/replaced"))) == 2
        assert find_model("base").name == "step_000006", "the old model still answers"

    overwritten()
    for how in ([], ["--resume=auto"]):
        refused = train(*args, *how)
        assert refused.returncode == 1 and refused.stderr.count("\n") == 1
        for words in ("step 3, 6 in", "--resume_from_step=6", f"rm {folder}/step_*/replaced", "--overwrite"):
            assert words in refused.stderr, refused.stderr
    assert "at step 6 of 6" in trained(*args, "--resume_from_step=6").stdout
    assert "at step 6 of 6" in trained(*args, "--resume=auto").stdout
    overwritten()
    subprocess.run(re.search(r"rm \S+", train(*args, "--resume=auto").stderr)[0], shell=True, check=True)
    assert "at step 6 of 6" in trained(*args, "--resume=auto").stdout
    assert (folder / "step_000006" / "model.safetensors").read_bytes() == model
    overwritten()
    assert "starting from step 0" in trained("--num_iterations=2", "--overwrite", "--resume=auto").stdout
    assert [path.name for path in folder.glob("step_*")] == ["step_000002"]


def test_bad_input_is_one_clear_line(base):
    """With the value that is wrong; nothing that was there is lost."""
    trained("--num_iterations=1", "--model_tag=there", "--dtype=float32")
    before = sorted(path.name for path in (base / "base_checkpoints" / "there").rglob("*"))
    for args, expected in [
        (["--data=nowhere"], "nowhere"), (["--model_tag=there"], "--resume=auto"),
        (["--model_tag=there", "--arch=modern,key_offset=False", "--resume=auto"], "{'key_offset': True}"),
        (["--model_tag=there", "--dtype=bfloat16", "--resume=auto"], "--dtype"), (["--resume_from_step=5"], "no valid"),
        (["--num_iterations=-1", "--target_param_data_ratio=-1"], "the horizon"),
        (["--model_tag=there", "--overwrite", "--total_batch_size=100"], "not a multiple of 64"),
        (["--model_tag=a/../../b"], "a/../../b"),
    ]:
        result = train("--num_iterations=1", "--dtype=float32", *args)
        errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and expected in errors[0] and result.returncode in (1, 2), f"{args}: {result.stderr}"
    assert before == sorted(path.name for path in (base / "base_checkpoints" / "there").rglob("*"))


def test_a_published_model_is_trained_further(base, tmp_path):
    """
    Exported, imported, and begun from with two data sets: its tokenizer and pieces stay, and the first validations are
    what base_eval says of it. The second run goes on exactly when the first model is gone.
    """
    texts = tmp_path / "notes"
    texts.mkdir()
    for i in range(60):
        (texts / f"{i}.txt").write_text(f"Note {i}: {i * i} is its square, {i + 7} is seven more. " * 3)
    make(str(texts))  # it has no tokenizer
    trained("--model_tag=ours", "--num_iterations=12", "--arch=classic,smear=True", "--dtype=float32")
    for script, *args in (("export_hf", "--source=base", "--model_tag=ours", f"--output={tmp_path / 'published'}"),
                          ("import_hf", f"--input={tmp_path / 'published'}", "--model_tag=theirs")):
        assert run_module(f"scripts.{script}", *args).returncode == 0
    mixed = "--data=notes * 3, sums * 1"
    measured = run_module("scripts.base_eval", "--model_tag=theirs", mixed, "--eval_tokens=512",
                          "--device_batch_size=2", "--core_metric_max_per_task=0")
    assert measured.returncode == 0, measured.stderr
    args = [mixed, "--begin_from=theirs", "--depth=-1", "--max_seq_len=-1", "--num_iterations=6", "--save_every=3",
            "--eval_every=6", "--dtype=float32", "--device_batch_size=2"]
    trained("--model_tag=further", *args)
    folder = base / "base_checkpoints"
    records = read_metrics(folder / "further" / "metrics.jsonl")
    for of in ("", " of sums"):
        before, _ = [record[f"val/bpb{of}"] for record in records if f"val/bpb{of}" in record]
        assert f"\nvalidation{of}: {before:.4f} bits per byte" in measured.stdout
    meta = json.loads((folder / "further" / "step_000006" / "meta.json").read_text())
    assert meta["origin"].startswith("base_checkpoints/theirs/step_000012 (") and meta["model_config"]["smear"]
    for wrong, expected in ((["--model_tag=theirs"], "--model_tag"), (["--depth=2"], "depth=2"),
                            (["--arch=modern"], "arch='modern'"), (["--source_step=4"], "step 4")):
        result = train("--model_tag=new", *args, *wrong)
        assert result.returncode == 1 and expected in result.stderr, f"{wrong}: {result.stderr}"
    shutil.rmtree(folder / "theirs")
    for again in (args, [arg for arg in args if "begin" not in arg]):
        shutil.rmtree(folder / "resumed", ignore_errors=True)
        shutil.copytree(folder / "further" / "step_000003", folder / "resumed" / "step_000003")
        shutil.copy(folder / "further" / "metrics.jsonl", folder / "resumed")
        trained("--model_tag=resumed", *again, "--resume=auto")
        assert_same_run("further", "resumed", 6)


def test_a_tokenizer_that_does_not_belong_is_refused_and_can_be_put_back(base):
    trained("--num_iterations=2")
    train_tokenizer("sums", 350)
    result = train("--num_iterations=4", "--resume=auto")
    assert result.returncode == 1 and result.stderr.count("\n") == 1 and "with another tokenizer" in result.stderr
    subprocess.run(re.search(r"put back its own, (cp \S+ \S+), ", result.stderr)[1], shell=True, check=True)
    trained("--num_iterations=4", "--resume=auto")


def test_a_run_goes_on_with_its_own_data_only(base_folder):
    make_sums(base_folder)
    texts = base_folder / "texts"
    trained("--num_iterations=2")
    make(str(texts), "sums")  # the same again
    trained("--num_iterations=3", "--resume=auto")
    (texts / "new.txt").write_text("One more document.")
    make(str(texts), "sums")
    result = train("--num_iterations=4", "--resume=auto")
    assert "cannot continue exactly: data is not what the checkpoint was trained with" in result.stderr
    assert result.returncode == 1 and result.stderr.count("\n") == 1


@pytest.fixture
def small_disk(base, tmp_path):
    """A file system of 10 MB with the data set and its tokenizer."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    for name in ("data", "tokenizer"):
        shutil.copytree(base / name, disk / name)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


FULL_DISK = """
import os
from nanochat.training.metrics import Metrics
def log_step(self, step, *others, log_step=Metrics.log_step):
    filler = os.path.join(os.environ["NANOCHAT_BASE_DIR"], "filler")
    if step == 12:
        with open(filler, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(2**12))
            except OSError:
                pass
    if step == 32:
        os.truncate(filler, 0)
    log_step(self, step, *others)
Metrics.log_step = log_step
"""
OF_FULL_DISK = ["--num_iterations=40", "--save_every=10", "--keep_last=1", "--arch=classic"]


def test_a_disk_that_is_full_for_a_while_does_not_end_the_run(small_disk):
    """
    Full from step 12 on, free at step 32: all lines of the log are written then, and saves are tried again. Nor does a
    run end whose own output is refused.
    """
    process = start_with(FULL_DISK, *OF_FULL_DISK, python=warm_python(), NANOCHAT_BASE_DIR=str(small_disk))
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0 and not errors, errors
    folder = small_disk / "base_checkpoints" / "d1"
    newest = f"the newest saved step is {folder}/step_000010"
    for line in ("step 20 was not saved: No space left", f"{folder}/metrics.jsonl cannot be written: No space left"):
        assert len(re.findall(f"^warning: {line}.*{newest}", printed, re.MULTILINE)) == 1, printed
    records = read_metrics(folder / "metrics.jsonl")
    assert [record["step"] for record in records if "train/loss" in record] == list(range(40))
    assert [path.name for path in folder.glob("step_*")] == ["step_000040"]
    with open("/dev/full", "w") as full:
        command = [warm_python(), "-m", "scripts.base_train", *arguments("--model_tag=unheard", "--num_iterations=2")]
        assert subprocess.run(command, cwd=REPO, stdout=full, stderr=full, timeout=300).returncode == 0


def test_a_full_disk_does_not_end_a_run_that_will_make_room(small_disk, monkeypatch):
    """Full from the beginning: of its log and its model there is nothing until what --overwrite gives up is gone."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(small_disk))
    trained("--num_iterations=4", "--save_every=2", "--arch=classic")
    folder = small_disk / "base_checkpoints" / "d1"
    with open(small_disk / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(2**12))
    run = trained("--num_iterations=3", "--overwrite", "--arch=classic")
    assert f"warning: {folder}/metrics.jsonl cannot be written: No space left" in run.stdout
    assert [path.name for path in folder.glob("step_*")] == ["step_000003"]


def test_wandb_works_offline_and_a_resumed_run_continues_under_its_id(base):
    pytest.importorskip("wandb")
    for steps, how in ((2, "--overwrite"), (3, "--resume=auto")):
        trained(f"--num_iterations={steps}", "--run=me", how, env={"WANDB_MODE": "offline"})
    runs = list(base.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(runs) == 2 and len({path.name for path in runs}) == 1, "on disk: one run in two parts"
