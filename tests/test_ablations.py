"""The series of bench/ablations.py: one that was stopped goes on; a run that fails stops no other."""
import json
import os
import signal
import subprocess

from conftest import REPO, make_sums, run_module, warm_python

TINY = ["--series=added", "--only=half_batch,warmdown", "--data=sums", "--depth=1", "--max_seq_len=48",
        "--device_batch_size=4", "--total_batch_size=192", "--tokens=768", "--seeds=1", "--classic=--arch=classic",
        "--eval_tokens=200", "--common=--compile=False --dtype=float32"]


def test_a_series_that_was_stopped_goes_on(base_folder):
    make_sums(base_folder)
    command = [warm_python(), "-m", "bench.ablations", *TINY, "--jobs=1"]
    started = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)
    assert "bits per byte" in started.stdout.readline()
    started.send_signal(signal.SIGTERM)
    rest, _ = started.communicate(timeout=300)
    assert started.returncode != 0 and "candidate" not in rest
    results = base_folder / "ablations" / "results.jsonl"
    before = results.read_text()
    assert before.count("\n") == 1
    again = run_module("bench.ablations", *TINY, "--jobs=2")
    assert again.returncode == 0 and "2/2 " in again.stdout, again.stdout + again.stderr
    assert results.read_text().startswith(before), "a result is not made again"
    scores = {found["name"]: found["bpb"] for found in map(json.loads, results.read_text().splitlines())}
    assert scores.keys() == {"baseline", "added-warmdown"}
    difference = scores["added-warmdown"] - scores["baseline"]
    assert difference and f"| warmdown | {difference:+.4f} ± ? |" in again.stdout
    # Its 2,048 tokens are not a multiple of 8 rows of 48.
    assert again.stdout.count(": failed, see ") == 1 and "| half_batch | no result |" in again.stdout
    (log,) = (base_folder / "ablations").glob("added-half_batch*.log")
    assert "total_batch_size=2048 is not a multiple" in log.read_text()
    assert set(os.listdir(base_folder)) == {"texts", "data", "tokenizer", "ablations"}, "what else a run writes is gone"
