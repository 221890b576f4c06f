"""
One run of bench/ablations.py: scripts.base_train with flags, in this process, so that patches reach it; then bits per
byte of whole documents, and one JSON file. What the run itself writes goes to a folder that is deleted.

    python -m bench.ablation_run RESULT.json '{"flags": ["--depth=4", …], "patches": [], "eval_tokens": 100000}'
"""
import json
import math
import os
import runpy
import statistics
import sys
import tempfile
from pathlib import Path

from bench import ablation_patches
from nanochat.compiling import eagerly
from nanochat.files import base_dir, write_text
from nanochat.loss_eval import document_nats, first_documents
from nanochat.records import read_metrics
from nanochat.saving import CheckpointWriter


def run(flags: list[str], patches: list[str], eval_tokens: int) -> dict:
    """Train, and measure: what bench/ablations.py needs of a run. eval_tokens 0: no bits per byte."""
    CheckpointWriter.checkpoint = lambda *_, **__: None
    finish = [getattr(ablation_patches, name)() for name in patches]
    sys.argv = ["base_train", *flags]
    ran = runpy.run_module("scripts.base_train", run_name="__main__", alter_sys=True)
    if ran["step"] < ran["num_iterations"]:
        raise SystemExit("stopped")
    records = [record for record in read_metrics(ran["metrics"].path) if "train/loss" in record]
    losses = [record["train/loss"] for record in records]
    times = [record["train/dt"] for record in records[len(records) // 4 :]]  # the first steps compile
    result = {
        "ms": 1e3 * statistics.median(times), "seconds": ran["metrics"].state["elapsed"],
        "loss": statistics.fmean(losses[-math.ceil(len(losses) / 20) :]), "parameters": ran["parameters"],
        "flops_per_token": ran["flops_per_token"], "batch": ran["total_batch_size"],
        "tokens": ran["num_iterations"] * ran["total_batch_size"],
    }
    if eval_tokens:
        for function in filter(None, finish):
            function(ran)
        with eagerly():
            documents = first_documents(ran["data"], ran["tokenizer"], eval_tokens)
            scored = document_nats(ran["model"], documents, ran["token_bytes"], 8 * ran["max_seq_len"])
        nats, size = map(sum, zip(*scored))
        result |= {"bpb": nats / math.log(2) / size, "bytes": size}
    return result


if __name__ == "__main__":
    path, key = Path(sys.argv[1]), json.loads(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        for name in ("data", "tokenizer"):
            Path(folder, name).symlink_to(base_dir().absolute() / name)
        os.environ["NANOCHAT_BASE_DIR"] = folder
        measured = run(key["flags"], key["patches"], key["eval_tokens"])
    write_text(path, json.dumps(key | measured, indent=1))
