"""Optimizer steps as torch.profiler records them on each rank: for bench.step_timeline and bench.step_page."""
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from nanochat.distributed import gather_objects
from nanochat.gpt import GPT
from nanochat.gpt_config import config_from_depth
from nanochat.optimizers import setup_optimizers
from nanochat.pipeline import Pipeline
from nanochat.zero import Sharding

DEPTH, ROWS, MICRO_STEPS, STEPS = 6, 4, 2, 5  # rows of 256 tokens per rank and micro-step; the last step is drawn
COMPUTES = {"forward": "#9ecae1", "backward": "#4292c6", "update": "#bdbdbd", "wait": "#fff7bc"}
SENT = {"gradients": "#e6550d", "parameters": "#31a354", "Muon's matrices": "#756bb1"}
STREAMS = "streams"  # on their way in a pipeline
Spans = dict[str, list[tuple[float, float]]]  # of each of these: (begin, length) in ms since the step began
original_wait = dist.Work.wait


def recorded_wait(work: dist.Work, *args) -> bool:
    """Work.wait, which the profiler does not record by itself."""
    with record_function("wait"):
        return original_wait(work, *args)


def record_calls(place: object, name: str, kind: str) -> None:
    """From now on the profiler shows the calls of place.name as `kind`."""
    original = getattr(place, name)

    def recorded(*args, **kwargs):
        with record_function(kind):
            return original(*args, **kwargs)

    setattr(place, name, recorded)


def profile_steps(rank: int, ranks: int, stage: int, pipeline_stages: int = 1) -> list[list[Spans]]:
    """Of each rank, of each step and the forward pass after it. A pipeline has twice the micro-batches."""
    dist.Work.wait = recorded_wait
    model = GPT(config_from_depth(DEPTH, 4096, 256))
    pipeline = Pipeline(model, pipeline_stages, stage, rank, ranks)
    model.init_weights(seed=0)
    cpu = torch.device("cpu")
    sharding = Sharding(model, model.units(), cpu, torch.float32, stage, pipeline_stages=pipeline_stages)
    optimizers = setup_optimizers(model, sharding)
    micro_batches = 2 * MICRO_STEPS if pipeline_stages > 1 else 1
    pipeline.connect(sharding, micro_batches, ROWS)
    if pipeline_stages > 1:
        record_calls(pipeline.schedule, "_maybe_compute_loss", "forward")
        record_calls(pipeline.schedule._stage, "forward_one_chunk", "forward")
        record_calls(pipeline.schedule._stage, "backward_one_chunk", "backward")
    generator = torch.Generator().manual_seed(pipeline.rank)
    tokens = torch.randint(4096, (ROWS * micro_batches, 257), generator=generator)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    found = []
    for _ in range(STEPS + 1):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            dist.barrier()  # the profiler did not start at once everywhere
            with record_function("step"):
                if pipeline_stages > 1:
                    with sharding.accumulate(last=True, passes=micro_batches):
                        loss = pipeline.step(inputs, targets)
                for micro_step in range(MICRO_STEPS if pipeline_stages == 1 else 0):
                    with sharding.accumulate(last=micro_step == MICRO_STEPS - 1):
                        with record_function("forward"):
                            loss = model(inputs, targets)
                        with record_function("backward"):
                            (loss / MICRO_STEPS).backward()
                with record_function("update"):
                    stats = sharding.reduce_and_clip(loss, float(pipeline.is_last))
                    for optimizer in optimizers:
                        optimizer.step(stats)
                    sharding.all_gather_params()
                if pipeline_stages == 1:
                    with record_function("forward"), torch.no_grad():
                        model(inputs, targets)
        found.append(spans_of(profiler.events()))
    return gather_objects(found[1:])  # the first step allocates


def spans_of(events) -> Spans:
    first = {name: min(e.time_range.start for e in events if e.name == name) for name in ("step", "update")}
    spans: Spans = {name: [] for name in (*COMPUTES, *SENT, STREAMS)}
    for event in events:  # nanochat.distributed.reduce_scatter is an all-to-all on gloo
        after = "Muon's matrices" if event.time_range.start > first["update"] else "gradients"
        name = {"gloo:all_gather": "parameters", "gloo:all_to_all": after,
                "gloo:send": STREAMS, "gloo:recv": STREAMS}.get(event.name, event.name)
        if name in spans and event.time_range.start >= first["step"]:
            spans[name].append(((event.time_range.start - first["step"]) / 1e3, event.time_range.elapsed_us() / 1e3))
    return spans
