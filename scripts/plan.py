"""
A run before it is paid for: what each rank keeps and sends, how long a step computes and how long it communicates,
what all of it takes and costs. Formulas only: nothing is trained.

    python -m scripts.plan --depth=20 --gpus=8 --gpu=H100 --link=nvlink4
"""
from configurator import configure

import torch

from nanochat.errors import UserError, require_positive
from nanochat.flops import datasheet_peak
from nanochat.plan.machines import LINKS, plan_step, shaped
from nanochat.plan.memory import parameter_counts, state_bytes, step_bytes
from nanochat.report import markdown_table
from nanochat.schedule import accumulation_steps

# ---- Model and batch
depth = 20                  # layers
vocab_size = 65536          # tokens
max_seq_len = 2048          # tokens per row
device_batch_size = 8       # rows per rank and micro-step
total_batch_size = 524288   # tokens per optimizer step, over all ranks
target_param_data_ratio = 20.0  # tokens to train on, per parameter
# ---- Machine
gpus = 8                    # ranks
gpu = "H100"                # a name of the table in nanochat/flops.py
mfu = 0.5                   # part of its bf16 peak that is assumed to be reached
link = "nvlink4"            # of each GPU to the others: a name of the table in nanochat/plan/machines.py
price = 2.5                 # per GPU and hour, in whatever currency
config = configure(globals())
require_positive(config, "depth", "vocab_size", "max_seq_len", "device_batch_size", "gpus")
if not 0 < mfu <= 1:
    raise UserError(f"mfu={mfu:g} must be above 0 and at most 1")
if target_param_data_ratio <= 0:
    raise UserError(f"target_param_data_ratio={target_param_data_ratio:g} must be above 0")
if link not in LINKS:
    raise UserError(f"link={link} is not in the table; expected one of {', '.join(LINKS)}")

model = shaped(depth, vocab_size, max_seq_len)
adamw, muon = parameter_counts(model.config)
micro_steps = accumulation_steps(total_batch_size, device_batch_size, max_seq_len, gpus)
step = plan_step(model, gpus, mfu * datasheet_peak(gpu), LINKS[link], torch.bfloat16, total_batch_size, micro_steps)
steps = max(round(target_param_data_ratio * (adamw + muon) / total_batch_size), 1)
hours = steps * step.compute / 3600
print(f"depth {depth}: {adamw + muon:,} parameters, {model.estimate_flops():.3g} FLOPs per token; {steps:,} steps of {total_batch_size:,} tokens in {micro_steps} micro-step(s)")
print(f"{gpus} x {gpu} at {mfu:.0%} MFU: {hours:.2f} hours if all communication hides, {hours * gpus * price:,.0f} at {price:g} per GPU and hour")
columns = ["stage", "parameters GB", "gradients GB", "optimizer GB", "together", "with activations", "sent per step, GB", f"seconds on {LINKS[link].name}"]
rows = []
for stage in range(4):
    kept = state_bytes(stage, gpus, torch.bfloat16, adamw, muon)
    fullest = step_bytes(model.config, device_batch_size, torch.bfloat16, "cuda", stage=stage, ranks=gpus, micro_steps=micro_steps).total
    rows.append([stage, *(f"{x / 1e9:.2f}" for x in (*kept, sum(kept), fullest, step.send[stage] * LINKS[link].bandwidth)), f"{step.send[stage]:.3f}"])
print(markdown_table(columns, rows), f"of each rank; a step computes for {step.compute:.3f} s", sep="\n\n")
