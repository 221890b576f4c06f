"""
One optimizer step on two ranks as torch.profiler records it: a picture, and how much of the communication is hidden.

    python -m bench.step_timeline            # prints the table, draws step_timeline.png here
    python -m bench.step_timeline --write    # puts both into docs/overlap.md
"""
from itertools import product
from pathlib import Path

from configurator import configure

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench.harness import DOCS, on_ranks, show
from bench.profiled import COMPUTES, SENT, Spans, profile_steps
from nanochat.files import write_aside
from nanochat.report import markdown_table

write = False               # put table and picture into docs
configure(globals())


def row(stage: int, kind: str, steps: list[Spans]) -> list:
    total = sum(n for spans in steps for _, n in spans[kind]) / len(steps)
    pairs = [(b, n, c, m) for spans in steps for b, n in spans[kind] for c, m in spans["wait"]]
    waits = sum(max(min(b + n, c + m) - max(b, c), 0) for b, n, c, m in pairs) / len(steps)
    return [stage, kind, f"{total:.0f}", f"{waits:.0f}", f"{1 - waits / total:.0%}"]


figure, lines = Figure(figsize=(11, 4.4), layout="constrained"), []
for stage, axes in zip((2, 3), figure.subplots(2)):
    of_ranks = on_ranks(2, profile_steps, stage)
    lines += [row(stage, kind, [*of_ranks[0], *of_ranks[1]]) for kind in SENT]
    for (name, color), (rank, steps) in product((COMPUTES | SENT).items(), enumerate(of_ranks)):
        axes.broken_barh(steps[-1][name], (-rank - 0.42 * (name in SENT), 0.4), color=color, linewidth=0)
    axes.set(yticks=[0, -1], yticklabels=["rank 0", "rank 1"], title=f"stage {stage}", xlabel="ms")
handles = [Patch(facecolor=color, edgecolor="#999999", label=name) for name, color in (COMPUTES | SENT).items()]
figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8, frameon=False)
columns = ["stage", "what is sent", "under way, ms", "of it in wait(), ms", "hidden"]
show(markdown_table(columns, lines, (0, 1)), "overlap.md", "bench.step_timeline", write)
with write_aside(DOCS / "images" / "step_timeline.png" if write else Path("step_timeline.png")) as aside:
    figure.savefig(aside, format="png", dpi=100)
