"""
What the runs of a series say about size: bits per byte against FLOPs, and for each budget against depth, with the
depth that fits it best. Reads what runs/scaling_laws.sh and runs/miniseries.sh have trained.

    python -m bench.scaling --series=isoflop            # scaling/isoflop.png and .csv in NANOCHAT_BASE_DIR
    python -m bench.scaling --series=isoflop --write    # and into docs/scaling.md
"""
import csv
import io

from configurator import configure

import numpy as np
from matplotlib.figure import Figure

from bench.harness import DOCS, show
from bench.scaling_fit import Run, fit, read_series
from nanochat.files import base_dir, write_aside, write_text
from nanochat.plots import BLUE, GREY, ORANGE
from nanochat.report import markdown_table

series = "isoflop"          # the tags of the runs begin with it
write = False               # put table and picture into docs/scaling.md and docs/images
configure(globals())

COLOURS = [BLUE, ORANGE, "#2a7f62", "#8a3b8f", "#b8860b", "#555f6b"]
runs = read_series(series)
budgets = {budget: [run for run in runs if run.budget == budget] for budget in sorted({run.budget for run in runs})}
optima = {budget: fit([r.depth for r in group], [r.bpb for r in group]) for budget, group in budgets.items()}
winners = [min(group, key=lambda run: run.bpb) for group in budgets.values()]

# ---- The table; a page without this series' mark keeps its picture, too
rows, lines, below = io.StringIO(), [], ""
csv.writer(rows).writerows([Run._fields, *runs])
write_text(base_dir() / "scaling" / f"{series}.csv", rows.getvalue())
for r in runs:
    lines.append([f"{r.flops:.2e}", r.depth, f"{r.parameters:,}", f"{r.tokens:,}", f"{r.tokens / r.parameters:.3g}",
                  f"**{r.bpb:.4f}**" if r in winners else f"{r.bpb:.4f}"])
for budget, best in optima.items():
    if best and budget:
        outside = not budgets[budget][0].depth <= best.depth <= budgets[budget][-1].depth
        below += (f"\n\n{budget:.2e} FLOPs: the parabola is lowest at depth {best.depth:.2f}, with {best.bpb:.4f} bits "
                  f"per byte{', outside of the depths that were tried: no more than a direction' * outside}.")
columns = ["FLOPs", "depth", "parameters", "tokens", "tokens per parameter", "bits per byte"]
show(markdown_table(columns, lines) + below, "scaling.md", f"bench.scaling --series={series}", write)

# ---- The picture. Left: a line for each depth; right: a curve for each budget
picture = Figure(figsize=(11, 4.2), layout="constrained")
left, right = picture.subplots(1, 2)
depths = sorted({run.depth for run in runs})
titles = (left, "What computation buys", "FLOPs of the run"), (right, "What to spend it on", "depth")
for axes, title, label in titles:
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    axes.set(xscale="log", xlabel=label, ylabel="validation, bits per byte")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e9ed", linewidth=0.7)
    axes.tick_params(labelsize=8.5, length=3)
for depth in depths:
    line = sorted((run.flops, run.bpb) for run in runs if run.depth == depth)
    left.plot(*zip(*line), color=GREY, linewidth=1, marker="o", markersize=4)
    left.annotate(f"d{depth}", line[-1], xytext=(5, -3), textcoords="offset points", fontsize=8.5)
best_line = sorted((run.flops, run.bpb) for run in (winners if len(budgets) > 1 else runs))
left.plot(*zip(*best_line), color=BLUE, linewidth=1.8, label="the best of each budget" if len(budgets) > 1 else series)
for (budget, best), colour in zip(optima.items(), COLOURS * len(optima)):
    line = [(run.depth, run.bpb) for run in budgets[budget]]
    label = f"{budget:.2e} FLOPs" if budget else series
    if best:
        inside = line[0][0] <= best.depth <= line[-1][0]
        label += f": depth {best.depth:.2f}{'' if inside else ', extrapolated'}"
        x = np.geomspace(line[0][0], line[-1][0])
        right.plot(x, best.bpb + best.curvature * np.log2(x / best.depth) ** 2, color=colour, linewidth=1.4)
        right.plot(*([best.depth], [best.bpb]) if inside else ([], []), color=colour, marker="*", markersize=12)
    right.plot(*zip(*line), color=colour, marker="o", markersize=4, linewidth=0 if best else 1.4, label=label)
right.set_xticks(depths, [str(depth) for depth in depths])
for axes in (left, right):
    axes.minorticks_off()
    axes.legend(fontsize=8.5, frameon=False)
for path in [base_dir() / "scaling" / f"{series}.png", *([DOCS / "images" / "scaling.png"] if write else [])]:
    with write_aside(path) as aside:
        picture.savefig(aside, format="png", dpi=100)
    print(path)
