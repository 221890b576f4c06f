"""
What the runs of a series say about size: bits per byte against FLOPs, and for each budget against depth, with the
depth that fits it best; over the budgets the exponent by which the best size grows. Reads what runs/scaling_laws.sh and
runs/miniseries.sh have trained.

    python -m bench.scaling --series=isoflop            # scaling/isoflop.png in NANOCHAT_BASE_DIR
    python -m bench.scaling --series=isoflop --write    # and into docs/ablations.md
"""
from configurator import configure

series = "isoflop"          # the tags of the runs begin with it
write = False               # put table and picture into docs/ablations.md and docs/images
configure(globals())

import numpy as np
from matplotlib.figure import Figure

from bench.harness import DOCS, PageBlock
from bench.scaling_fit import exponent, fit, parameters_at, read_series
from nanochat.runtime.files import base_dir, write_aside
from nanochat.runtime.tables import markdown_table

block = PageBlock("ablations.md", f"bench.scaling --series={series}", write)

runs = read_series(series)  # sorted by budget and depth
depths = sorted({run.depth for run in runs})
by_budget = {}
for run in runs:
    by_budget.setdefault(run.budget, []).append(run)

figure = Figure(figsize=(11, 4.2), layout="constrained")
left, right = figure.subplots(1, 2)

# ---- Left: what computation buys, a line for each depth
for depth in depths:
    group = sorted((run for run in runs if run.depth == depth), key=lambda run: run.flops)
    left.plot([run.flops for run in group], [run.bpb for run in group], "o-", markersize=4, label=f"depth {depth}")
left.set(title="What computation buys", xlabel="FLOPs of the run")

# ---- Right: what to spend a budget on; runs without a budget (0) are joined by a line
notes = ""
best_sizes = {}  # parameters by budget, of lowest points within the depths that were tried
for budget, group in by_budget.items():
    tried = [run.depth for run in group]
    scores = [run.bpb for run in group]
    best = fit(tried, scores) if budget else None
    if best is None:
        right.plot(tried, scores, "o-", markersize=4, label=f"{budget:.2e} FLOPs" if budget else series)
        continue
    [points] = right.plot(tried, scores, "o", markersize=4, label=f"{budget:.2e} FLOPs")
    x = np.geomspace(tried[0], tried[-1])
    right.plot(x, best.bpb + best.curvature * np.log2(x / best.depth) ** 2, color=points.get_color())
    notes += f"\n\n{budget:.2e} FLOPs: the parabola is lowest at depth {best.depth:.2f}, "
    notes += f"with {best.bpb:.4f} bits per byte"
    if tried[0] <= best.depth <= tried[-1]:
        best_sizes[budget] = parameters_at(best.depth, group)
        notes += f" and {best_sizes[budget]:,.0f} parameters."
    else:
        notes += ", outside of the depths that were tried: no more than a direction."
a = exponent(list(best_sizes), list(best_sizes.values()))
if a is not None:
    notes += f"\n\nOver {len(best_sizes)} budgets the best size grows as FLOPs^{a:.2f}, so tokens as FLOPs^{1 - a:.2f}."
elif any(by_budget):
    notes += "\n\nNo exponent: it takes two budgets whose lowest points lie within the depths that were tried."
right.set(title="What to spend it on", xlabel="depth")
for axes in (left, right):
    axes.set(xscale="log", ylabel="validation, bits per byte")
    axes.legend()
right.set_xticks(depths, [str(depth) for depth in depths])

# ---- Table and picture
lines = []
for group in by_budget.values():
    lowest = min(run.bpb for run in group)
    for run in group:
        score = f"{run.bpb:.4f}"
        if run.bpb == lowest:
            score = f"**{score}**"
        ratio = f"{run.tokens / run.parameters:.3g}"
        lines.append([f"{run.flops:.2e}", run.depth, f"{run.parameters:,}", f"{run.tokens:,}", ratio, score])
columns = ["FLOPs", "depth", "parameters", "tokens", "tokens per parameter", "bits per byte"]
block.show(markdown_table(columns, lines) + notes)
paths = [base_dir() / "scaling" / f"{series}.png"]
if write:
    paths.append(DOCS / "images" / "scaling.png")
for path in paths:
    with write_aside(path) as aside:
        figure.savefig(aside, format="png", dpi=100)
    print(path)
