"""
Pieces of the architecture and settings of the optimizer, each trained in pairs with its baseline: same data, seed and
number of tokens. The tables of docs/ablations.md are put together by hand from what this prints. A series that was
stopped goes on where it was: a run that has a result is not run again.

    python -m bench.ablations --series=added --data=python,man     # each candidate alone added to classic
    python -m bench.ablations --series=removed --only=smear        # taken from modern; `more`: added to modern
    python -m bench.ablations --series=sets                        # modern against classic
"""
from typing import Any, Literal

from configurator import configure

# ---- What
series: Literal["added", "removed", "more", "sets"] = "added"  # to classic, from modern, to modern, modern for classic
only = ""                   # names of candidates, with commas; empty: all
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
configure(globals())

import json
import statistics
import subprocess
import sys
import tempfile
from math import nan
from pathlib import Path

import numpy as np
import torch

from bench.harness import DOCS
from nanochat.corpus.learn_tokenizer import ensure_tokenizer
from nanochat.corpus.make_dataset import ensure_dataset
from nanochat.data.dataloader import TokenizedShards
from nanochat.data.shard_reader import fingerprint
from nanochat.data.tokenizer import Tokenizer
from nanochat.eval.loss_eval import evaluate_documents
from nanochat.runtime.files import base_dir
from nanochat.runtime.tables import markdown_table
from nanochat.training.checkpoint import find_checkpoint, load_checkpoint
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
    "look_ahead": ("--look_ahead=0.3", ""),
    "weight_decay": ("--weight_decay=0.2", ""),
    "warmdown": ("--warmdown_ratio=0.65", ""),
    "unembedding_lr_down": ("--unembedding_lr=0.002", ""),
    "half_batch": ("--total_batch_size=2048 --device_batch_size=4", ""),
}


def key_of(words: str, corpus: str, seed: int) -> dict:
    """Everything that determines a result, except the code. A result in the file with this key stands."""
    flags: dict[str, Any] = {"depth": depth, "max_seq_len": max_seq_len, "device_batch_size": device_batch_size,
                             "total_batch_size": total_batch_size, "eval_every": -1, "sample_every": -1}
    for word in f"{common} {words}".split():
        name, _, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            flags[name] = value
        else:
            flags["arch"] += f",{word}"
    steps = max(round(tokens / int(flags["total_batch_size"])), 1)
    flags |= {"data": corpus, "seed": seed, "num_iterations": steps}
    texts = [fingerprint(corpus)[:12], ensure_tokenizer(corpus).fingerprint[:12]]
    return {"flags": [f"--{name}={value}" for name, value in flags.items()], "texts": texts, "eval_tokens": eval_tokens}


def first_documents(corpus: str, tokenizer: Tokenizer) -> list[list[int]]:
    """Validation documents from the first on, each whole and with its <|bos|>, until they have `eval_tokens` tokens."""
    ids, offsets = TokenizedShards(corpus, "val", tokenizer).load(0)
    ends = offsets[1 : 2 + np.searchsorted(offsets[1:], eval_tokens)]
    return [ids[start:end].tolist() for start, end in zip(offsets, ends)]


def train(key: dict, corpus: str) -> dict:
    """Bits per byte and milliseconds for `total_batch_size` tokens of a run in a base folder of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("data", "tokenizer"):
            Path(scratch, name).symlink_to(base_dir().absolute() / name)
        settings = [*key["flags"], "--model_tag=run"]
        command = ["env", f"NANOCHAT_BASE_DIR={scratch}", sys.executable, "-m", "scripts.base_train", *settings]
        subprocess.run(command, cwd=DOCS.parent, check=True, stdout=subprocess.DEVNULL)
        made = Path(scratch, "base_checkpoints", "run")
        seconds = [record["train/dt"] for record in read_metrics(made / "metrics.jsonl") if "train/dt" in record]
        model, tokenizer, meta = load_checkpoint(find_checkpoint(made), torch.device("cpu"))
    bpb = evaluate_documents(model, first_documents(corpus, tokenizer), tokenizer.token_bytes(), 8 * max_seq_len)
    # The first steps compile.
    ms = 1e3 * statistics.median(seconds[len(seconds) // 4 :]) * total_batch_size / meta["total_batch_size"]
    return {"bpb": bpb, "ms": ms}


def result_of(name: str, words: str, corpus: str, seed: int) -> dict:
    """From the file of results, or of a run now."""
    key = key_of(words, corpus, seed)
    lines = path.read_text().splitlines() if path.exists() else []
    for known in map(json.loads, lines):
        if key.items() <= known.items():
            return known
    result = {"name": name} | key | train(key, corpus)
    with open(path, "a") as file:
        file.write(json.dumps(result) + "\n")
    print(f"{name}, {corpus}, seed {seed}: {result['bpb']:.4f} bits per byte, {result['ms']:,.0f} ms", flush=True)
    return result


corpora = data.split(",")
for corpus in corpora:
    ensure_dataset(corpus)
path = base_dir() / "ablations" / "results.jsonl"
path.parent.mkdir(parents=True, exist_ok=True)
base = "--arch=classic" if series in ("added", "sets") else "--arch=modern"
pairs = {"modern": "--arch=modern"} if series == "sets" else {}
for name in [name for name in only.split(",") if name] or CANDIDATES if series != "sets" else ():
    added, removed = CANDIDATES[name]
    if words := removed if series == "removed" else added:
        pairs[name] = f"{base} {words}"

# ---- The runs: seed by seed, so that a series that was stopped has whole pairs
differences: dict[tuple[str, str], list[float]] = {(name, corpus): [] for name in pairs for corpus in corpora}
ratios: dict[str, list[float]] = {name: [] for name in pairs}
baselines = []
for seed in range(seeds):
    for corpus in corpora:
        baseline = result_of("baseline", base, corpus, seed)
        baselines.append(baseline["bpb"])
        for name, words in pairs.items():
            result = result_of(f"{series}-{name}", words, corpus, seed)
            differences[name, corpus].append(result["bpb"] - baseline["bpb"])
            ratios[name].append(result["ms"] / baseline["ms"])

# ---- The table. The corpora are a choice, not a sample: only the spread over seeds within each counts as error.
rows = [["**baseline**", f"{statistics.fmean(baselines):.4f}", ""]]
for name in pairs:
    each = [differences[name, corpus] for corpus in corpora]
    mean = statistics.fmean(map(statistics.fmean, each))
    squares = sum(statistics.variance(one) / len(one) if seeds > 1 else nan for one in each)
    rows.append([name, f"{mean:+.4f} ± {squares**0.5 / len(each):.4f}", f"{statistics.median(ratios[name]):.3f}"])
print("\n" + markdown_table(["candidate", "bits per byte", "ms of a step, × baseline"], rows))
print(f"\nDepth {depth}, {tokens:,} tokens, {seeds} seed(s), {data}; baseline `{base}`. Mean ± standard error of the "
      "paired difference.")
