"""
A run before it is paid for: bytes that a rank holds and sends on each stage of ZeRO, seconds that a step waits, hours
and cost; and the fastest layout that fits, with or without a pipeline. Formulas only: nothing is trained.

    python -m scripts.plan --depth=20 --gpus=8 --gpu=H100 --link=nvlink4
    python -m scripts.plan --depth=32 --gpus=64 --gpus_per_node=8 --link=nvlink4 --between=ndr
"""
from configurator import configure

# ---- Model and batch
depth = 20                  # [1..] layers
vocab_size = 65536          # [1..] tokens
max_seq_len = 2048          # [1..] tokens per row
device_batch_size = 8       # [1..] rows per rank and micro-step
total_batch_size = -1       # [-1, 1..] tokens per optimizer step, over all ranks; -1: chosen, as base_train does
target_param_data_ratio = 8.0  # [>0] tokens to train on, per parameter of matrices and head
# ---- Machine
gpus = 8                    # [1..] ranks
gpus_per_node = 8           # [1..] of them on each host
gpu = "H100"                # a name of the table in nanochat/runtime/flops.py; empty: the kind that is here
memory_gib = 80.0           # [>0] of each
mfu = 0.48                  # [0.0001..1] part of its bf16 peak that forward and backward passes are assumed to reach
link = "nvlink4"            # of each GPU to the others of its host: a name of the table in nanochat/plan/machines.py
between = "ndr"             # of each GPU to other hosts
price = 2.5                 # [0..] dollars per GPU and hour
configure(globals())

import torch

from nanochat.model.gpt_config import config_from_depth
from nanochat.plan.choice import pretraining
from nanochat.plan.machines import LINKS, Cluster, Layout, bytes_on_a_rank, fastest_layout, plan_step
from nanochat.plan.memory import GIB, split_into_stages
from nanochat.runtime.errors import UserError
from nanochat.runtime.flops import datasheet_peak, peak_flops
from nanochat.runtime.tables import markdown_table

for name, chosen in (("link", link), ("between", between)):
    if chosen not in LINKS:
        raise UserError(f"{name}={chosen} is not in the table; expected one of {', '.join(LINKS)}")
if gpus > gpus_per_node and gpus % gpus_per_node:
    raise UserError(f"gpus={gpus} must be a multiple of gpus_per_node={gpus_per_node}, or fewer")
if not gpu and not torch.cuda.is_available():
    raise UserError("there is no GPU here; expected the name of one, such as --gpu=H100")

config = config_from_depth(depth, vocab_size, max_seq_len, arch="modern")
dtype = torch.bfloat16
cluster = Cluster(gpus, min(gpus, gpus_per_node), LINKS[link], LINKS[between])
parameters = sum(split_into_stages(config)[0].units)
peak = datasheet_peak(gpu) if gpu else peak_flops(torch.device("cuda"), dtype)
flops_per_token, total_batch_size, micro_steps, steps, hours = pretraining(
    config, gpus, device_batch_size, mfu * peak, target_param_data_ratio, total_batch_size)
print(f"depth {depth}: {parameters:,} parameters, {flops_per_token:.3g} FLOPs per token; "
      f"{steps:,} steps of {total_batch_size:,} tokens in {micro_steps} micro-step(s)")
print(f"{gpus} x {gpu or 'GPU'} at {mfu:.0%} MFU: {hours:.2f} hours if all communication hides; "
      f"cost ${hours * gpus * price:,.0f}, at ${price:g} per GPU and hour")

def table_row(layout: Layout) -> list:
    needed = bytes_on_a_rank(config, cluster, layout, dtype)
    step = plan_step(config, cluster, layout, mfu * peak, dtype, total_batch_size)
    gigabytes = [f"{n / 1e9:.2f}" for n in (needed, step.within, step.between)]
    seconds = [f"{n:.3f}" for n in (step.exposed, step.bubble, step.seconds)]
    reached = total_batch_size * flops_per_token / (gpus * step.seconds * peak)
    return [layout.zero_stage, layout.shards, layout.pipeline_stages, layout.rows, *gigabytes,
            *seconds, f"{reached:.1%}", f"{steps * step.seconds / 3600:.2f}"]


# ZeRO's stages, each over a host and over all ranks; then the fastest layout that fits, if it is not among them.
layouts = [Layout(0, 1, device_batch_size, micro_steps)]
for zero_stage in (1, 2, 3):
    for shards in sorted({cluster.per_host, gpus}):
        layouts.append(Layout(zero_stage, shards, device_batch_size, micro_steps))
best = fastest_layout(config, cluster, mfu * peak, dtype, total_batch_size, memory_gib * GIB)
if best:
    layouts.append(best[0])
print(f"\nA rank, over {link} within a host and {between} between hosts:\n")
print(markdown_table(
    ["stage", "shard_size", "pipeline", "rows", "needs, GB", "sends within a host, GB", "to others, GB", "waits, s",
     "bubble, s", "step, s", "MFU", "hours"],
    [table_row(layout) for layout in dict.fromkeys(layouts)]))
if not best:
    print("\nnothing fits: take more GPUs or a smaller depth")
    raise SystemExit(0)
layout, step = best
options = (f"--zero_stage={layout.zero_stage} --device_batch_size={layout.rows} --shard_size={layout.shards} "
           f"--pipeline_stages={layout.pipeline_stages} --activation_checkpointing={layout.checkpointing}")
print(f"\nthe fastest that fits into {memory_gib:g} GiB: {options}, {step.seconds:.3f} s a step")
