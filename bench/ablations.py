"""
Candidates for the architecture and the optimizer, each in pairs of runs with its baseline: the tables of
docs/ablations.md. A series that was stopped goes on where it was: what has a result is not run again.

    python -m bench.ablations --series=added --data=python,man     # each candidate alone added to classic
    python -m bench.ablations --series=removed --only=smear        # taken from modern; `more`: added to modern
    python -m bench.ablations --series=added --times               # ms per step, on an otherwise idle machine
    python -m bench.ablations --series=sets --minutes=10           # equal time, by these ms: after --times
    python -m bench.ablations --series=sets --minutes=10 --alone   # of the whole machine: after --times --alone
    python -m bench.ablations --series=added --write               # and the table into the page
"""
import hashlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Literal, NamedTuple

from configurator import configure

from bench.ablation_table import at_equal_time, change, shown, slope, verdict
from bench.harness import DOCS, show
from nanochat.corpus.learn_tokenizer import ensure_tokenizer
from nanochat.corpus.make_dataset import ensure_dataset
from nanochat.dataset import fingerprint
from nanochat.errors import UserError, did_you_mean
from nanochat.files import base_dir
from nanochat.records import duration
from nanochat.report import markdown_table

# ---- What
series: Literal["added", "removed", "more", "sets"] = "added"  # to classic, from modern, to modern, modern for classic
only = ""                   # names of candidates, with commas; empty: all
classic = "--arch=classic"  # flags of the set
modern = "--arch=modern"    # flags of the set
common = ""                 # further flags of every run
# ---- On what
data = "python"             # data sets, with commas
seeds = 3                   # [1..] runs of each, or rounds of --times
depth = 4                   # [1..] layers
max_seq_len = 512           # [1..] tokens per row
device_batch_size = 8       # [1..] rows per micro-step
total_batch_size = 4096     # [1..] tokens per step
# ---- For how long
tokens = 614_400            # [1..] of each run
minutes = 0.0               # [0..] of each run instead, by the ms that --times has measured
share = 1.0                 # [>0] of the baseline's tokens or minutes that a candidate gets
shorter = 0.5               # [0..1] of the baseline's tokens: its runs that show what time is worth; 0: none, no slope
eval_tokens = 100_000       # [1..] of the first validation documents
# ---- How
jobs = 2                    # [0..] runs at a time; they share the cores; 0: only the table of what has a result
alone = False               # instead one run at a time on all cores, those of --times in turns
times = False               # measure ms per step, each pair side by side on half of the cores, instead of training
write = False               # put the table into docs/ablations.md
configure(globals())

# name: (what adds it to classic, what takes it from modern; empty: it is not in modern). Words: a setting of
# base_train, a piece of the architecture, or @ and a function of bench/ablation_patches.py.
CANDIDATES = {
    "rope_theta": ("rope_theta=1e5", ""),
    "qk_scale": ("qk_scale=1.2", ""),
    "short_windows": ("short_windows=True", "short_windows=False"),
    "value_embeddings": ("value_embeddings=True", "value_embeddings=False"),
    "bigrams": ("bigrams=5", ""),
    "residual_scales": ("residual_scales=True", ""),
    "smear": ("smear=True", "smear=False"),
    "backout": ("backout=True", ""),
    "head_gates": ("head_gates=True", ""),
    "initial_scales": ("embedding_std=0.8,fc_scale=0.4", "embedding_std=1.0,fc_scale=1.0"),
    "normuon": ("--muon_variant=normuon", ""),
    "muoneq": ("--muon_variant=muoneq", ""),
    "muonplus": ("--muon_variant=muonplus", ""),
    "momentum": ("--muon_momentum=0.97 --final_muon_momentum=0.90", ""),
    "weight_decay": ("--weight_decay=0.2", ""),
    "warmup": ("--warmup_steps=40", ""),
    "final_lr": ("--final_lr_frac=0.05", ""),
    "warmdown": ("--warmdown_ratio=0.65", ""),
    "matrix_lr_up": ("--matrix_lr=0.03", ""),
    "matrix_lr_down": ("--matrix_lr=0.014", ""),
    "embedding_lr_up": ("--embedding_lr=0.3", ""),
    "embedding_lr_down": ("--embedding_lr=0.14", ""),
    "unembedding_lr_up": ("--unembedding_lr=0.008", ""),
    "unembedding_lr_down": ("--unembedding_lr=0.002", ""),
    "rates_by_batch": ("--matrix_lr=0.00177 --embedding_lr=0.0177 --unembedding_lr=0.000354", ""),
    "half_batch": ("--total_batch_size=2048 --device_batch_size=4", ""),
    "sampled_softmax": ("--softmax_share=0.25", ""),
    "sampled_softmax_low_lr": ("--softmax_share=0.25 --unembedding_lr=0.002", ""),
    "tail_average": ("@tail_average", ""),
    "tail_average_high_lr": ("@tail_average --final_lr_frac=0.3", ""),
}
TIMED_STEPS = 24


