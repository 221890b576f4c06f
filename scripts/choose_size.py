"""
How large a model speedrun.sh trains on this machine: hours, cost, disk, and the variables of its commands.

    python -m scripts.choose_size                     # for this machine; on a CPU the minutes of runs/cpu.sh
    python -m scripts.choose_size --plan=8,H100,80    # for GPUs that are not here
    python -m scripts.choose_size --file=FILE         # as speedrun.sh does: the variables are kept in FILE

Depth and rows in FILE are kept: a run that continues, perhaps on another machine, keeps its model. On a CPU FILE gets
the seconds of each step, for the page that shows the run.
"""
from configurator import configure

file = ""                   # where RANKS, DEPTH, … go; empty: they are printed
plan = ""                   # 8,H100,80: GPUs to choose for, instead of this machine's
price = 2.5                 # [0..] dollars per GPU and hour; a guess of November 2026 for an H100
depth = 2                   # [1..] layers on a CPU; for GPUs they are chosen
configure(globals())

import importlib.util
import json
import os
import re
import shutil
from pathlib import Path

import torch

from nanochat.model.gpt_config import config_from_depth
from nanochat.plan.choice import (
    SIZES,
    SLOWER,
    Choice,
    choose_size,
    config_of,
    cost,
    cpu_seconds,
    disk,
    disk_bytes,
    parse_gpus,
)
from nanochat.plan.memory import GIB, largest_rows, shaped
from nanochat.plan.step_trial import rows_that_train, try_steps
from nanochat.runtime.compiling import has_compiler
from nanochat.runtime.devices import choose_device_type, compute_dtype
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import base_dir, write_text
from nanochat.runtime.flops import datasheet_gpu, gpu_here

gpus, name, memory = parse_gpus(plan) if plan else (torch.cuda.device_count(), "", 0.0)
device = torch.device("cuda" if plan else choose_device_type(""))
dtype = torch.bfloat16 if plan else compute_dtype("auto", device)

# ---- A CPU: nothing is chosen; timed steps give the time
if not gpus:
    # What runs/cpu.sh trains: its vocabulary, length of rows, architecture and rows of a step.
    config = config_from_depth(depth, 4096, 512, arch="modern,head_dim=64")
    trial = config, 8, dtype, device.type, has_compiler(device.type)
    alone_ms, busy_ms = try_steps(*trial)
    if busy_ms >= 1.25 * alone_ms:
        # Beside other processes, threads that wait for each other spin: that would count as work.
        os.environ["GOMP_SPINCOUNT"] = "100"
        alone_ms = min(alone_ms, try_steps(*trial)[0])
    alone, busy = (sum(cpu_seconds(depth, ms).values()) / 60 for ms in (alone_ms, busy_ms))
    if file:
        write_text(Path(file), json.dumps(cpu_seconds(depth, busy_ms)))
    beside = f", {busy:.0f} while other processes run as they do now" if busy >= alone * 1.25 else ""
    print(f"on this machine this will take about {alone:.0f} minutes{beside}")
    raise SystemExit(0)

# ---- GPUs
if not plan and importlib.util.find_spec("datasets") is None:
    raise UserError("the tasks need the datasets package: . ./setup.sh hub")
kept: dict[str, str] = {}
if Path(file).is_file():
    kept = dict(re.findall(r"(\w+)=(\w+)", Path(file).read_text()))
    if missing := {"DEPTH", "ROWS", "RECOMPUTE"} - set(kept):
        raise UserError(f"{file} has no {', '.join(sorted(missing))}: delete it to choose again")
gpu = datasheet_gpu(name) if plan else gpu_here(device)
ranks = 2 ** (gpus.bit_length() - 1)  # a power of two, which divides every batch


def rows_that_fit(most: int, depth: int, checkpointing: bool) -> int:
    how = config_of(depth), dtype, "cuda", True
    if plan:
        return largest_rows(memory * GIB, most, *how, ranks, checkpointing=checkpointing)
    return rows_that_train(most, *how, checkpointing=checkpointing, ranks=ranks)


if kept and int(kept["DEPTH"]) not in SIZES:
    raise UserError(f"{file} has depth {kept['DEPTH']}, and this version trains {', '.join(map(str, SIZES))}: "
                    "delete it to choose again, or go on with the version that chose it")
if kept:
    choice = Choice(int(kept["DEPTH"]), int(kept["ROWS"]), kept["RECOMPUTE"] == "True")
else:
    choice = choose_size(ranks, gpu, rows_that_fit)
depth, rows, recompute = choice
size = SIZES[depth]
if not kept and not plan:
    base_dir().mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(base_dir()).free / GIB
    if free < disk(depth):
        raise UserError(f"depth {depth} wants {disk(depth)} GiB of disk, and {free:,.1f} are free in {base_dir()}; "
                        "free some there, or set NANOCHAT_BASE_DIR to a folder of a larger disk")
variables = (f"RANKS={ranks} DEPTH={depth} ROWS={rows} FEW={min(rows, 4)} RECOMPUTE={recompute} "
             f"VOCAB={size.vocab_size} RATIO={size.ratio:g} SHARDS={size.shards}\n")
if file:
    write_text(Path(file), variables)
else:
    print(variables, end="")

# ---- Time and cost. The cost includes idle GPUs and the stages after pretraining
whole = cost(choice, ranks, gpu)
run = whole.run
parameters = sum(p.numel() for p in shaped(config_of(depth)).parameters())
idle = f"\n{gpus - ranks} of {gpus} GPUs stand idle: rent {ranks}" if ranks < gpus else ""
print(f"depth {depth}: {parameters / 1e6:,.0f} million parameters; {run.steps:,} steps of {run.total_batch_size:,} "
      f"tokens in {run.micro_steps} micro-step(s)\n"
      f"pretraining on {ranks} x {gpu.name}: {whole.hours:.2f} to {SLOWER * whole.hours:.2f} hours, at best "
      f"{whole.rate:,.0f} tokens per second, {whole.mfu:.0%} MFU; stop a run that shows less than half in ten steps\n"
      f"in all {whole.least:.1f} to {whole.most:.1f} hours with the other stages, downloads and evaluations\n"
      f"cost {whole.dollars(gpus, price)} for {gpus} GPU(s) at ${price:g} per GPU and hour (--price=…){idle}\n"
      f"disk {disk(depth)} GiB; downloads {disk_bytes(depth)['text'] / 1e9:.0f} GB of text, 8 of software and tasks")
