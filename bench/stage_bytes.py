"""
What the four stages keep and send, by the formulas of nanochat/plan/memory.py: on 64 ranks beside the ZeRO paper's
example, as a picture over the number of ranks (both in docs/zero.md), and within and between hosts (docs/machines.md).

    python -m bench.stage_bytes            # prints the tables, draws stage_bytes.png here
    python -m bench.stage_bytes --write    # puts all into docs
"""
from pathlib import Path

from configurator import configure

import torch
from matplotlib.figure import Figure

from bench.harness import DOCS, show
from nanochat.files import write_aside
from nanochat.gpt_config import config_from_depth
from nanochat.plan.machines import LINKS, Cluster
from nanochat.plan.memory import parameter_counts, state_bytes
from nanochat.plan.traffic import collectives
from nanochat.report import markdown_table

write = False               # put tables and picture into docs
configure(globals())

HOSTS, PER_HOST, MICRO_STEPS = 2, 4, 4  # of the table for two kinds of links
COLORS = ("#525252", "#1f5fa8", "#d9730d", "#31a354")  # of the stages


def per_parameter(stage: int, ranks: int, dtype: torch.dtype, kind: str) -> float:
    return sum(state_bytes(stage, ranks, dtype, **{"adamw": 0, "muon": 0, kind: 1}))


def at_64_ranks() -> str:
    paper = (16, 4 + 12 / 64, 2 + 14 / 64, 16 / 64)  # arXiv:1910.02054, figure 1
    rows = []
    for stage in range(4):
        ours = [per_parameter(stage, 64, d, k) for d in (torch.bfloat16, torch.float32) for k in ("adamw", "muon")]
        totals = [f"{7.5 * x:.1f}" for x in (paper[stage], ours[0])]
        rows.append([stage, *(f"{x:.4g}" for x in ours), f"{paper[stage]:.4g}", *totals])
    columns = ["bfloat16: AdamW", "Muon", "float32: AdamW", "Muon", "paper", "7.5 billion, GB: paper", "here, AdamW"]
    return markdown_table(["stage", *columns], rows)


def over_two_links() -> str:
    """Bytes per parameter that a rank sends in a step, on average, where all ranks share a copy and those of a host."""
    ranks, rows = HOSTS * PER_HOST, []
    cluster = Cluster(ranks, PER_HOST, LINKS["nvlink4"], LINKS["ndr"])
    for stage in (1, 2, 3):
        cells = []
        for shards in (ranks, PER_HOST):
            groups = {"shards": (shards, 1), "replicas": (ranks // shards, shards)}
            sent = collectives(stage, shards, ranks // shards, MICRO_STEPS, torch.bfloat16, torch.float32, 1, 0, 0)
            levels = [[c.times * bytes for bytes in cluster.sent(*groups[c.among], c)] for c in sent]
            cells += [per_parameter(stage, shards, torch.bfloat16, "adamw"), *map(sum, zip(*levels))]
        rows.append([stage, *(f"{cell:.2f}" for cell in cells)])
    groups = f"all {ranks} ranks", f"shard_size={PER_HOST}"
    columns = [f"{group}: {what}" for group in groups for what in ("keeps", "sends within", "between")]
    return markdown_table(["stage", *columns], rows)


def draw(path: Path, depth: int = 20) -> None:
    adamw, muon = parameter_counts(config_from_depth(depth, 65536, 2048))
    ranks = [2**i for i in range(11)]
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    for stage, color in enumerate(COLORS):
        sizes = [sum(state_bytes(stage, n, torch.bfloat16, adamw, muon)) / 1e9 for n in ranks]
        axes.plot(ranks, sizes, color=color, marker="o", markersize=3, label=f"stage {stage}")
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="ranks that share one copy (N)", ylabel="GB per rank", xticks=ranks)
    axes.set_title(f"depth {depth}, {(adamw + muon) / 1e6:.0f} million parameters, bfloat16", fontsize=10)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid(color="#e6e9ed")
    axes.legend(frameon=False, fontsize=9)
    with write_aside(path) as aside:
        figure.savefig(aside, format="png", dpi=90)


show(at_64_ranks(), "zero.md", "bench.stage_bytes", write)
show(over_two_links(), "machines.md", "bench.stage_bytes", write)
draw(DOCS / "images" / "stage_bytes.png" if write else Path("stage_bytes.png"))