class Run(NamedTuple):
    name: str
    words: str     # as in CANDIDATES
    data: str
    tokens: float
    seed: int
    beside: str = ""  # of --times: the other's words, beside which it ran, or in turns with it


def key_of(run: Run) -> dict:
    """All that determines a result: what bench/ablation_run.py is told, and the texts it will find."""
    flags, patches = {"depth": depth, "max_seq_len": max_seq_len, "device_batch_size": device_batch_size,
                      "total_batch_size": total_batch_size, "eval_every": -1, "sample_every": -1}, []
    for word in f"{common} {run.words}".split():
        name, _, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            flags[name] = value
        elif word.startswith("@"):
            patches.append(word[1:])
        else:
            flags["arch"] += f",{word}"
    flags |= {"data": run.data, "seed": run.seed,
              "num_iterations": max(round(run.tokens / int(flags["total_batch_size"])), 1)}
    of_round = "in turns with" if alone else "beside"
    timed = {of_round: f"{run.beside}, on {os.cpu_count()} cores"} if run.beside else {}
    return timed | {"flags": [f"--{name}={value}" for name, value in flags.items()], "patches": patches,
                    "eval_tokens": 0 if run.beside else eval_tokens, "texts": texts[run.data]}


def path_of(run: Run):
    digest = hashlib.sha256(json.dumps(key_of(run)).encode()).hexdigest()[:12]
    return base_dir() / "ablations" / f"{run.name}-{run.data}-d{depth}-s{run.seed}-{digest}.json"


def result(run: Run) -> dict | None:
    """What bench/ablation_run.py has written, with the ms of total_batch_size tokens; None before that."""
    if not path_of(run).exists():
        return None
    found = json.loads(path_of(run).read_text())
    return found | {"ms": found["ms"] * total_batch_size / found["batch"]}


