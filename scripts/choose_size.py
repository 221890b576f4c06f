"""
How large a model speedrun.sh trains on this machine, how long that takes, and what it costs.

    python -m scripts.choose_size                     # for what is here; on a CPU the minutes of runs/cpu.sh
    python -m scripts.choose_size --plan=8,H100,80    # for GPUs that are not here
    python -m scripts.choose_size --file=FILE         # as speedrun.sh does: the variables are kept in FILE

Depth and rows that FILE has stay as they are: a run that goes on, perhaps on another machine, keeps its model.
"""
from configurator import configure

file = ""                   # for RANKS, DEPTH, …; empty: they are printed
plan = ""                   # 8,H100,80: GPUs to choose for, instead of those that are here
price = 2.5                 # [0..] dollars per GPU and hour
depth = 2                   # [1..] of a CPU's model; that of GPUs is chosen
configure(globals())

import importlib.util
import shutil
from pathlib import Path

import torch

from nanochat.model.gpt_config import config_from_depth
from nanochat.plan.choice import DISK, MAX_HOURS, MFU, SHARDS, VOCAB_SIZE, cpu_minutes, parse_gpus, pretraining
from nanochat.plan.memory import GIB, largest_rows
from nanochat.plan.step_trial import rows_that_train, try_steps
from nanochat.runtime.compiling import has_compiler
from nanochat.runtime.devices import choose_device_type, compute_dtype
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import base_dir, write_text
from nanochat.runtime.flops import datasheet_peak, peak_flops

kept: dict[str, str] = {}
if Path(file).is_file():
    kept = dict(word.split("=") for word in Path(file).read_text().split())


def keep(variables: str) -> None:
    if file:
        write_text(Path(file), f"{variables}\n")
    else:
        print(variables)


gpus, gpu, memory = parse_gpus(plan) if plan else (torch.cuda.device_count(), "", 0.0)
device = torch.device("cuda" if plan else choose_device_type(""))
dtype = torch.bfloat16 if plan else compute_dtype("auto", device)

# ---- A CPU: nothing is chosen, and the time follows from a step
if not gpus:
    config = config_from_depth(depth, 4096, 512, arch="modern,head_dim=64")
    alone, busy = (cpu_minutes(ms) for ms in try_steps(config, 8, dtype, device.type, has_compiler(device.type)))
    beside = f" once other processes have ended (beside them, as now, {busy:.0f})" if busy >= alone * 1.25 else ""
    print(f"on this machine this will take about {alone:.0f} minutes{beside}")
    raise SystemExit(0)

# ---- GPUs: the largest depth that fits and is pretrained within half a day, or the smallest however long it takes
if not plan and importlib.util.find_spec("datasets") is None:
    raise UserError("the tasks need the datasets package: . ./setup.sh hub")
ranks = 2 ** (gpus.bit_length() - 1)  # a power of two, which divides every batch
rate = MFU * (datasheet_peak(gpu) if gpu else peak_flops(device, torch.bfloat16))
# No GPU has confirmed that more than 16 rows fit. A step of mid-training has 256 over all ranks.
most = min(16, 256 // ranks)


def rows_that_fit(depth: int, checkpointing: bool) -> int:
    how = config_from_depth(depth, VOCAB_SIZE, 2048, arch="modern"), dtype, "cuda", True
    if plan:
        return largest_rows(memory * GIB, most, *how, ranks, checkpointing=checkpointing)
    return rows_that_train(most, *how, checkpointing=checkpointing, ranks=ranks)


depths = [int(kept["DEPTH"])] if kept else list(DISK)
for depth in depths:
    config = config_from_depth(depth, VOCAB_SIZE, 2048, arch="modern")
    if pretraining(config, ranks, 1, rate).hours > MAX_HOURS and depth != depths[-1]:
        continue
    rows, recompute = int(kept.get("ROWS", 0)), kept.get("RECOMPUTE") == "True"
    if not kept:
        rows = rows_that_fit(depth, checkpointing=False)
        # Where hardly one row fits, activations are computed twice.
        recompute = rows < 4
        if recompute:
            rows = rows_that_fit(depth, checkpointing=True)
    if rows:
        break
else:
    raise UserError(f"depth {depth} does not fit into this GPU's memory")
if not kept and not plan:
    base_dir().mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(base_dir()).free / GIB
    if free < DISK[depth]:
        raise UserError(f"depth {depth} wants {DISK[depth]} GiB of disk, and {free:,.1f} are free in {base_dir()}; "
                        "free some there, or set NANOCHAT_BASE_DIR to a folder of a larger disk")
keep(f"RANKS={ranks} DEPTH={depth} ROWS={rows} FEW={min(rows, 4)} RECOMPUTE={recompute} SHARDS={SHARDS[depth]}")

# ---- How long, and for how much. All GPUs are paid for, also those that stand idle, and the stages after pretraining.
run = pretraining(config, ranks, rows, rate)
least, longest = run.hours + 8 / ranks, run.hours + 16 / ranks
idle = f"{gpus - ranks} of them stand idle, so rent {ranks}; " if ranks < gpus else ""
print(f"depth {depth}: {run.flops_per_token:.3g} FLOPs per token; {run.steps:,} steps of {run.total_batch_size:,} "
      f"tokens in {run.micro_steps} micro-step(s)\n{ranks} x {gpu or 'GPU'} at {MFU:.0%} MFU: pretraining takes "
      f"{run.hours:.2f} hours if all communication hides; mid-training and fine-tuning on half a billion tokens, "
      "downloads, compiling, evaluations and reinforcement learning take another hour or two on eight H100, longer on "
      f"fewer or slower ones\nin all about {least:.0f} to {longest:.0f} hours and ${least * gpus * price:.0f} to "
      f"${longest * gpus * price:.0f} for {gpus} GPUs at ${price:g} per GPU and hour; {idle}disk: {DISK[depth]} GiB; "
      f"downloads: {SHARDS[depth] * 0.09:.0f} GB of text, and the tasks")
