"""
What this machine can do: how much memory and disk is free, which models fit, and the command that trains one.

    python -m scripts.doctor
    python -m scripts.doctor --depth=4 --max_seq_len=512                  # one model
    python -m scripts.doctor --depth=12 --batch_only                      # just the device_batch_size, for a script
    python -m scripts.doctor --depth=12 --batch_only --memory_gib=24      # of a GPU that is not here
    python -m scripts.doctor --choose=FILE                                # what speedrun.sh trains here
    python -m scripts.doctor --choose=FILE --plan=8,H100,80               # on GPUs that are not here

Results go to stdout; with --batch_only that is one number. Exit code 0 if something can be trained here, else 1 and one
line why; --batch_only answers 0 rows with exit code 0.
"""
from typing import Literal

from configurator import configure

# ---- Model
depth = -1                  # [-1, 1..] layers; -1: a table of the usual ones
arch = "modern"             # pieces of the model, as base_train takes them
max_seq_len = 2048          # [1..] tokens per row
vocab_size = -1             # [-1, 1..] -1: 32,768 for a GPU, as in speedrun.sh; 8,192 for a CPU
# ---- Training
device_type: Literal["", "cuda", "mps", "cpu"] = ""  # empty: the best there is
dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of parameters and activations; auto: bfloat16 where it is fast
activation_checkpointing = False  # of the answer to --batch_only; the table has both
ranks = -1                  # [-1, 1..] -1: one for each GPU here; they share states as on ZeRO's stage 2
max_rows = 64               # [1..] largest device_batch_size to recommend
# ---- What to tell
batch_only = False          # print the recommended device_batch_size and nothing else; 0 where none fits
memory_gib = -1.0           # [-1, >0] GiB of a GPU that is not here: 12, 24, 80, 141
choose = ""                 # file for the variables of speedrun.sh: RANKS, DEPTH, …; a model that it has stays
plan = ""                   # 8,H100,80: GPUs that --choose takes instead of those that are here
price = 2.5                 # [0..] dollars per GPU and hour
full = False                # --choose takes depth 4 on any CPU, however long that takes
configure(globals())

import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path

import torch

from nanochat.model.gpt_config import GPTConfig, config_from_depth
from nanochat.plan.choice import (
    DISK,
    MFU,
    SHARDS,
    VOCAB_SIZE,
    choose_for_gpus,
    describe_cost,
    parse_gpus,
    pretraining,
)
from nanochat.plan.limits import memory_limits
from nanochat.plan.memory import GIB, largest_rows
from nanochat.plan.step_trial import rows_that_train, try_steps
from nanochat.runtime.devices import choose_device_type, compute_dtype
from nanochat.runtime.distributed import unknown_host
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import base_dir, write_text
from nanochat.runtime.flops import datasheet_peak, peak_flops
from nanochat.runtime.tables import markdown_table

DEPTHS = (4, 8, 12, 16, 20, 24, 26, 32)

gpu = ""
if plan:
    planned, gpu, memory_gib = parse_gpus(plan)
here = memory_gib < 0
device = torch.device(choose_device_type(device_type) if here else "cuda")
gpus = torch.cuda.device_count() if here and device.type == "cuda" else 0
if plan:
    gpus = planned
if choose and gpus:
    ranks = 2 ** (gpus.bit_length() - 1)    # a power of two, which divides every batch
    vocab_size = VOCAB_SIZE
elif ranks < 0:
    ranks = max(gpus, 1)
if vocab_size < 0:
    vocab_size = 8192 if device.type == "cpu" else 32768
model_dtype = torch.bfloat16
if here or dtype != "auto":
    model_dtype = compute_dtype(dtype, device)
has_compiler = device.type == "cuda" or device.type == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is not None


def limits() -> dict[str, float]:
    """Bytes that each rank may take, by the name of the limit."""
    if not here:
        return {"the GPU asked about": memory_gib * GIB}
    if device.type == "cuda":
        return {f"GPU {i}, {torch.cuda.get_device_name(i)}": torch.cuda.mem_get_info(i)[0] for i in range(gpus)}
    if device.type == "mps":
        return {"Metal": torch.mps.recommended_max_memory()}
    return {name: left / ranks for name, left in memory_limits().items()}


def model_settings(depth: int) -> tuple[GPTConfig, torch.dtype, str, bool]:
    return config_from_depth(depth, vocab_size, max_seq_len, arch=arch), model_dtype, device.type, has_compiler


def rows_by_formula(depth: int, checkpointing: bool, most: int = max_rows) -> int:
    """The largest device_batch_size that the memory holds; 0 where not even one row fits."""
    return largest_rows(min(limits().values()), most, *model_settings(depth), ranks, checkpointing=checkpointing)


def recommended_rows(depth: int, checkpointing: bool, most: int = max_rows) -> int:
    if here and 0 < ranks <= gpus:  # by trying: the formula's margins are guesses for a GPU, and measured for a CPU
        return rows_that_train(most, *model_settings(depth), checkpointing=checkpointing, ranks=ranks)
    return rows_by_formula(depth, checkpointing, most)


