"""
Candidates for the architecture and the optimizer, each trained in pairs with its baseline. The tables of
docs/ablations.md are put together by hand from what this prints. A series that was stopped goes on where it was: a run
that has a result is not run again.

    python -m bench.ablations --series=added --data=python,man     # each candidate alone added to classic
    python -m bench.ablations --series=removed --only=smear        # taken from modern; `more`: added to modern
    python -m bench.ablations --series=sets --jobs=1               # one run at a time: then ms of a step mean something
"""
from typing import Any, Literal

from configurator import configure

# ---- What
series: Literal["added", "removed", "more", "sets"] = "added"  # to classic, from modern, to modern, modern for classic
only = ""                   # names of candidates, with commas; empty: all
classic = "--arch=classic"  # flags of the set
modern = "--arch=modern"    # flags of the set
common = ""                 # further flags of every run
# ---- On what
data = "python"             # data sets, with commas
seeds = 3                   # [1..] runs of each
depth = 4                   # [1..] layers
max_seq_len = 512           # [1..] tokens per row
device_batch_size = 8       # [1..] rows per micro-step
total_batch_size = 4096     # [1..] tokens per step
tokens = 614_400            # [1..] of each run
eval_tokens = 100_000       # [1..] of the first validation documents
# ---- How
jobs = 2                    # [0..] runs at a time, which share the cores; 0: only the table of what has a result
configure(globals())

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from bench.harness import DOCS
from nanochat.corpus.learn_tokenizer import ensure_tokenizer
from nanochat.corpus.make_dataset import ensure_dataset
from nanochat.data.dataloader import TokenizedShards
from nanochat.data.shard_reader import fingerprint
from nanochat.data.tokenizer import Tokenizer
from nanochat.eval.loss_eval import evaluate_documents
from nanochat.runtime.compiling import set_compile
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import base_dir
from nanochat.runtime.tables import markdown_table
from nanochat.training.checkpoint import list_steps, load_checkpoint, step_dir
from nanochat.training.records import read_metrics

# name: (what adds it to classic, what takes it from modern; empty: modern does not have it). A word is a setting of
# base_train or a piece of the architecture.
CANDIDATES = {
    "short_windows": ("short_windows=True", "short_windows=False"),
    "value_embeddings": ("value_embeddings=True", "value_embeddings=False"),
    "smear": ("smear=True", "smear=False"),
    "key_offset": ("key_offset=True", "key_offset=False"),
    "document_apart": ("", "document_token=-1"),
    "stream_scales": ("stream_scales=True", ""),  # from here on what large models have, as nanochat has it
    "subtract_middle": ("subtract_middle=True", ""),
    "narrow_gates": ("narrow_gates=True", ""),
    "qk_scale": ("qk_scale=1.2", ""),
    "rope_theta": ("rope_theta=100000", ""),
    "initial_scales": ("embedding_std=0.8,fc_scale=0.4", "embedding_std=1.0,fc_scale=1.0"),
    "weight_decay": ("--weight_decay=0.2", ""),
    "warmdown": ("--warmdown_ratio=0.65", ""),
    "unembedding_lr_down": ("--unembedding_lr=0.002", ""),
    "half_batch": ("--total_batch_size=2048 --device_batch_size=4", ""),
}


class Run(NamedTuple):
    name: str
    words: str  # as in CANDIDATES
    data: str
    tokens: int
    seed: int


def key_of(run: Run) -> dict:
    """Everything that determines a result, but the code. A result in the file with this key stands."""
    flags: dict[str, Any] = {"depth": depth, "max_seq_len": max_seq_len, "device_batch_size": device_batch_size,
             "total_batch_size": total_batch_size, "eval_every": -1, "sample_every": -1}
    for word in f"{common} {run.words}".split():
        name, _, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            flags[name] = value
        else:
            flags["arch"] += f",{word}"
    steps = max(round(run.tokens / int(flags["total_batch_size"])), 1)
    flags |= {"data": run.data, "seed": run.seed, "num_iterations": steps}
    return {"flags": [f"--{name}={value}" for name, value in flags.items()], "texts": texts[run.data],
            "eval_tokens": eval_tokens}


def result(run: Run) -> dict | None:
    key = key_of(run)
    return next((found for found in results if key.items() <= found.items()), None)


