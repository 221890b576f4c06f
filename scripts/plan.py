"""
Two programs: what fits on this machine, by trial; what a rented one would do, by formula. Exit code 1: nothing fits.

    python -m scripts.plan                                     # here: what speedrun.sh trains, and how long it takes
    python -m scripts.plan --depth=12                          # here: how many rows fit of a model with so many layers
    python -m scripts.plan --gpus=8 --gpu=H100 --price=2.5     # rented: what speedrun.sh trains, hours and dollars
"""
from configurator import configure, refuse

# ---- A rented machine
gpus = 0                    # [0..] its GPUs; 0: this machine
gpu = ""                    # which, as in nanochat/runtime/gpus.toml: H100; perhaps with its GB: A100,40
price: float | None = None  # [0.01..] dollars per GPU and hour; None: as guessed in nanochat/runtime/gpus.toml
# ---- What is trained
depth = -1                  # [-1, 1..] layers; -1: chosen. On a CPU always its model, with this many layers
hours = 0.0                 # [0..] for all stages: the largest depth that ends, then tokens, then RL; 0: up to a day
file = ""                   # where speedrun.sh's variables, or a CPU's seconds of each step, are kept; empty: printed
configure(globals())

import sys

here = not gpu
if bool(gpus) == here:
    refuse(f"--gpus={gpus} --gpu={gpu}: expected both, such as --gpus=8 --gpu=H100, or none for this machine")
if gpus > 8:
    refuse(f"--gpus={gpus}: speedrun.sh trains on one machine of at most 8 GPUs; for several see docs/many_hosts.md")
print("trying what fits here ..." if here else f"calculating what {gpus} x {gpu} would do ...", file=sys.stderr)

import importlib.util
import json
import os
import platform
import re
import shutil
from pathlib import Path

import torch

from nanochat.model.gpt_config import config_from_depth
from nanochat.plan.choice import (
    RL_STEPS,
    SIZES,
    Choice,
    choose_size,
    config_of,
    cpu_seconds,
    described,
    disk,
)
from nanochat.plan.memory import GIB, largest_rows, needed_bytes, samples_at_once
from nanochat.plan.step_trial import rows_that_train, try_steps
from nanochat.runtime.devices import choose_device_type, compute_dtype
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import base_dir, write_text
from nanochat.runtime.flops import datasheet_gpu, gpu_here

kept = Path(file).read_text() if Path(file).is_file() else ""


def check_disk(wanted: int) -> None:
    """UserError if a run that begins here would fill the disk."""
    base_dir().mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(base_dir()).free / GIB
    if free < wanted and not kept:
        raise UserError(f"a run wants {wanted} GiB of disk, and {free:,.1f} are free in {base_dir()}; free some there, "
                        "or set NANOCHAT_BASE_DIR to a folder of a larger disk")


def rows_that_fit(most: int, depth: int, checkpointing: bool) -> int:
    config = config_of(depth)
    if here:
        return rows_that_train(most, config, checkpointing, ranks)
    memory = kind.memory * GIB
    return largest_rows(most, lambda rows: needed_bytes(config, rows, kind.dtype, ranks, checkpointing) <= memory)


if here:
    device = torch.device(choose_device_type(""))
    gpus = torch.cuda.device_count()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} of "
          f"{os.cpu_count()} cores, {gpus} GPU(s); device {device.type}, "
          f"dtype {compute_dtype('auto', device)}")
ranks = 2 ** max(gpus.bit_length() - 1, 0)  # a power of two, which divides every batch

if not gpus:
    # ---- A CPU: nothing is chosen; timed steps give the time
    check_disk(1)
    depth = max(depth, 2)
    # What runs/cpu.sh trains: its vocabulary, length of rows, architecture and rows of a step.
    config = config_from_depth(depth, 4096, 512, arch="modern,head_dim=64")
    seconds = cpu_seconds(depth, try_steps(config, 8))
    if file:
        write_text(Path(file), json.dumps(seconds))
    left = sum(seconds[name] for name in seconds if not (base_dir() / "once" / f"{name}.json").exists())
    print(f"on this machine, as busy as it is now, what is left will take about {left / 60:.0f} minutes")
elif here and depth > 0 and not file:
    # ---- A model of any depth: what runs/machine.sh trains, up to 16 rows
    rows = rows_that_train(16, config_from_depth(depth, 49152, 2048, arch="modern"), False, ranks)
    if not rows:
        raise UserError(f"depth {depth} does not fit into the memory of {ranks} such GPU(s)")
    print(f"--device_batch_size={rows}")
else:
    # ---- speedrun.sh: depth and rows. A run that continues, perhaps on another machine, keeps them
    try:
        kind = gpu_here(device) if here else datasheet_gpu(gpu)
    except UserError as error:
        refuse(error)
    if depth not in (-1, *SIZES):
        refuse(f"--depth={depth}: expected one of {', '.join(map(str, SIZES))}")
    if here and importlib.util.find_spec("datasets") is None:
        raise UserError("the tasks need the datasets package: . ./setup.sh hub")
    if kept:
        variables = dict(re.findall(r"(\w+)=(\S+)", kept))
        if variables.get("DEPTH") not in map(str, SIZES):
            raise UserError(f"{file} has no depth of {', '.join(map(str, SIZES))}: delete it to choose again, or go on "
                            "with the version that chose it")
        print(f"the run goes on as {file} says")
        choice = Choice(int(variables["DEPTH"]), int(variables["ROWS"]), variables["RECOMPUTE"] == "True",
                        float(variables["RATIO"]), int(variables.get("RL", RL_STEPS[0])))
    else:
        choice = choose_size(ranks, kind, rows_that_fit, hours, depth)
    size = SIZES[choice.depth]
    if here:
        check_disk(disk(choice))
    # Fine-tuning puts the 32 conversations of a step into about eight rows; more rows at a time would be padding.
    line = (f"RANKS={ranks} DEPTH={choice.depth} ROWS={choice.rows} FEW={max(min(choice.rows, 8, 32 // ranks), 1)} "
            f"RECOMPUTE={choice.recompute} VOCAB={size.vocab_size} RATIO={choice.ratio:g} SHARDS={choice.shards} "
            f"TALK={choice.talk} RL={choice.rl_steps} SAMPLES={samples_at_once(config_of(choice.depth), ranks, kind)}")
    if file:
        write_text(Path(file), line + "\n")
    else:
        print(line)
    print(described(choice, ranks, gpus, kind, price or kind.price))
