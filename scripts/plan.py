"""
A run before it is paid for: what each rank keeps and sends, how long a step computes and how long it communicates,
what all of it takes and costs. Formulas only: nothing is trained.

    python -m scripts.plan --depth=20 --gpus=8 --gpu=H100 --link=nvlink4
"""
import math

from configurator import configure

import torch

from nanochat.errors import UserError
from nanochat.flops import datasheet_peak, peak_flops
from nanochat.gpt import config_from_depth
from nanochat.plan.machines import LINKS, plan_step
from nanochat.plan.memory import parameter_counts, shaped, state_bytes, step_bytes
from nanochat.report import markdown_table
from nanochat.schedule import accumulation_steps, choose_batch_size

# ---- Model and batch
depth = 20                  # [1..] layers
arch = "modern"             # pieces of the model, as base_train takes them
vocab_size = 65536          # [1..] tokens
max_seq_len = 2048          # [1..] tokens per row
device_batch_size = 8       # [1..] rows per rank and micro-step
total_batch_size = 524288   # [-1, 1..] tokens per optimizer step, over all ranks; -1: chosen, as base_train does
target_param_data_ratio = 10.5  # [>0] tokens to train on, per parameter of matrices and head
conversation_tokens = 0     # [0..] further tokens, of the stages after pretraining
# ---- Machine
gpus = 8                    # [1..] ranks
gpu = "H100"                # a name of the table in nanochat/flops.py; empty: the kind that is here
mfu = 0.5                   # [0.0001..1] part of its bf16 peak that is assumed to be reached
link = "nvlink4"            # of each GPU to the others: a name of the table in nanochat/plan/machines.py
price = 2.5                 # [0..] per GPU and hour, in whatever currency
# ---- What to tell
hours_only = False          # print the hours of pretraining, rounded up, and nothing else
stages = True               # print the table of ZeRO's stages
configure(globals())
if link not in LINKS:
    raise UserError(f"link={link} is not in the table; expected one of {', '.join(LINKS)}")
if not gpu and not torch.cuda.is_available():
    raise UserError("there is no GPU here; expected the name of one, such as --gpu=H100")

config, at = config_from_depth(depth, vocab_size, max_seq_len, arch=arch), LINKS[link]
adamw, muon = parameter_counts(config)
computing = shaped(config).count_parameters("matrix", "head")
if total_batch_size == -1:
    rows_unit = device_batch_size * max_seq_len * gpus
    total_batch_size = choose_batch_size(-1, target_param_data_ratio * computing, rows_unit)
micro_steps = accumulation_steps(total_batch_size, device_batch_size, max_seq_len, gpus)
rate = mfu * (datasheet_peak(gpu) if gpu else peak_flops(torch.device("cuda"), torch.bfloat16).flops)
compute, send = plan_step(config, gpus, rate, at, torch.bfloat16, total_batch_size, micro_steps)
steps = max(round(target_param_data_ratio * computing / total_batch_size), 1)
hours = steps * compute / 3600
further = hours * conversation_tokens / (steps * total_batch_size)
if hours_only:
    print(math.ceil(hours))
    raise SystemExit(0)
print(f"depth {depth}: {adamw + muon:,} parameters, {shaped(config).estimate_flops():.3g} FLOPs per token; "
      f"{steps:,} steps of {total_batch_size:,} tokens in {micro_steps} micro-step(s)")
print(f"{gpus} x {gpu or 'GPU'} at {mfu:.0%} MFU: {hours:.2f} hours"
      + (f" of pretraining and {further:.2f} on {conversation_tokens:,} tokens of conversations" if further else "")
      + f" if all communication hides, {(hours + further) * gpus * price:,.0f} at {price:g} per GPU and hour")
if not stages:
    raise SystemExit(0)
print()
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
