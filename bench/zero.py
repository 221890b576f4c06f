"""
What the stages of ZeRO keep and send, measured and by the formulas: the table of docs/zero.md.

    python -m bench.zero --write    # without --write it is only printed

It starts its own ranks (gloo, on the CPU) and takes steps on random tokens in every stage (bench/sent.py).
"""
from typing import Literal

from configurator import configure

ranks = "8"                 # numbers of ranks
dtype: Literal["bfloat16", "float32"] = "bfloat16"  # parameters and activations
write = False               # put the table into docs/zero.md
configure(globals())

from bench.harness import PageBlock, on_ranks
from bench.sent import KEPT, measure_all
from nanochat.model.gpt_config import GPTConfig
from nanochat.runtime.tables import markdown_table

block = PageBlock("zero.md", "bench.zero", write)

# With a vocabulary of 12 times the width all units are equally large; with few tokens only parameters matter.
CONFIG = GPTConfig(sequence_len=32, vocab_size=12 * 128, n_layer=10, n_embd=128, n_head=2, n_kv_head=2)
UNIT = 4 * 12 * 128**2      # bytes of a unit's gradients in float32


def beside(measured: float, formula: float) -> str:
    return f"{measured / 1e6:.2f} / {formula / 1e6:.2f}"


lines = []
for count in map(int, ranks.split(",")):
    for r in on_ranks(count, measure_all, CONFIG, dtype):
        whole = f"{r['whole'] / UNIT:.1f}" if r["stage"] < 3 else ""
        kept = [beside(r["memory"][part], r["expected"][part]) for part in KEPT]
        lines.append([r["stage"], count, *kept, whole, *map(beside, r["sent"], r["expected sent"])])
lines.sort()
columns = ["stage", "ranks", *KEPT, "whole gradients, units", "sent, 1 micro-step", "sent, 4 micro-steps"]
block.show(
    f"{markdown_table(columns, lines)}\n\nMB per rank, measured / formula: between two micro-steps of {dtype} on the "
    f"fullest rank, and sent in one optimizer step. {CONFIG.n_layer + 2} units of {UNIT // 4:,} parameters. *Whole "
    "gradients*: the most at any moment of a backward pass, as units in float32.")
