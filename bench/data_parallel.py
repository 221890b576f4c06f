"""
Data parallelism in ten lines, and the ways in which it goes wrong: the table of docs/data_parallel.md.

    python -m bench.data_parallel --write    # without --write it is only printed
"""
from configurator import configure

write = False               # put the table into docs/data_parallel.md
configure(globals())

from bench.harness import PageBlock, on_ranks
from bench.naive import OPTIMIZERS, VARIANTS, distances
from nanochat.runtime.tables import markdown_table

block = PageBlock("data_parallel.md", "bench.data_parallel", write)

results = [on_ranks(4, distances, kind) for kind in OPTIMIZERS]
lines = []
for variant, name in VARIANTS.items():
    numbers = [number for found in results for number in found[variant]]
    lines.append([name, *(f"{number:.1e}" if 0 < number < 1e-3 else f"{number:.3g}" for number in numbers)])
columns = [f"{kind}: {what}" for kind in OPTIMIZERS for what in ("off", "ranks apart")]
table = markdown_table(["what is done with the gradients", *columns], lines)
block.show(table)