def disk_room() -> tuple[float, float]:
    """GiB that are free where the base folder is, and that it has taken already."""
    base_dir().mkdir(parents=True, exist_ok=True)
    taken = sum(path.stat().st_size for path in base_dir().rglob("*") if path.is_file())
    return shutil.disk_usage(base_dir()).free / GIB, taken / GIB


def refuse_small_disk(wanted: float, what: str) -> None:
    free, taken = disk_room()
    if free + taken < wanted:
        raise UserError(f"{base_dir()} has {free:,.1f} GiB free, and {what} takes {wanted}; free some there, or set "
                        "NANOCHAT_BASE_DIR to a folder of a larger disk")


# ---- What speedrun.sh sets. A run that goes on, perhaps on another machine, must stay the same model.

def choose_gpu_run(kept: dict[str, str]) -> str:
    """Prints what a run on these GPUs takes; returns the variables of its commands."""
    if here and importlib.util.find_spec("datasets") is None:
        raise UserError("the tasks need the datasets package: . ./setup.sh hub")
    rate = MFU * (datasheet_peak(gpu) if gpu else peak_flops(device, torch.bfloat16))
    if kept:
        depth, rows, twice = int(kept["DEPTH"]), int(kept["ROWS"]), kept["RECOMPUTE"] == "True"
        run = pretraining(model_settings(depth)[0], ranks, rows, rate)
    else:
        depth, rows, twice, run = choose_for_gpus(
            ranks, rate, lambda depth, most, checkpointing: recommended_rows(depth, checkpointing, most))
        if here:
            refuse_small_disk(DISK[depth], f"depth {depth}")
    print(f"depth {depth}: {run.flops_per_token:.3g} FLOPs per token; {run.steps:,} steps of {run.total_batch_size:,} "
          f"tokens in {run.micro_steps} micro-step(s)")
    print(f"{ranks} x {gpu or 'GPU'} at {MFU:.0%} MFU: pretraining takes {run.hours:.2f} hours if all communication "
          "hides; mid-training and fine-tuning on half a billion tokens, downloads, compiling, evaluations and "
          "reinforcement learning take another hour or two on eight H100, longer on fewer or slower ones")
    print(describe_cost(depth, ranks, gpus, run.hours, price))
    return (f"RANKS={ranks} DEPTH={depth} ROWS={rows} FEW={min(rows, 4)} RECOMPUTE={twice} SHARDS={SHARDS[depth]}\n")


def choose_cpu_run(kept: dict[str, str]) -> str:
    """
    Depth 4, or 2 where that takes more than half an hour. All stages take about as long as 3,600 steps, and three
    minutes more. What others compute meanwhile, such as an installation that ends soon, decides nothing.
    """
    if kept and not full:
        return f"RANKS=0 DEPTH={kept['DEPTH']}\n"
    for depth, words in ((4, "on this machine this will take"), (2, "a smaller model instead, in")):
        if full:
            break
        config = config_from_depth(depth, 4096, 256, arch="modern")
        alone, busy = (3 + ms * 3600 // 60000 for ms in map(round, try_steps(config, 16, *model_settings(depth)[1:])))
        beside = ""
        if busy >= alone * 5 // 4:
            beside = f" once other processes have ended (beside them, as now, {busy})"
        print(f"{words} about {alone} minutes{beside}")
        if alone <= 30:
            break
    else:
        print("bash speedrun.sh --full trains the larger one")
    return f"RANKS=0 DEPTH={depth}\n"


if choose:
    file = Path(choose)
    kept = dict(word.split("=") for word in file.read_text().split()) if file.exists() else {}
    write_text(file, choose_gpu_run(kept) if gpus else choose_cpu_run(kept))
    raise SystemExit(0)

# ---- One number
if batch_only:
    rows = recommended_rows(depth if depth > 0 else 20, activation_checkpointing)
    print(rows)
    if not rows:
        advice = "try a smaller depth, --activation_checkpointing or --max_seq_len"
        print(f"not one row of {max_seq_len} tokens fits; {advice}", file=sys.stderr)
    raise SystemExit(0)  # 0 rows is an answer too, with which a script can go on

# ---- What is here
if here:
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
          f"{torch.get_num_threads()} of {os.cpu_count()} cores; device {device.type}, dtype {model_dtype}")
    if not has_compiler:
        print("no C++ compiler: training is eager and slower; install g++")
    if problem := unknown_host():
        print(problem)
print("\n## Memory and disk")
for name, left in limits().items():
    print(f"{name}: {left / GIB:,.1f} GiB free for each of {ranks} rank(s)")
if here:
    free, taken = disk_room()
    print(f"{base_dir()}: {free:,.1f} GiB free, {taken:,.1f} taken; speedrun.sh wants 1 GiB on a CPU, on "
          "GPUs 45 for depth 12 up to 200 for depth 24")
    refuse_small_disk(1 if device.type == "cpu" else 45, "training")

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
