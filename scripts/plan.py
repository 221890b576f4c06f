"""
A run before it is paid for: bytes that a rank keeps and sends on each stage of ZeRO and in a pipeline, seconds that a
step computes, sends and waits, hours and cost. Formulas only: nothing is trained.

    python -m scripts.plan --depth=20 --gpus=8 --gpu=H100 --link=nvlink4
    python -m scripts.plan --depth=32 --gpus=64 --total_batch_size=-1 --gpus_per_node=8 --link=nvlink4 --between=ndr
    python -m scripts.plan --depth=48 --gpus=64 --pipeline_stages=4 --device_batch_size=1
"""
import math
from typing import Literal

from configurator import configure

import torch

from nanochat.model.gpt_config import config_from_depth
from nanochat.optim.schedule import accumulation_steps, choose_batch_size
from nanochat.plan.machines import LINKS, Cluster, Layout, fastest_layout, fits, pipelines, plan_step
from nanochat.plan.memory import GIB, parameter_counts, shaped, split_into_stages, state_bytes, step_bytes
from nanochat.runtime.errors import UserError
from nanochat.runtime.flops import datasheet_peak, peak_flops
from nanochat.runtime.tables import markdown_table

# ---- Model and batch
depth = 20                  # [1..] layers
arch = "modern"             # pieces of the model, as base_train takes them
vocab_size = 65536          # [1..] tokens
max_seq_len = 2048          # [1..] tokens per row
device_batch_size = 8       # [1..] rows per rank and micro-step
total_batch_size = 524288   # [-1, 1..] tokens per optimizer step, over all ranks; -1: chosen, as base_train does
target_param_data_ratio = 10.5  # [>0] tokens to train on, per parameter of matrices and head
# ---- Machine
gpus = 8                    # [1..] ranks
gpus_per_node = 8           # [1..] of them on each host
gpu = "H100"                # a name of the table in nanochat/runtime/flops.py; empty: the kind that is here
memory_gib = 80.0           # [>0] of each
mfu = 0.5                   # [0.0001..1] part of its bf16 peak that forward and backward passes are assumed to reach
link = "nvlink4"            # of each GPU to the others of its host: a name of the table in nanochat/plan/machines.py
between = "ndr"             # of each GPU to other hosts
pipeline_stages = 1         # [1..] groups of ranks with layers of their own; more than 1: beside the layouts without
price = 2.5                 # [0..] dollars per GPU and hour
# ---- What to tell
tell: Literal["all", "summary", "hours"] = "all"  # summary: without the table; hours: just them, rounded up
configure(globals())
for name, chosen in (("link", link), ("between", between)):
    if chosen not in LINKS:
        raise UserError(f"{name}={chosen} is not in the table; expected one of {', '.join(LINKS)}")
if gpus > gpus_per_node and gpus % gpus_per_node:
    raise UserError(f"gpus={gpus} must be a multiple of gpus_per_node={gpus_per_node}, or fewer")
if not gpu and not torch.cuda.is_available():
    raise UserError("there is no GPU here; expected the name of one, such as --gpu=H100")

config = config_from_depth(depth, vocab_size, max_seq_len, arch=arch)
dtype = torch.bfloat16
cluster = Cluster(gpus, min(gpus, gpus_per_node), LINKS[link], LINKS[between])
possible = pipelines(config, cluster)
if pipeline_stages not in possible:
    raise UserError(f"pipeline_stages={pipeline_stages} of {depth} layers on {gpus} GPUs, {gpus_per_node} on a host: "
                    f"stages are whole hosts or equal parts of one; expected one of {', '.join(map(str, possible))}")
adamw, muon = parameter_counts(config)
computing = shaped(config).count_parameters("matrix", "head")
flops_per_token = shaped(config).estimate_flops()
if total_batch_size == -1:
    rows_unit = device_batch_size * max_seq_len * gpus
    total_batch_size = choose_batch_size(-1, target_param_data_ratio * computing, rows_unit)