def perform(runs: list[Run], jobs: int) -> None:
    """Run what has no result yet. A failure is told, and the others go on; a signal ends the runs under way, too."""
    runs = list({path_of(run): run for run in runs if jobs and result(run) is None}.values())
    children: list[subprocess.Popen] = []
    environment = os.environ | {"OMP_NUM_THREADS": str(max(os.cpu_count() // (jobs or 1), 1))}

    def perform_one(run: Run) -> int:
        path = path_of(run)
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "bench.ablation_run", str(path.absolute()), json.dumps(key_of(run))]
        with open(path.with_suffix(".log"), "w") as log:
            child = subprocess.Popen(command, cwd=DOCS.parent, env=environment, stdout=log, stderr=log)
            children.append(child)
            return child.wait()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; the same command goes on"))
    start, done, whole = time.monotonic(), 0.0, sum(run.tokens for run in runs)
    pool = ThreadPoolExecutor(jobs or 1)
    try:
        futures = {pool.submit(perform_one, run): run for run in runs}
        for number, future in enumerate(as_completed(futures), start=1):
            run, done = futures[future], done + futures[future].tokens
            said = f"failed, see {path_of(run).with_suffix('.log')}"
            if measured := result(run):
                bpb = f"{measured['bpb']:.4f} bits per byte, " if "bpb" in measured else ""
                said = f"{bpb}{measured['ms']:,.0f} ms a step"
            left = duration((time.monotonic() - start) / done * (whole - done))
            print(f"{number}/{len(runs)} {run.name}, {run.data}, seed {run.seed}: {said}; {left} left", flush=True)
    finally:
        for child in children:
            child.terminate()
        pool.shutdown(cancel_futures=True)


def turns(name: str, base: str, words: str) -> list[tuple[Run, Run]]:
    """Rounds of a pair's short runs, which meet the same disturbances: at the same time, or with `alone` in turns."""
    sides = ("baseline", base, words), ("candidate", words, base)
    of_pair = ((Run(f"times-{name}-{side}", own, corpora[0], TIMED_STEPS * total_batch_size, turn, other)
                for side, own, other in sides) for turn in range(seeds))
    return [tuple(runs) for runs in of_pair]


# ---- Which pairs of baseline and candidate
corpora, (added, removed) = data.split(","), range(2)
names = [name for name in only.split(",") if name]
for name in names:
    if name not in CANDIDATES:
        raise UserError(f"only={only}: there is no candidate {name!r}{did_you_mean(name, CANDIDATES)}")
base, column = (classic, added) if series in ("added", "sets") else (modern, removed if series == "removed" else added)
changes = {name: CANDIDATES[name][column] for name in names or CANDIDATES}
pairs = {name: f"{base} {words}" for name, words in changes.items() if words}
pairs = {"modern": modern} if series == "sets" else pairs
texts = {}
for corpus in corpora:  # here once, not in every run
    ensure_dataset(corpus)
    texts[corpus] = [fingerprint(corpus)[:12], ensure_tokenizer(corpus).fingerprint[:12]]

# ---- Times: a candidate's ms are its ratio to the baseline's of the same round, the median of the rounds
for of_all in zip(*(turns(name, base, words) for name, words in pairs.items())) if times else ():
    for both in of_all:
        perform(list(both), jobs=1 if alone else 2)
rounds = {name: [(a["ms"], b["ms"]) for a, b in (map(result, both) for both in turns(name, base, words)) if a and b]
          for name, words in pairs.items()}
ratios = {name: statistics.median(b / a for a, b in of_pair) for name, of_pair in rounds.items() if of_pair}
base_ms = statistics.median([a for of_pair in rounds.values() for a, _ in of_pair] or [0])
if times:
    lines = [[name, f"{base_ms * ratio:,.0f}", f"{ratio:.3f}"] for name, ratio in ratios.items()]
    print(markdown_table(["candidate", f"ms (baseline: {base_ms:,.0f})", "baseline's steps"], lines))
    raise SystemExit
if minutes and (missing := [name for name in pairs if name not in ratios]):
    raise UserError(f"minutes={minutes}, but there are no ms of {', '.join(missing)}: run this with --times first")

# ---- The runs: seed by seed, so that a series that is not finished has whole pairs
title = "classic" if base == classic else "modern"
baseline_tokens = minutes * 6e4 / base_ms * total_batch_size if minutes else tokens
planned: dict[tuple[str, str, int], Run] = {}
for seed in range(seeds):
    for corpus in corpora:
        for name, words, part in (("baseline", base, 1.0), *([("shorter", base, shorter)] if shorter else []), *(
                (name, words, share / ratios[name] if minutes else share) for name, words in pairs.items())):
            run_name = title if name in ("baseline", "shorter") else f"{series}-{name}"
            planned[name, corpus, seed] = Run(run_name, words, corpus, part * baseline_tokens, seed)
perform(list(planned.values()), min(jobs, 1) if alone else jobs)

# ---- The table
results = {where: found for where, run in planned.items() if (found := result(run))}


def paired(first: str, second: str) -> dict[str, list[tuple[float, float]]]:
    both = {corpus: [(results[first, corpus, seed]["bpb"], results[second, corpus, seed]["bpb"])
                     for seed in range(seeds) if {(first, corpus, seed), (second, corpus, seed)} <= results.keys()]
            for corpus in corpora}
    return {corpus: values for corpus, values in both.items() if values}


if not (of_base := paired("baseline", "baseline")):
    raise UserError("no baseline has a result; the runs' logs say why")
per_ln = slope(lengths, shorter) if (lengths := paired("shorter", "baseline")) else None
each = corpora * (len(corpora) > 1)
columns = ["candidate", "bits per byte", *each, f"ms for {total_batch_size:,} tokens", "at equal time", "so it is"]
bpb = {corpus: statistics.fmean(second for _, second in values) for corpus, values in of_base.items()}
lines = [[f"**{title}**", f"{statistics.fmean(bpb.values()):.4f}",
          *(f"{bpb.get(corpus, 0):.4f}" for corpus in each),
          f"{base_ms:,.0f}" if base_ms else "?", "", ""]]
for name in pairs:
    if not (found := paired("baseline", name)):
        lines.append([name, "failed" if jobs else "not run", *[""] * (len(columns) - 2)])
        continue
    equal = difference = change(found)
    ratio = ratios.get(name)
    timed = ratio and (minutes or per_ln)
    if timed and not minutes:
        equal = at_equal_time(difference, per_ln, share * ratio)
    of_each = [shown(change({corpus: found[corpus]})) if corpus in found else "" for corpus in each]
    lines.append([name, shown(difference), *of_each,
                  f"{ratio * base_ms:,.0f}" if ratio else "?", shown(equal) if timed else "?",
                  verdict(equal) + " at equal tokens" * (not timed)])
length = f"{minutes:g} minutes" if minutes else f"{tokens:,} tokens"
length += f" (a candidate {share:g} of it)" * (share != 1)
equal = "trained" if minutes else "unknown without shorter runs" if per_ln is None else (
    f"computed from the baseline's {per_ln:+.4f} bits per byte per ln(tokens), by runs of {shorter:.3g} of the tokens")
note = (f"Depth {depth}, {length}, {seeds} seed{'s' * (seeds > 1)}, {', '.join(corpora)}; baseline `{base}`. Mean ± "
        "standard error of the paired difference; ms measured "
        f"{'in turns, on all cores' if alone else 'side by side, on half of the cores each'}; equal time is {equal}.")
settings = [argument for argument in sys.argv[1:] if not argument.startswith(("--write", "--jobs"))]
show(f"{markdown_table(columns, lines)}\n\n{note}", "ablations.md", f"bench.ablations {shlex.join(settings)}", write)
