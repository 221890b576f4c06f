"""
One optimizer step on two ranks as torch.profiler records it: the picture of docs/overlap.md, and its table of how much of
the communication is hidden behind computation.

    python -m bench.step_timeline            # prints the table, draws step_timeline.png here
    python -m bench.step_timeline --write    # puts both into docs
"""
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch.profiler import ProfilerActivity, profile, record_function

from bench.harness import DOCS, on_ranks, show
from configurator import configure
from nanochat.files import write_aside
from nanochat.gpt import GPT, config_from_depth
from nanochat.optimizers import setup_optimizers
from nanochat.report import markdown_table
from nanochat.zero import Sharding

WAIT, WHITE = "waits for others", "#ffffff"
COMPUTES = {"forward": "#9ecae1", "backward": "#4292c6", "update": "#bdbdbd"}
TRAVELS = {"gradients": "#e6550d", "parameters": "#31a354", "Muon's matrices": "#756bb1"}
Spans = dict[str, list[tuple[float, float]]]  # of each of these: (begin, length) in ms since the step began
original_wait = dist.Work.wait


def recorded_wait(work: dist.Work, *args) -> bool:
    """Work.wait, which the profiler does not record by itself."""
    with record_function(WAIT):
        return original_wait(work, *args)


def profile_steps(rank: int, ranks: int, stage: int, depth: int, rows: int, micro_steps: int, steps: int) -> list:
    """[[spans of each step and of the forward pass after it] of each rank]."""
    dist.Work.wait = recorded_wait
    model = GPT(config_from_depth(depth, 4096, 256))
    model.init_weights(seed=0)
    sharding = Sharding(model, model.units(), torch.device("cpu"), torch.float32, stage)
    optimizers = setup_optimizers(model, sharding)
    tokens = torch.randint(4096, (rows, 257), generator=torch.Generator().manual_seed(rank))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    found, of_ranks = [], [None] * ranks
    for _ in range(steps + 1):
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for micro_step in range(micro_steps):
                with sharding.accumulate(last=micro_step == micro_steps - 1):
                    with record_function("forward"):
                        loss = model(inputs, targets)
                    with record_function("backward"):
                        (loss / micro_steps).backward()
            with record_function("update"):
                stats = sharding.reduce_and_clip(loss)
                for optimizer in optimizers:
                    optimizer.step(stats)
                sharding.all_gather_params()
            with record_function("forward"), torch.no_grad():
                model(inputs, targets)
        found.append(spans_of(profiler.events()))
    dist.all_gather_object(of_ranks, found[1:])  # the first step allocates
    return of_ranks


def spans_of(events) -> Spans:
    zero = min(event.time_range.start for event in events if event.name == "forward")
    update = next(event.time_range.start for event in events if event.name == "update")
    spans: Spans = {name: [] for name in (*COMPUTES, *TRAVELS, WAIT)}
    for event in events:
        begin, name = event.time_range.start, event.name
        if name == "gloo:all_to_all":  # what sums gradients (nanochat.distributed.reduce_scatter), and what moves matrices
            name = "gradients" if begin < update else "Muon's matrices"
        name = "parameters" if name == "gloo:all_gather" else name
        if name in spans:
            spans[name].append(((begin - zero) / 1e3, event.time_range.elapsed_us() / 1e3))
    return spans


def travel(spans: Spans, kind: str) -> tuple[float, float]:
    """ms that this kind is on its way, and ms of them in which the rank waits, for this or for another collective."""
    waits = sum(max(min(b + n, w + m) - max(b, w), 0) for b, n in spans[kind] for w, m in spans[WAIT])
    return sum(length for _, length in spans[kind]), waits


def draw(stages: dict[int, list[list[Spans]]], path: Path) -> None:
    figure = Figure(figsize=(11, 2.1 * len(stages)), layout="constrained")
    for axes, (stage, of_ranks) in zip(figure.subplots(len(stages), squeeze=False).flat, stages.items()):
        for rank, steps in enumerate(of_ranks):
            for lane, colors in enumerate((COMPUTES | {WAIT: WHITE}, TRAVELS)):
                for name, color in colors.items():
                    axes.broken_barh(steps[-1][name], (-rank - 0.42 * lane, 0.4), color=color, linewidth=0)
        axes.set(yticks=[0, -1], yticklabels=["rank 0", "rank 1"], title=f"stage {stage}", facecolor="#f7f7f7")
    axes.set_xlabel("ms")
    handles = [Patch(color=color, label=name) for name, color in (COMPUTES | TRAVELS).items()]
    figure.legend(handles=[*handles, Patch(facecolor=WHITE, edgecolor="#999999", label=WAIT)], loc="outside upper center", ncols=7, fontsize=8, frameon=False)
    with write_aside(path) as aside:
        figure.savefig(aside, format="png", dpi=100)


if __name__ == "__main__":
    depth = 6               # [1..] layers
    rows = 4                # [1..] of 256 tokens, per rank and micro-step
    micro_steps = 2         # [1..] of the step
    steps = 5               # [1..] profiled on each stage; the last one is drawn
    write = False           # put table and picture into docs
    configure(globals())
    stages = {stage: on_ranks(2, profile_steps, stage, depth, rows, micro_steps, steps) for stage in (2, 3)}
    lines = []
    for stage, of_ranks in stages.items():
        for kind in TRAVELS:
            total, waits = (sum(column) / 2 / steps for column in zip(*(travel(s, kind) for rank in of_ranks for s in rank)))
            lines.append([stage, kind, f"{total:.0f}", f"{waits:.0f}", f"{1 - waits / total:.0%}"])
    columns = ["stage", "what travels", "on its way, ms a step", "of it the rank waits, ms", "hidden"]
    show(markdown_table(columns, lines), "overlap.md", "bench.step_timeline", write)
    draw(stages, DOCS / "images" / "step_timeline.png" if write else Path("step_timeline.png"))