micro_steps = accumulation_steps(total_batch_size, device_batch_size, max_seq_len, gpus // pipeline_stages)
if micro_steps < pipeline_stages:
    raise UserError(f"pipeline_stages={pipeline_stages} wants as many micro-steps, there are {micro_steps}; try "
                    f"total_batch_size={total_batch_size // micro_steps * pipeline_stages}, or device_batch_size="
                    f"{max(device_batch_size * micro_steps // pipeline_stages, 1)}")
peak = datasheet_peak(gpu) if gpu else peak_flops(torch.device("cuda"), dtype).flops
steps = max(round(target_param_data_ratio * computing / total_batch_size), 1)
hours = steps * total_batch_size * flops_per_token / (gpus * mfu * peak) / 3600
if tell == "hours":
    print(math.ceil(hours))
    raise SystemExit(0)
print(f"depth {depth}: {adamw + muon:,} parameters, {flops_per_token:.3g} FLOPs per token; "
      f"{steps:,} steps of {total_batch_size:,} tokens in {micro_steps} micro-step(s)")
print(f"{gpus} x {gpu or 'GPU'} at {mfu:.0%} MFU: {hours:.2f} hours if all communication hides; "
      f"cost ${hours * gpus * price:,.0f}, at ${price:g} per GPU and hour")
if tell == "summary":
    raise SystemExit(0)


def table_row(layout: Layout) -> list:
    sharing = layout.shards if layout.zero_stage else gpus // layout.pipeline_stages
    fullest = sum(step_bytes(config, layout.rows, dtype, "cuda", zero_stage=layout.zero_stage, ranks=sharing,
                             micro_steps=layout.micro_steps, pipeline_stages=layout.pipeline_stages))
    largest = max(split_into_stages(config, layout.pipeline_stages), key=lambda stage: stage.adamw + stage.muon)
    kept = sum(state_bytes(layout.zero_stage, sharing, dtype, largest.adamw, largest.muon))
    fit = "yes" if fits(config, cluster, layout, dtype, memory_gib * GIB) else "no"
    step = plan_step(config, cluster, layout, mfu * peak, dtype, total_batch_size)
    seconds = [f"{n:.3f}" for n in (step.update, step.sending, step.exposed, step.bubble, step.seconds)]
    reached = total_batch_size * flops_per_token / (gpus * step.seconds * peak)
    hours = steps * step.seconds / 3600
    return [layout.zero_stage, layout.shards if layout.zero_stage else "–", layout.pipeline_stages, f"{kept / 1e9:.2f}",
            f"{fullest / 1e9:.2f}", fit, f"{step.within / 1e9:.2f}", f"{step.between / 1e9:.2f}", *seconds,
            f"{reached:.1%}", f"{hours:.2f}", f"{hours * gpus * price:,.0f}"]


def rows_of(stages: int, micro_steps: int) -> list[list]:
    """Rows of the table for one number of pipeline stages: ZeRO's stages, each over a host and over all ranks."""
    ranks = gpus // stages
    found = [Layout(0, 1, device_batch_size, micro_steps, pipeline_stages=stages)]
    zero_stages = (1, 2, 3)
    if stages > 1:
        zero_stages = (1,) if ranks > 1 else ()
    for zero_stage in zero_stages:
        for shards in sorted({min(cluster.per_host, ranks), ranks}):
            found.append(Layout(zero_stage, shards, device_batch_size, micro_steps, pipeline_stages=stages))
    return [table_row(layout) for layout in found]


rows = []
if pipeline_stages == 1 or micro_steps % pipeline_stages == 0:
    rows += rows_of(1, micro_steps // pipeline_stages)
if pipeline_stages > 1:
    rows += rows_of(pipeline_stages, micro_steps)
columns = ["stage", "shard_size", "pipeline", "keeps, GB", "at most, GB", f"fits {memory_gib:g} GiB",
           "sends within a host, GB", "to others, GB", "Muon, s", "sending, s", "waits, s", "bubble, s", "step, s",
           "MFU", "hours", "cost, $"]
links = f"over {cluster.within.name}"
if gpus > gpus_per_node:
    links += f" within and {cluster.between.name} between hosts"
print(f"\nA rank, {device_batch_size} rows at a time; {links}:\n")
print(markdown_table(columns, rows))
best = fastest_layout(config, cluster, mfu * peak, dtype, total_batch_size, memory_gib * GIB)
if not best:
    print("\nnothing fits: take more GPUs or a smaller depth")
    raise SystemExit(0)
layout, step = best
options = [f"--zero_stage={layout.zero_stage}"]
if layout.zero_stage:
    options.append(f"--shard_size={layout.shards}")
if layout.pipeline_stages > 1:
    options.append(f"--pipeline_stages={layout.pipeline_stages}")
options.append(f"--device_batch_size={layout.rows}")
if layout.checkpointing:
    options.append("--activation_checkpointing")
print(f"\nthe fastest that fits: {' '.join(options)}, {step.seconds:.3f} s a step")
if layout.zero_stage == 3:
    print(f"chat_rl, and evaluations of tasks in chat_sft, gather the whole model on each GPU: "
          f"{dtype.itemsize * (adamw + muon) / 1e9:.2f} GB more")
