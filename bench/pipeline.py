"""
A pipeline's optimizer step on 2 and 4 ranks: when each stage computes, and how long it waits.

    python -m bench.pipeline            # prints the table, draws pipeline.png here
    python -m bench.pipeline --write    # puts both into docs/pipeline.md

Each rank needs a core. With fewer, root gives every rank the same share of one by a control group, so that a stage that
waits does not make the others faster.
"""
import os
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from configurator import configure

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch.distributed.pipelining import PipelineStage

from bench.harness import DOCS, limit_cpu, on_ranks, remove_limits, show
from nanochat.distributed import gather_objects
from nanochat.files import write_aside
from nanochat.gpt import GPT
from nanochat.gpt_config import config_from_depth
from nanochat.pipeline import Pipeline
from nanochat.report import markdown_table
from nanochat.zero import Sharding

write = False               # put table and picture into docs
configure(globals())

DEPTH, LENGTH, STEPS = 8, 128, 4            # a row of so many tokens per micro-batch; the first step allocates
DRAWN = {(2, 8), (4, 8)}                    # (stages, micro-batches)
COLORS = {"forward": "#9ecae1", "backward": "#4292c6"}


class Pass(NamedTuple):
    kind: str
    micro_batch: int
    begin: float        # seconds
    end: float


def timed_steps(rank: int, ranks: int, micro_batches: int) -> list[list[list[Pass]]]:
    """Of each step but the first, of each rank: its passes, from the moment in which the first one of all began."""
    if (cores := len(os.sched_getaffinity(0))) < ranks:
        limit_cpu(0.9 * cores / ranks)
    passes: list[Pass] = []

    def timed(kind: str, function):
        def run(stage, micro_batch: int, *args, **settings):
            begin = time.perf_counter()  # one clock for all processes
            result = function(stage, micro_batch, *args, **settings)
            passes.append(Pass(kind, micro_batch, begin, time.perf_counter()))
            return result
        return run

    PipelineStage.forward_one_chunk = timed("forward", PipelineStage.forward_one_chunk)
    PipelineStage.backward_one_chunk = timed("backward", PipelineStage.backward_one_chunk)
    model = GPT(config_from_depth(DEPTH, 256, LENGTH))
    pipeline = Pipeline(model, ranks, 1, rank, ranks)
    model.init_weights(0)
    sharding = Sharding(model, model.units(), torch.device("cpu"), torch.float32, 1, pipeline_stages=ranks)
    pipeline.connect(sharding, micro_batches, rows=1)
    tokens = torch.randint(256, (micro_batches, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(STEPS):
        passes.clear()
        dist.barrier()
        with sharding.accumulate(last=True, passes=micro_batches):
            pipeline.step(tokens[:, :-1], tokens[:, 1:])
        sharding.collect_gradients()
        of_ranks = gather_objects(passes)
        first = min(one.begin for one in of_ranks[0])
        found.append([[one._replace(begin=one.begin - first, end=one.end - first) for one in of] for of in of_ranks])
    return found[1:]


def bubble(of_ranks: list[list[Pass]]) -> float:
    """The share of a step's time in which a stage computes nothing, on average over stages."""
    length = max(one.end for of in of_ranks for one in of)
    return 1 - sum(one.end - one.begin for of in of_ranks for one in of) / (length * len(of_ranks))


def kept(of_rank: list[Pass]) -> int:
    """The most micro-batches whose forward pass is over and whose backward pass is not."""
    ahead = [0]
    for one in sorted(of_rank, key=lambda one: one.begin):
        ahead.append(ahead[-1] + (1 if one.kind == "forward" else -1))
    return max(ahead)


lines, figure = [], Figure(figsize=(11, 4.6), layout="constrained")
axes = dict(zip(sorted(DRAWN), figure.subplots(len(DRAWN), height_ratios=[2, 4])))
for stages in (2, 4):
    for micro_batches in (4, 8, 16):
        steps = on_ranks(stages, timed_steps, micro_batches)
        remove_limits()
        formula, measured = (stages - 1) / (micro_batches + stages - 1), sorted(map(bubble, steps))
        median = steps[[bubble(step) for step in steps].index(statistics.median_low(measured))]
        lines.append([stages, micro_batches, f"{formula:.1%}", f"{statistics.median(measured):.1%}",
                      ", ".join(str(kept(of)) for of in median)])
        print(*lines[-1], flush=True)
        if (stages, micro_batches) in DRAWN:
            drawn = axes[stages, micro_batches]
            for stage, of in enumerate(median):
                for one in of:
                    begin, length, color = 1000 * one.begin, 1000 * (one.end - one.begin), COLORS[one.kind]
                    drawn.broken_barh([(begin, length)], (-stage - 0.4, 0.8), color=color, edgecolor="white")
                    drawn.text(begin + length / 2, -stage, str(one.micro_batch + 1), ha="center", va="center", size=7)
            drawn.set(yticks=[-stage for stage in range(stages)], xlabel="ms",
                      yticklabels=[f"stage {stage}" for stage in range(stages)])
handles = [Patch(facecolor=color, label=kind) for kind, color in COLORS.items()]
figure.legend(handles=handles, loc="outside upper center", ncols=2, fontsize=8, frameon=False)
columns = ["stages", "micro-batches", "bubble (P − 1)/(m + P − 1)", "measured", "micro-batches kept by each stage"]
show(markdown_table(columns, lines, (0, 1)), "pipeline.md", "bench.pipeline", write)
with write_aside(DOCS / "images" / "pipeline.png" if write else Path("pipeline.png")) as aside:
    figure.savefig(aside, format="png", dpi=100)
