"""
What the runs of a series say about size: bits per byte by budget and depth, the best size for each budget, and the
exponent by which that size grows with the budget. Reads the runs of runs/scaling_laws.sh and runs/miniseries.sh.

    python -m bench.scaling --series=isoflop --write    # without --write it is only printed
"""
from configurator import configure

series = "isoflop"          # the runs' tags begin with it
write = False               # put the table into docs/ablations.md
configure(globals())

import itertools

from bench.harness import PageBlock
from bench.scaling_fit import exponent, fit, read_series
from nanochat.runtime.tables import markdown_table

block = PageBlock("ablations.md", f"bench.scaling --series={series}", write)

lines, notes = [], ""
best_sizes = {}             # parameters by budget, if the lowest point is within the sizes tried
for budget, runs in itertools.groupby(read_series(series), key=lambda run: run.budget):  # 0: no budget
    group = list(runs)
    sizes, scores = [run.parameters for run in group], [run.bpb for run in group]
    for run in group:
        score = f"**{run.bpb:.4f}**" if run.bpb == min(scores) else f"{run.bpb:.4f}"
        lines.append([f"{run.flops:.2e}", run.depth, f"{run.parameters:,}", f"{run.tokens:,}",
                      f"{run.tokens / run.parameters:.3g}", score])
    best = fit(sizes, scores) if budget else None
    if best is not None:
        size, bpb = best
        place = "outside of the sizes that were tried"
        if sizes[0] <= size <= sizes[-1]:
            best_sizes[budget] = size
            place = f"at {size:,.0f} parameters, with {bpb:.4f} bits per byte"
        notes += f"\n\n{budget:.2e} FLOPs: the parabola is lowest {place}."
a = exponent(list(best_sizes), list(best_sizes.values()))
if a is not None:
    notes += f"\n\nOver {len(best_sizes)} budgets the best size grows as FLOPs^{a:.2f}, so tokens as FLOPs^{1 - a:.2f}."
elif notes:
    notes += "\n\nNo exponent: it takes two budgets whose lowest points lie within the sizes that were tried."
columns = ["FLOPs", "depth", "parameters", "tokens", "tokens per parameter", "bits per byte"]
block.show(markdown_table(columns, lines) + notes)
