"""
What the stages of ZeRO keep and send, measured beside the formulas: the tables of docs/zero.md.

    python -m bench.zero --write    # without --write they are only printed

It starts its own ranks (gloo, on the CPU) and takes steps on random tokens in every stage and dtype. Traffic is what
each collective sends (bench/watch.py), and what goes through the network interface.
"""
from collections.abc import Callable

from configurator import configure

import torch

from bench.harness import enter_own_network, on_ranks, show
from bench.watch import DTYPES, KEPT, MICRO_STEPS, measure_all
from nanochat.gpt import GPTConfig
from nanochat.plan.memory import parameter_counts
from nanochat.report import markdown_table
from nanochat.zero import MAX_IN_FLIGHT

# ---- Model: with a vocabulary of 12 times the width every unit is as large as every other
depth = 12                  # [1..] layers
width = 128                 # [2..] of the model; a multiple of the ranks leaves no padding
max_seq_len = 32            # [1..] tokens; few, only parameters matter here
# ---- Measurement
max_ranks = 8               # [1..] 1, 2, 4, … up to this
write = False               # put the tables into docs/zero.md
configure(globals())

if why := enter_own_network("ip link set lo up"):  # nobody else sends there
    print(f"bytes on the wire: not counted ({why})")
on_wire, results, ranks = not why, [], 1
config = GPTConfig(max_seq_len, 12 * width, depth, width, 2, 2)
while ranks <= max_ranks:
    results += on_ranks(ranks, measure_all, config, on_wire)
    print(f"{ranks} rank(s): done", flush=True)
    ranks *= 2
(adamw, muon), units = parameter_counts(config), depth + 2
unit = 4 * max(adamw // 2, muon // depth)
results.sort(key=lambda r: (r["stage"], r["ranks"]))
several = [r for r in results if r["ranks"] > 1]  # on one rank nothing travels


def megabytes(*values: float) -> str:
    return " / ".join(f"{value / 1e6:.2f}" for value in values)


def table(columns: list[str], results: list[dict], cells: Callable[[dict], list[str]]) -> str:
    return markdown_table(["stage", "ranks", *columns], [[r["stage"], r["ranks"], *cells(r)] for r in results])


def by_dtype(columns: list[str], results: list[dict], cells: Callable[[dict], list[str]]) -> str:
    tables = {name: table(columns, [r for r in results if r["dtype"] == name], cells) for name in DTYPES}
    return "\n\n".join(f"**{name}**\n\n{text}" for name, text in tables.items())


def kept(r: dict) -> list[str]:
    pairs = [(r["memory"][part], r["expected"][part]) for part in KEPT]
    return [*(megabytes(*pair) for pair in (*pairs, map(sum, zip(*pairs)))), megabytes(r["memory"]["in flight"])]


def whole(r: dict) -> list[str]:
    peaks = [r["peaks"][key] for key in ("whole", "with buffers")]
    return [f"{megabytes(peak)} = {peak / unit:.2f} units" for peak in peaks]


def travels(r: dict) -> list[str]:
    return [megabytes(*cell) for cell in zip(r["sent"], r["expected sent"], *([r["wire"]] if on_wire else []))]


kept_off = max(abs(r["memory"][part] / r["expected"][part] - 1) for r in results for part in KEPT)
sent_off = max(abs(a / b - 1) for r in several for a, b in zip(r["sent"], r["expected sent"]))
peaks = [r for r in several if r["dtype"] == "bfloat16" and r["stage"] in (1, 2)]
parts = [
    f"A model of {adamw + muon:,} parameters, {muon:,} of them Muon's, in {units} units of at most {unit // 4:,}; "
    f"torch {torch.__version__}, gloo. MB are 10⁶ bytes.",
    "### Memory: MB per rank between two micro-steps, measured on the fullest rank / formula",
    by_dtype(["parameters", "gradients", "optimizer state", "together", "in flight"], results, kept),
    f"The largest deviation is {kept_off:.1%}; all other live tensors had "
    f"{max(r['memory']['rest'] for r in results) / 1e3:.1f} KB together at most. *In flight* on stage 2 are the "
    f"last {MAX_IN_FLIGHT} units' sums, which the next micro-step receives; nearly half of it is where gloo's chunks "
    "arrive.",
    "### Whole gradients alive at any moment of a step, MB",
    table(["whole gradients", "with the buffers that receive"], peaks, whole),
    f"Stage 2: {MAX_IN_FLIGHT} units on their way, one being computed, and for a moment its copy end to end; the "
    f"model has {units}. At the end of its backward passes all other tensors that Python knows of had "
    f"{max(r['peaks']['rest'] for r in several if r['stage'] == 2) / 1e3:.1f} KB at most: nothing is hoarded "
    "elsewhere.",
    "### Traffic: MB that a rank sends in one optimizer step, counted / formula" + " / on the wire" * on_wire,
    by_dtype([f"{m} micro-step{'s' * (m > 1)}" for m in MICRO_STEPS], several, travels),
    f"The counts are at most {sent_off:.1%} from the formulas.",
]
if on_wire:
    more = [carried / sent - 1 for r in several for carried, sent in zip(r["wire"], r["sent"])]
    parts.append(f"The wire carries {min(more):.1%} to {max(more):.1%} more than counted: headers, acknowledgements, "
                 "a barrier.")
show("\n\n".join(parts), "zero.md", "bench.zero", write)
