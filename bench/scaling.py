"""
What the runs of a series say about size: bits per byte against FLOPs, and for each budget against depth, with the
depth that fits it best. Reads what runs/scaling_laws.sh and runs/miniseries.sh have trained.

    python -m bench.scaling --series=isoflop            # scaling/isoflop.png and .csv in NANOCHAT_BASE_DIR
    python -m bench.scaling --series=isoflop --write    # and into docs/scaling.md
"""
import csv
import io

from configurator import configure

from bench.pages import DOCS, put_into_page
from bench.scaling_fit import Run, figure, fit, read_series
from nanochat.files import base_dir, write_aside, write_text
from nanochat.report import markdown_table

series = "isoflop"          # the tags of the runs begin with it
write = False               # put table and picture into docs/scaling.md and docs/images
configure(globals())

runs = read_series(series)
optima = {budget: fit([r.depth for r in runs if r.budget == budget], [r.bpb for r in runs if r.budget == budget]) for budget in sorted({r.budget for r in runs})}
folder = base_dir() / "scaling"
rows = io.StringIO()
csv.writer(rows).writerows([Run._fields, *runs])
write_text(folder / f"{series}.csv", rows.getvalue())

text = markdown_table(["FLOPs", "depth", "parameters", "tokens", "tokens per parameter", "bits per byte"],
             [[f"{r.flops:.2e}", r.depth, f"{r.parameters:,}", f"{r.tokens:,}", f"{r.tokens / r.parameters:.3g}",
               f"**{r.bpb:.4f}**" if r.bpb == min(other.bpb for other in runs if other.budget == r.budget) else f"{r.bpb:.4f}"] for r in runs])
for budget, best in optima.items():
    here = [r.depth for r in runs if r.budget == budget]
    if best and budget:
        outside = "" if min(here) <= best.depth <= max(here) else ", outside of the depths that were tried: no more than a direction"
        text += f"\n\n{budget:.2e} FLOPs: the parabola is lowest at depth {best.depth:.2f}, with {best.bpb:.4f} bits per byte{outside}."
print(text)
if write:  # first: a page without this series' mark keeps its picture, too
    put_into_page("scaling.md", f"python -m bench.scaling --series={series} --write", text)
for path in [folder / f"{series}.png", *([DOCS / "images" / "scaling.png"] if write else [])]:
    with write_aside(path) as aside:
        figure(series, runs, optima).savefig(aside, format="png", dpi=100)
    print(path)
