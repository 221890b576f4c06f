"""The series of bench/ablations.py: one that is stopped goes on; the table's numbers by hand; the patches."""
import json
import math
import os
import signal
import subprocess

import pytest
import torch
from conftest import REPO, make_sums, run_module, warm_python

import nanochat.loss
import nanochat.schedule
from bench import ablation_patches
from bench.ablation_table import at_equal_time, change, slope, verdict
from nanochat.gpt import GPT
from nanochat.gpt_config import GPTConfig
from nanochat.zero import Sharding

TINY = ("--series=added --only=half_batch,warmdown --data=sums --depth=1 --max_seq_len=48 "
        "--device_batch_size=4 --total_batch_size=192 --tokens=768 --seeds=1 "
        "--classic=--softcap=15 --eval_tokens=200").split()
COMMON = "--common=--compile=False --dtype=float32"


def test_a_series_that_was_stopped_goes_on(base_folder, tmp_path):
    """Stopped after its first result: that is not made again. A run that fails is told, and stops no other."""
    make_sums(base_folder)
    command = [warm_python(), "-m", "bench.ablations", *TINY, COMMON, "--jobs=1"]
    started = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)
    assert "bits per byte" in started.stdout.readline()
    started.send_signal(signal.SIGTERM)
    rest, _ = started.communicate(timeout=300)
    assert started.returncode != 0 and "candidate" not in rest
    folder = base_folder / "ablations"
    done = {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    assert 1 <= len(done) <= 2, "the run under way may end before the signal comes"
    left = 4 - len(done)
    again = run_module("bench.ablations", *TINY, COMMON, "--jobs=2")
    assert again.returncode == 0 and f"{left}/{left} " in again.stdout, again.stdout + again.stderr
    found = [(path.name.rsplit("-", 4)[0], json.loads(path.read_text())) for path in folder.glob("*.json")]
    results = {(name, result["tokens"]): result["bpb"] for name, result in found}
    assert len(found) == 3 and results.keys() == {("classic", 768), ("classic", 384), ("added-warmdown", 768)}
    assert {path: path.stat().st_mtime_ns for path in done} == done
    difference = results["added-warmdown", 768] - results["classic", 768]
    assert difference and f"| warmdown | {difference:+.4f} ± ? |" in again.stdout
    # Its 2,048 tokens are not a multiple of 8 rows of 48.
    assert again.stdout.count(": failed, see ") == 1 and "| half_batch | failed |" in again.stdout
    (log,) = folder.glob("added-half_batch*.log")
    assert "total_batch_size=2048 is not a multiple" in log.read_text()
    assert set(os.listdir(base_folder)) == {"texts", "data", "tokenizer", "ablations"}, "what else a run writes is gone"


def test_changes_errors_and_equal_time_by_hand():
    pairs = {"a": [(1.0, 0.9), (1.2, 1.0)], "b": [(2.0, 2.1), (2.0, 2.3)]}  # −0.1, −0.2 and 0.1, 0.3
    mean, error = change(pairs)
    assert mean == pytest.approx((-0.15 + 0.2) / 2)
    assert error == pytest.approx(math.sqrt(0.005 / 2 + 0.02 / 2) / 2), "differences between corpora are no error"
    falling = slope({"a": [(1.3, 1.2), (1.4, 1.2)]}, 0.5)  # 0.15 less for twice the tokens
    assert falling == pytest.approx(-0.15 / math.log(2))
    assert slope({"a": [(1.3, 1.2)]}, 1 / 3) == pytest.approx(-0.1 / math.log(3))
    for ratio, expected in ((1, -0.2), (2, -0.05), (0.5, -0.35)):  # steps twice as long see half of the tokens
        assert at_equal_time(change({"a": [(1.0, 0.8)]}), falling, ratio).mean == pytest.approx(expected)
    alone = change({"a": [(1.0, 0.8)]})
    assert math.isnan(alone.error) and verdict(alone) == "one seed"
    for mean, expected in ((-0.21, "better"), (-0.19, "no difference"), (0.19, "no difference"), (0.21, "worse")):
        assert verdict(alone._replace(mean=mean, error=0.1)) == expected


def test_the_tail_average_is_of_the_warmdown(monkeypatch):
    rates = [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    calls = iter(rates)
    monkeypatch.setattr(nanochat.schedule, "lr_multiplier", lambda: next(calls))
    monkeypatch.setattr(Sharding, "all_gather_params", lambda sharding: None)
    use_means = ablation_patches.tail_average(power=1.0)  # weights of the newest: 1, 2/3, 2/4
    model = GPT(GPTConfig(8, 64, 1, 8, 1, 1))
    sharding = Sharding(model, model.units(), torch.device("cpu"), torch.float32, stage=0)
    for step in range(len(rates)):
        assert nanochat.schedule.lr_multiplier() == rates[step]
        for shard in sharding.shards:
            shard.master.fill_(10.0**step)
        sharding.all_gather_params()
    use_means({"sharding": sharding})
    expected = ((1e3 * 1 / 3 + 1e4 * 2 / 3) + 1e5) / 2
    assert all(torch.allclose(p, torch.tensor(expected)) for p in model.parameters())
