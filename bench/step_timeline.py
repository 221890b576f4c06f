"""
One optimizer step on two ranks as torch.profiler records it: a picture, and how much of the communication is hidden.

    python -m bench.step_timeline            # prints the table, draws step_timeline.png here
    python -m bench.step_timeline --write    # puts both into docs/overlap.md
"""
from itertools import product
from pathlib import Path

from configurator import configure

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch.profiler import ProfilerActivity, profile, record_function

from bench.harness import DOCS, on_ranks, show
from nanochat.files import write_aside
from nanochat.gpt import GPT, config_from_depth
from nanochat.optimizers import setup_optimizers
from nanochat.report import markdown_table
from nanochat.zero import Sharding

write = False               # put table and picture into docs
configure(globals())

DEPTH, ROWS, MICRO_STEPS, STEPS = 6, 4, 2, 5  # rows of 256 tokens per rank and micro-step; the last step is drawn
COMPUTES = {"forward": "#9ecae1", "backward": "#4292c6", "update": "#bdbdbd", "wait": "#fff7bc"}
SENT = {"gradients": "#e6550d", "parameters": "#31a354", "Muon's matrices": "#756bb1"}
Spans = dict[str, list[tuple[float, float]]]  # of each of these: (begin, length) in ms since the step began
original_wait = dist.Work.wait


def recorded_wait(work: dist.Work, *args) -> bool:
    """Work.wait, which the profiler does not record by itself."""
    with record_function("wait"):
        return original_wait(work, *args)


def profile_steps(rank: int, ranks: int, stage: int) -> list[list[Spans]]:
    """Of each rank, of each step and the forward pass after it."""
    dist.Work.wait = recorded_wait
    model = GPT(config_from_depth(DEPTH, 4096, 256))
    model.init_weights(seed=0)
    sharding = Sharding(model, model.units(), torch.device("cpu"), torch.float32, stage)
    optimizers = setup_optimizers(model, sharding)
    tokens = torch.randint(4096, (ROWS, 257), generator=torch.Generator().manual_seed(rank))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    found, of_ranks = [], [[]] * ranks
    for _ in range(STEPS + 1):
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for micro_step in range(MICRO_STEPS):
                with sharding.accumulate(last=micro_step == MICRO_STEPS - 1):
                    with record_function("forward"):
                        loss = model(inputs, targets)
                    with record_function("backward"):
                        (loss / MICRO_STEPS).backward()
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
    first = {name: min(e.time_range.start for e in events if e.name == name) for name in ("forward", "update")}
    spans: Spans = {name: [] for name in (*COMPUTES, *SENT)}
    for event in events:  # nanochat.distributed.reduce_scatter is an all-to-all on gloo
        after = "Muon's matrices" if event.time_range.start > first["update"] else "gradients"
        name = {"gloo:all_gather": "parameters", "gloo:all_to_all": after}.get(event.name, event.name)
        if name in spans:
            spans[name].append(((event.time_range.start - first["forward"]) / 1e3, event.time_range.elapsed_us() / 1e3))
    return spans


def row(stage: int, kind: str, steps: list[Spans]) -> list:
    total = sum(n for spans in steps for _, n in spans[kind]) / len(steps)
    pairs = [(b, n, c, m) for spans in steps for b, n in spans[kind] for c, m in spans["wait"]]
    waits = sum(max(min(b + n, c + m) - max(b, c), 0) for b, n, c, m in pairs) / len(steps)
    return [stage, kind, f"{total:.0f}", f"{waits:.0f}", f"{1 - waits / total:.0%}"]


if __name__ == "__main__":
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
    show(markdown_table(columns, lines), "overlap.md", "bench.step_timeline", write)
    with write_aside(DOCS / "images" / "step_timeline.png" if write else Path("step_timeline.png")) as aside:
        figure.savefig(aside, format="png", dpi=100)