def perform(runs: list[Run]) -> None:
    """Run everything that has no result yet. A failed run is reported, and the others go on; a signal ends them all."""
    runs = list({str(key_of(run)): run for run in runs if jobs and result(run) is None}.values())
    at_once = max(jobs, 1)
    environment = os.environ | {"OMP_NUM_THREADS": str(max(os.cpu_count() // at_once, 1))}
    children: list[subprocess.Popen] = []

    def train(run: Run) -> dict | None:
        """The result of a run in a base folder of its own; None if it failed or was stopped."""
        key = key_of(run)
        with tempfile.TemporaryDirectory() as scratch:
            for name in ("data", "tokenizer"):
                Path(scratch, name).symlink_to(base_dir().absolute() / name)
            command = [sys.executable, "-m", "scripts.base_train", *key["flags"], "--model_tag=run"]
            with open(log_of(run), "w") as log:
                child = subprocess.Popen(command, cwd=DOCS.parent, stdout=log, stderr=log,
                                         env=environment | {"NANOCHAT_BASE_DIR": scratch})
                children.append(child)
                child.wait()
            made = Path(scratch, "base_checkpoints", "run")
            last = max(list_steps(made), default=0)
            if child.returncode or f"--num_iterations={last}" not in key["flags"]:
                return None
            seconds = [record["train/dt"] for record in read_metrics(made / "metrics.jsonl") if "train/dt" in record]
            model, tokenizer, meta = load_checkpoint(step_dir(made, last), torch.device("cpu"))
        seconds = seconds[len(seconds) // 4 :]  # the first steps compile
        documents = first_documents(run.data, tokenizer, eval_tokens)
        bpb = evaluate_documents(model, documents, tokenizer.token_bytes(), 8 * max_seq_len)
        ms = 1e3 * statistics.median(seconds) * total_batch_size / meta["total_batch_size"]
        return {"name": run.name} | key | {"bpb": bpb, "ms": ms}

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; the same command goes on"))
    pool = ThreadPoolExecutor(at_once)
    try:
        futures = {pool.submit(train, run): run for run in runs}
        for number, future in enumerate(as_completed(futures), start=1):
            run, measured = futures[future], future.result()
            said = f"failed, see {log_of(run)}"
            if measured:
                results.append(measured)
                with open(folder / "results.jsonl", "a") as file:
                    file.write(json.dumps(measured) + "\n")
                said = f"{measured['bpb']:.4f} bits per byte, {measured['ms']:,.0f} ms a step"
            print(f"{number}/{len(runs)} {run.name}, {run.data}, seed {run.seed}: {said}", flush=True)
    finally:
        for child in children:
            child.terminate()
        pool.shutdown(cancel_futures=True)


def first_documents(data: str, tokenizer: Tokenizer, most: int) -> list[list[int]]:
    """Validation documents from the first on, each whole and with its <|bos|>, until they have `most` tokens."""
    tokens, offsets = TokenizedShards(data, "val", tokenizer).load(0)
    ends = offsets[1 : 2 + np.searchsorted(offsets[1:], most)]
    return [tokens[start:end].tolist() for start, end in zip(offsets, ends)]


def log_of(run: Run) -> Path:
    return folder / f"{run.name}-{run.data}-s{run.seed}-{run.tokens}.log"


def mean_and_error(differences: list[list[float]]) -> tuple[float, float]:
    """
    Mean over the corpora of each one's mean over seeds, and its standard error; NaN from one seed. The corpora are a
    choice, not a sample: only the spread over seeds within each counts as error.
    """
    squares = 0.0
    for of_corpus in differences:
        several = len(of_corpus) > 1
        squares += statistics.variance(of_corpus) / len(of_corpus) if several else math.nan
    return statistics.fmean(map(statistics.fmean, differences)), math.sqrt(squares) / len(differences)


def shown(mean: float, error: float) -> str:
    return f"{mean:+.4f} ± " + ("?" if math.isnan(error) else f"{error:.4f}")


# ---- The pairs of baseline and candidate
corpora = data.split(",")
wanted = [name for name in only.split(",") if name]
base = classic if series in ("added", "sets") else modern
pairs = {}
for name in wanted or CANDIDATES:
    added, removed = CANDIDATES[name]
    if words := removed if series == "removed" else added:
        pairs[name] = f"{base} {words}"
if series == "sets":
    pairs = {"modern": modern}
texts = {}
for corpus in corpora:
    ensure_dataset(corpus)
    texts[corpus] = [fingerprint(corpus)[:12], ensure_tokenizer(corpus).fingerprint[:12]]
folder = base_dir() / "ablations"
folder.mkdir(parents=True, exist_ok=True)
results = []
if (folder / "results.jsonl").exists():
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
set_compile(False, "cpu")

# ---- The runs: seed by seed, so that a series that is not finished has whole pairs
planned: dict[tuple[str, str, int], Run] = {}
for seed in range(seeds):
    for corpus in corpora:
        planned["baseline", corpus, seed] = Run("baseline", base, corpus, tokens, seed)
        for name, words in pairs.items():
            planned[name, corpus, seed] = Run(f"{series}-{name}", words, corpus, tokens, seed)
perform(list(planned.values()))

# ---- The table
scores = {where: found for where, run in planned.items() if (found := result(run))}
of_base = [found["bpb"] for (name, *_), found in scores.items() if name == "baseline"]
if not of_base:
    raise UserError(f"no baseline has a result; the logs in {folder} say why")
lines = [["**baseline**", f"{statistics.fmean(of_base):.4f}", ""]]
for name in pairs:
    differences, ratios = [], []
    for corpus in corpora:
        of_corpus = []
        for seed in range(seeds):
            first, second = scores.get(("baseline", corpus, seed)), scores.get((name, corpus, seed))
            if first and second:
                of_corpus.append(second["bpb"] - first["bpb"])
                ratios.append(second["ms"] / first["ms"])
        if of_corpus:
            differences.append(of_corpus)
    if differences:
        mean, error = mean_and_error(differences)
        lines.append([name, shown(mean, error), f"{statistics.median(ratios):.3f}"])
    else:
        lines.append([name, "no result", ""])
note = (f"Depth {depth}, {tokens:,} tokens, {seeds} seed(s), {data}; baseline `{base}`. Mean ± standard error of the "
        "paired difference.")
table = markdown_table(["candidate", "bits per byte", "ms of a step, × baseline"], lines)
print(f"\n{table}\n\n{note}")
