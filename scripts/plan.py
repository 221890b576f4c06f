"""
A run before it is paid for: what each rank keeps and sends, how long a step computes and how long it communicates,
what all of it takes and costs. Formulas only: nothing is trained.

    python -m scripts.plan --depth=20 --gpus=8 --gpu=H100 --link=nvlink4
"""
from configurator import configure

import torch

from nanochat.errors import UserError
from nanochat.flops import datasheet_peak
from nanochat.gpt import config_from_depth
from nanochat.plan.machines import LINKS, plan_step
from nanochat.plan.memory import parameter_counts, shaped, state_bytes, step_bytes
from nanochat.report import markdown_table
from nanochat.schedule import accumulation_steps

# ---- Model and batch
depth = 20                  # [1..] layers
arch = "modern"             # pieces of the model, as base_train takes them
vocab_size = 65536          # [1..] tokens
max_seq_len = 2048          # [1..] tokens per row
device_batch_size = 8       # [1..] rows per rank and micro-step
total_batch_size = 524288   # [1..] tokens per optimizer step, over all ranks
target_param_data_ratio = 10.5  # [>0] tokens to train on, per parameter of matrices and head
# ---- Machine
gpus = 8                    # [1..] ranks
gpu = "H100"                # a name of the table in nanochat/flops.py
mfu = 0.5                   # [0.0001..1] part of its bf16 peak that is assumed to be reached
link = "nvlink4"            # of each GPU to the others: a name of the table in nanochat/plan/machines.py
price = 2.5                 # [0..] per GPU and hour, in whatever currency
configure(globals())
if link not in LINKS:
    raise UserError(f"link={link} is not in the table; expected one of {', '.join(LINKS)}")

config, at = config_from_depth(depth, vocab_size, max_seq_len, arch=arch), LINKS[link]
adamw, muon = parameter_counts(config)
micro_steps = accumulation_steps(total_batch_size, device_batch_size, max_seq_len, gpus)
compute, send = plan_step(config, gpus, mfu * datasheet_peak(gpu), at, torch.bfloat16, total_batch_size, micro_steps)
computing = shaped(config).count_parameters("matrix", "head")
steps = max(round(target_param_data_ratio * computing / total_batch_size), 1)
hours = steps * compute / 3600
print(f"depth {depth}: {adamw + muon:,} parameters, {shaped(config).estimate_flops():.3g} FLOPs per token; "
      f"{steps:,} steps of {total_batch_size:,} tokens in {micro_steps} micro-step(s)")
print(f"{gpus} x {gpu} at {mfu:.0%} MFU: {hours:.2f} hours if all communication hides, "
      f"{hours * gpus * price:,.0f} at {price:g} per GPU and hour\n")
rows = []
for stage, seconds in enumerate(send):
    kept = state_bytes(stage, gpus, torch.bfloat16, adamw, muon)
    fullest = sum(step_bytes(config, device_batch_size, torch.bfloat16, "cuda", stage=stage, ranks=gpus))
    gigabytes = (*kept, sum(kept), fullest, seconds * at.bandwidth)
    rows.append([stage, *(f"{count / 1e9:.2f}" for count in gigabytes), f"{seconds:.3f}"])
columns = ["stage", "parameters GB", "gradients GB", "optimizer GB", "together", "with activations",
           "sent per step, GB", f"seconds on {at.name}"]
print(markdown_table(columns, rows))
print(f"\nof each rank; a step computes for {compute:.3f} s")
