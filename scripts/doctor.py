"""
What this machine can do: how much memory and disk is free, which models fit, and the command that trains one.

    python -m scripts.doctor
    python -m scripts.doctor --depth=4 --max_seq_len=512                  # one model
    python -m scripts.doctor --depth=12 --batch_only                      # just the device_batch_size, for a script
    python -m scripts.doctor --depth=12 --batch_only --memory_gib=24      # of a GPU that is not here

Results go to stdout; with --batch_only that is one number. Exit code 0 if something can be trained here, else 1 and one
line that says why. --batch_only exits with 0 even for 0 rows.
"""
from typing import Literal

from configurator import configure

# ---- Model
depth = -1                  # [-1, 1..] layers; -1: a table of the usual depths
arch = "modern"             # architecture, as in base_train
max_seq_len = 2048          # [1..] tokens per row
vocab_size = -1             # [-1, 1..] tokens; -1: 32,768 for a GPU, as in speedrun.sh; 8,192 for a CPU
# ---- Training
device_type: Literal["", "cuda", "mps", "cpu"] = ""  # empty: the best available
dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # parameters and activations; auto: bfloat16 where it is fast
activation_checkpointing = False  # for --batch_only; the table shows both
ranks = -1                  # [-1, 1..] -1: one for each GPU here; they share states as on ZeRO's stage 2
max_rows = 64               # [1..] largest device_batch_size to recommend
# ---- What to print
batch_only = False          # print only the recommended device_batch_size; 0 if none fits
memory_gib = -1.0           # [-1, >0] GiB of a GPU that is not here: 12, 24, 80, 141
configure(globals())

import os
import platform
import shutil
import sys

import torch

from nanochat.model.gpt_config import GPTConfig, config_from_depth
from nanochat.plan.choice import SIZES, disk
from nanochat.plan.limits import memory_limits
from nanochat.plan.memory import GIB, largest_rows
from nanochat.plan.step_trial import rows_that_train
from nanochat.runtime.compiling import has_compiler
from nanochat.runtime.devices import choose_device_type, compute_dtype
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import base_dir
from nanochat.runtime.tables import markdown_table

DEPTHS = (4, 8, 12, 16, 20, 24, 26, 32)

here = memory_gib < 0
device = torch.device(choose_device_type(device_type) if here else "cuda")
gpus = torch.cuda.device_count() if here and device.type == "cuda" else 0
if ranks < 0:
    ranks = max(gpus, 1)
if vocab_size < 0:
    vocab_size = 8192 if device.type == "cpu" else 32768
model_dtype = torch.bfloat16
if here or dtype != "auto":
    model_dtype = compute_dtype(dtype, device)
compiles = has_compiler(device.type)


def limits() -> dict[str, float]:
    """Bytes that each rank may use, by the name of the limit."""
    if not here:
        return {"the GPU asked about": memory_gib * GIB}
    if device.type == "cuda":
        return {f"GPU {i}, {torch.cuda.get_device_name(i)}": torch.cuda.mem_get_info(i)[0] for i in range(gpus)}
    if device.type == "mps":
        return {"Metal": torch.mps.recommended_max_memory()}
    return {name: left / ranks for name, left in memory_limits().items()}


def model_settings(depth: int) -> tuple[GPTConfig, torch.dtype, str, bool]:
    return config_from_depth(depth, vocab_size, max_seq_len, arch=arch, bos=0), model_dtype, device.type, compiles


def rows_by_formula(depth: int, checkpointing: bool) -> int:
    """The largest device_batch_size that fits into memory; 0 if not even one row fits."""
    return largest_rows(min(limits().values()), max_rows, *model_settings(depth), ranks, checkpointing=checkpointing)


def recommended_rows(depth: int, checkpointing: bool) -> int:
    if 0 < ranks <= gpus:  # by trial: the formula's margins are guesses for a GPU, and measured for a CPU
        return rows_that_train(max_rows, *model_settings(depth), checkpointing=checkpointing, ranks=ranks)
    return rows_by_formula(depth, checkpointing)


# ---- One number
if batch_only:
    rows = recommended_rows(depth if depth > 0 else 20, activation_checkpointing)
    print(rows)
    if not rows:
        advice = "try a smaller depth, --activation_checkpointing or --max_seq_len"
        print(f"not one row of {max_seq_len} tokens fits; {advice}", file=sys.stderr)
    raise SystemExit(0)  # 0 rows is an answer, too: a script can go on with it

# ---- This machine
if here:
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
          f"{torch.get_num_threads()} of {os.cpu_count()} cores; device {device.type}, dtype {model_dtype}")
    if not compiles:
        print("no C++ compiler: training is eager and slower; install g++")
print("\n## Memory and disk")
for name, left in limits().items():
    print(f"{name}: {left / GIB:,.1f} GiB free for each of {ranks} rank(s)")
if here:
    base_dir().mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(base_dir()).free / GIB
    taken = sum(path.stat().st_size for path in base_dir().rglob("*") if path.is_file()) / GIB
    wanted = 1 if device.type == "cpu" else disk(min(SIZES))
    print(f"{base_dir()}: {free:,.1f} GiB free, {taken:,.1f} taken; speedrun.sh wants 1 GiB on a CPU, on "
          f"GPUs {disk(min(SIZES))} for depth {min(SIZES)} up to {disk(max(SIZES))} for depth {max(SIZES)}")
    if free + taken < wanted:
        raise UserError(f"{base_dir()} has {free:,.1f} GiB free, and training takes {wanted}; free some there, or set "
                        "NANOCHAT_BASE_DIR to a folder of a larger disk")

# ---- What fits
print(f"\n## Largest device_batch_size by formula (powers of two up to {max_rows}) at max_seq_len={max_seq_len}, "
      f"{model_dtype}, vocabulary {vocab_size:,}, {ranks} rank(s)")
table = []
for layers in DEPTHS if depth == -1 else (depth,):
    rows = [rows_by_formula(layers, checkpointing) for checkpointing in (False, True)]
    if any(rows):
        table.append([layers, *rows])
if not table:
    raise UserError("nothing fits into memory; free some, or try a smaller --max_seq_len")
print(markdown_table(["depth", "rows", "rows with activation checkpointing"], table))
if not here:
    raise SystemExit(0)

# ---- How to train
print("\n## To train")
if depth == -1:
    print("bash speedrun.sh")
    raise SystemExit(0)
options = f"--depth={depth} --max_seq_len={max_seq_len} --arch={arch}"
rows = recommended_rows(depth, checkpointing=False)
if not rows:
    rows = recommended_rows(depth, checkpointing=True)
    options += " --activation_checkpointing"
launcher = f"torchrun --standalone --nproc_per_node={ranks} -m" if ranks > 1 else "python -m"
print(f"{launcher} scripts.base_train {options} --device_batch_size={rows}")
