"""
Plan a run before you pay for it: bytes that a rank holds and sends on each stage of ZeRO, seconds that a step waits,
hours, and the fastest layout that fits, with or without a pipeline. Formulas only: nothing is trained. Pretraining
only: bash speedrun.sh --plan=8,H100,80 shows all stages of a speedrun and their cost.

    python -m scripts.plan --depth=20 --gpus=8 --gpu=H100 --link=nvlink4
    python -m scripts.plan --depth=32 --gpus=64 --gpus_per_node=8 --link=nvlink4 --between=ndr
"""
from configurator import configure

# ---- Model and batch
depth = 20                  # [1..] layers
vocab_size = 32768          # [1..] tokens
max_seq_len = 2048          # [1..] tokens per row
device_batch_size = 8       # [1..] rows per rank and micro-step
total_batch_size = -1       # [-1, 1..] tokens per optimizer step, over all ranks; -1: chosen as in base_train
target_param_data_ratio = 8.0  # [>0] training tokens per parameter of matrices and head
# ---- Machine
gpus = 8                    # [1..] ranks
gpus_per_node = 8           # [1..] GPUs on each host
gpu = "H100"                # a name in the table of nanochat/runtime/flops.py; empty: this machine's
memory_gib = 80.0           # [>0] GiB of each GPU
mfu = -1.0                  # [-1, 0.0001..1] of the forward and backward passes; -1: estimated, in bfloat16
link = "nvlink4"            # between GPUs of a host: a name in the table of nanochat/plan/machines.py
between = "ndr"             # between hosts, for each GPU
configure(globals())

import torch

from nanochat.model.gpt_config import config_from_depth
from nanochat.plan.choice import pretraining
from nanochat.plan.machines import LINKS, Cluster, Layout, bytes_on_a_rank, fastest_layout, plan_step
from nanochat.plan.memory import GIB, shaped, split_into_stages
from nanochat.plan.step_time import step_time
from nanochat.runtime.errors import UserError
from nanochat.runtime.flops import datasheet_gpu, gpu_here
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
kind = datasheet_gpu(gpu) if gpu else gpu_here(torch.device("cuda"))
total_batch_size, micro_steps, steps = pretraining(
    config, gpus, device_batch_size, target_param_data_ratio, total_batch_size)
flops_per_token = shaped(config).estimate_flops()
if mfu < 0:
    step = step_time(config, device_batch_size, micro_steps, gpus, kind)
    mfu = total_batch_size * flops_per_token / (gpus * kind.peak * (step.seconds - step.muon))
rate = mfu * kind.peak
hours = steps * total_batch_size * flops_per_token / (gpus * rate) / 3600
print(f"depth {depth}: {parameters:,} parameters, {flops_per_token:.3g} FLOPs per token; "
      f"{steps:,} steps of {total_batch_size:,} tokens in {micro_steps} micro-step(s)")
print(f"{gpus} x {kind.name} at {mfu:.0%} MFU: {hours:.2f} hours if all communication hides")

def table_row(layout: Layout) -> list:
    needed = bytes_on_a_rank(config, cluster, layout, dtype)
    step = plan_step(config, cluster, layout, rate, dtype, total_batch_size)
    gigabytes = [f"{n / 1e9:.2f}" for n in (needed, step.within, step.between)]
    seconds = [f"{n:.3f}" for n in (step.exposed, step.bubble, step.seconds)]
    reached = total_batch_size * flops_per_token / (gpus * step.seconds * kind.peak)
    return [layout.zero_stage, layout.shards, layout.pipeline_stages, layout.rows, *gigabytes,
            *seconds, f"{reached:.1%}", f"{steps * step.seconds / 3600:.2f}"]


# ZeRO's stages, each over a host and over all ranks; then the fastest layout that fits, if it is not among them.
layouts = [Layout(0, 1, device_batch_size, micro_steps)]
for zero_stage in (1, 2, 3):
    for shards in sorted({cluster.per_host, gpus}):
        layouts.append(Layout(zero_stage, shards, device_batch_size, micro_steps))
best = fastest_layout(config, cluster, rate, dtype, total_batch_size, memory_gib * GIB)
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
