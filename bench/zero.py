"""
What the stages of ZeRO keep and send, measured beside the formulas: the tables of docs/zero.md.

    python -m bench.zero --write    # without --write they are only printed

It starts its own ranks (gloo, on the CPU) and takes steps on random tokens in every stage and dtype. Traffic is what
each collective sends (bench/watch.py), and what goes through the network interface.
"""
from configurator import configure

import torch

from bench.harness import enter_own_network, on_ranks, show
from bench.watch import DTYPES, KEPT, MICRO_STEPS, measure_all
from nanochat.gpt_config import GPTConfig
from nanochat.plan.memory import parameter_counts
from nanochat.report import markdown_table

max_ranks = 8               # [1..] 1, 2, 4, … up to this
write = False               # put the tables into docs/zero.md
configure(globals())

# With a vocabulary of 12 times the width every unit is as large as every other; few tokens: only parameters matter.
CONFIG = GPTConfig(sequence_len=32, vocab_size=12 * 128, n_layer=12, n_embd=128, n_head=2, n_kv_head=2)
UNIT = 4 * 12 * 128 * 128  # bytes of a unit's gradients

on_wire = enter_own_network("ip link set lo up")  # nobody else sends there
results = []
for ranks in (2**i for i in range(max_ranks.bit_length())):
    results += on_ranks(ranks, measure_all, CONFIG)
    print(f"{ranks} rank(s): done", flush=True)
results.sort(key=lambda r: (r["stage"], r["ranks"]))
several = [r for r in results if r["ranks"] > 1]  # on one rank nothing travels


def megabytes(*values: float) -> str:
    return " / ".join(f"{value / 1e6:.2f}" for value in values)


memory, peaks, traffic = ({dtype: [] for dtype in DTYPES} for _ in range(3))
for r in results:
    pairs = [(r["memory"][part], r["expected"][part]) for part in KEPT]
    cells = [megabytes(*pair) for pair in (*pairs, map(sum, zip(*pairs)))]
    memory[r["dtype"]].append([r["stage"], r["ranks"], *cells, megabytes(r["memory"]["in flight"])])
for r in several:
    cells = zip(r["sent"], r["expected sent"], *([r["wire"]] if on_wire else []))
    traffic[r["dtype"]].append([r["stage"], r["ranks"], *(megabytes(*cell) for cell in cells)])
    if r["stage"] in (1, 2):
        peak = r["peaks"]["gradients"]
        peaks[r["dtype"]].append([r["stage"], r["ranks"], megabytes(peak), f"{peak / UNIT:.2f}"])


def by_dtype(columns: list[str], rows: dict[str, list]) -> str:
    return "\n\n".join(f"**{name}**\n\n{markdown_table(['stage', 'ranks', *columns], rows[name])}" for name in DTYPES)


kept_off = max(abs(r["memory"][part] / r["expected"][part] - 1) for r in results for part in KEPT)
rest = max(r["memory"]["rest"] + r["peaks"]["rest"] * (r["stage"] == 2) for r in results)
adamw, muon = parameter_counts(CONFIG)
show("\n\n".join([
    f"A model of {adamw + muon:,} parameters, {muon:,} of them Muon's, in {CONFIG.n_layer + 2} units of {UNIT // 4:,}; "
    f"torch {torch.__version__}, gloo. MB are 10⁶ bytes.",
    "### Memory: MB per rank between two micro-steps, measured on the fullest rank / formula",
    by_dtype(["parameters", "gradients", "optimizer state", "together", "in flight"], memory),
    f"The largest deviation is {kept_off:.1%}; all other live tensors had {rest / 1e3:.1f} KB together at most, on "
    "stage 2 also at the end of its backward passes: nothing is hoarded. *In flight* on stage 2 are the sums of the "
    "last units, which the next micro-step receives; nearly half of it is where gloo's chunks arrive.",
    "### Gradients beyond the slices that stay, at the fullest moment of a step, gloo's buffers included",
    markdown_table(["stage", "ranks", "MB", "units"], peaks["bfloat16"]),
    "Stage 2: two units on their way and their buffers, one being computed, and for a moment its copy end to end.",
    "### Traffic: MB that a rank sends in one optimizer step, counted / formula" + " / on the wire" * on_wire,
    by_dtype([f"{m} micro-step{'s' * (m > 1)}" for m in MICRO_STEPS], traffic),
    "The wire carries headers, acknowledgements and a barrier besides." * on_wire,
]).rstrip(), "zero.md", "bench.zero", write)
