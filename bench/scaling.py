"""
What the runs of a series say about size: bits per byte against FLOPs, and for each budget against depth, with the
depth that fits it best. Reads what runs/scaling_laws.sh and runs/miniseries.sh have trained.

    python -m bench.scaling --series=isoflop            # scaling/isoflop.png in NANOCHAT_BASE_DIR
    python -m bench.scaling --series=isoflop --write    # and into docs/ablations.md
"""
from configurator import configure

import numpy as np
from matplotlib.figure import Figure

from bench.harness import DOCS, show
from bench.scaling_fit import fit, read_series
from nanochat.runtime.files import base_dir, write_aside
from nanochat.runtime.tables import markdown_table

series = "isoflop"          # the tags of the runs begin with it
write = False               # put table and picture into docs/ablations.md and docs/images
configure(globals())

runs = read_series(series)
budgets = {budget: [run for run in runs if run.budget == budget] for budget in sorted({run.budget for run in runs})}
winners = [min(group, key=lambda run: run.bpb) for group in budgets.values()]

# ---- The picture. Left: a line for each depth; right: a curve for each budget
picture, below = Figure(figsize=(11, 4.2), layout="constrained"), ""
left, right = picture.subplots(1, 2)
depths = sorted({run.depth for run in runs})
for depth in depths:
    line = sorted((run.flops, run.bpb) for run in runs if run.depth == depth)
    left.plot(*zip(*line), marker="o", markersize=4, label=f"depth {depth}")
for budget, group in budgets.items():
    best = fit([run.depth for run in group], [run.bpb for run in group]) if budget else None
    label, line = f"{budget:.2e} FLOPs" if budget else series, [(run.depth, run.bpb) for run in group]
    points, = right.plot(*zip(*line), marker="o", markersize=4, linestyle="" if best else "-", label=label)
    if best:
        outside = not group[0].depth <= best.depth <= group[-1].depth
        below += (f"\n\n{label}: the parabola is lowest at depth {best.depth:.2f}, with {best.bpb:.4f} bits "
                  f"per byte{', outside of the depths that were tried: no more than a direction' * outside}.")
        x = np.geomspace(group[0].depth, group[-1].depth)
        right.plot(x, best.bpb + best.curvature * np.log2(x / best.depth) ** 2, color=points.get_color())
titles = (left, "What computation buys", "FLOPs of the run"), (right, "What to spend it on", "depth")
for axes, title, label in titles:
    axes.set(title=title, xscale="log", xlabel=label, ylabel="validation, bits per byte")
    axes.legend(fontsize=8.5, frameon=False)
right.set_xticks(depths, [str(depth) for depth in depths])

# ---- Table and picture; a page without this series' mark keeps its picture, too
lines = [[f"{r.flops:.2e}", r.depth, f"{r.parameters:,}", f"{r.tokens:,}", f"{r.tokens / r.parameters:.3g}",
          f"**{r.bpb:.4f}**" if r in winners else f"{r.bpb:.4f}"] for r in runs]
columns = ["FLOPs", "depth", "parameters", "tokens", "tokens per parameter", "bits per byte"]
show(markdown_table(columns, lines) + below, "ablations.md", f"bench.scaling --series={series}", write)
for path in [base_dir() / "scaling" / f"{series}.png", *([DOCS / "images" / "scaling.png"] if write else [])]:
    with write_aside(path) as aside:
        picture.savefig(aside, format="png", dpi=100)
    print(path)
