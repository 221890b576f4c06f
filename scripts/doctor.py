"""
What this machine can do: which kernels work, how much memory and disk is free, which models fit, how to train one.

    python -m scripts.doctor
    python -m scripts.doctor --depth=4 --max_seq_len=512                  # one model
    python -m scripts.doctor --depth=12 --batch_only                      # just the device_batch_size, for a script
    python -m scripts.doctor --depth=12 --batch_only --memory_gib=24      # of a GPU that is not here
    python -m scripts.doctor --depth=4 --max_seq_len=256 --time_only      # just the milliseconds of a step here

Everything it finds goes to stdout; with --batch_only or --time_only that is one number. Exit code 0 if something can be
trained here, else 1; --batch_only answers 0 rows with exit code 0.
"""
import contextlib
import os
import platform
import shutil
import sys
from typing import Literal

from configurator import configure

import torch

from nanochat.data.dataset import how_to_make
from nanochat.model.gpt_config import GPTConfig, config_from_depth
from nanochat.plan.limits import memory_limits
from nanochat.plan.memory import GIB, largest_rows, needed_bytes, parameter_counts
from nanochat.plan.probes import probe, rows_that_train, try_steps
from nanochat.runtime.devices import choose_device_type, compute_dtype
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import base_dir
from nanochat.training.checkpoint import STAGES, checkpoint_dir, list_tags
from nanochat.training.report import markdown_table

# ---- Model
depth = -1                  # [-1, 1..] layers; -1: a table of the usual ones
arch = "modern"             # pieces of the model, as base_train takes them
max_seq_len = 2048          # [1..] tokens per row
vocab_size = -1             # [-1, 1..] -1: 32,768 for a GPU, as in speedrun.sh; 8,192 for a CPU
# ---- Training
device_type: Literal["", "cuda", "mps", "cpu"] = ""  # empty: the best there is
dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of parameters and activations; auto: bfloat16 where it is fast
compile = True              # compile the blocks and the loss
activation_checkpointing = False  # of the answer to --batch_only; the table has both
zero_stage: Literal[0, 1, 2, 3] = 2  # what the ranks share
ranks = -1                  # [-1, 1..] -1: one for each GPU here
max_rows = 64               # [1..] largest device_batch_size to recommend
# ---- What to tell
batch_only = False          # print the recommended device_batch_size and nothing else; 0 where none fits
time_only = False           # print the milliseconds of a training step of 16 rows and nothing else
memory_gib = -1.0           # [-1, >0] GiB of a GPU to ask about, whatever is here: 12, 24, 80, 141
kernels = True              # run each kernel
configure(globals())

DEPTHS = (4, 8, 12, 16, 20, 24, 26, 32)

here = memory_gib < 0
if time_only and not here:
    raise UserError(f"memory_gib={memory_gib:g} is about a GPU that is not here, and time_only measures what is here; "
                    "leave out one of the two")
device = torch.device(choose_device_type(device_type) if here else "cuda")
gpus = torch.cuda.device_count() if here and device.type == "cuda" else 0
ranks = ranks if ranks > 0 else max(gpus, 1)
vocab_size = vocab_size if vocab_size > 0 else 8192 if device.type == "cpu" else 32768
model_dtype = compute_dtype(dtype, device) if here or dtype != "auto" else torch.bfloat16
dtype_name = str(model_dtype).removeprefix("torch.")
compiler = shutil.which(os.environ.get("CXX", "g++"))
compiling = compile and (device.type == "cuda" or device.type == "cpu" and compiler is not None)


def limits() -> dict[str, float]:
    """Bytes that each rank may take, by what sets the limit."""
    if not here:
        return {"the GPU asked about": memory_gib * GIB}
    if device.type == "cuda":
        return {f"GPU {i}, {torch.cuda.get_device_name(i)}": torch.cuda.mem_get_info(i)[0] for i in range(gpus)}
    if device.type == "mps":
        return {"what Metal recommends": torch.mps.recommended_max_memory()}
    return {name: left / ranks for name, left in memory_limits().items()}


def shape(depth: int) -> GPTConfig:
    return config_from_depth(depth, vocab_size, max_seq_len, arch=arch)


def recommended_rows(depth: int, checkpointing: bool, trying: bool) -> int:
    """The recommended device_batch_size, by formula or by trying; 0 where not even one row fits."""
    model = shape(depth), model_dtype, device.type, compiling
    settings = dict(checkpointing=checkpointing, stage=zero_stage, ranks=ranks)
    if trying:
        return rows_that_train(max_rows, *model, **settings)
    return largest_rows(min(limits().values()), max_rows, *model, **settings)


# ---- One number
can_try = ranks <= gpus  # the formula's margins are guesses for a GPU, and measured for a CPU
if time_only:
    model = shape(depth if depth > 0 else 4)
    with contextlib.redirect_stdout(sys.stderr):  # where compiling fails, that is said
        seconds = try_steps(model, 16, model_dtype, device, compiling, seconds=3)
    print(round(1000 * seconds))
    raise SystemExit(0)
if batch_only:
    rows = recommended_rows(depth if depth > 0 else 20, activation_checkpointing, can_try)
    print(rows)
    if not rows:
        advice = "try a smaller depth, --activation_checkpointing or --max_seq_len"
        print(f"not one row of {max_seq_len} tokens fits; {advice}", file=sys.stderr)
    raise SystemExit(0)  # 0 rows is an answer too, with which a script can go on

broken = []
if here:
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
          f"{torch.get_num_threads()} of {os.cpu_count()} cores; device {device.type}, dtype {dtype_name}")
if here and device.type == "cpu" and compiler is None:
    print("no C++ compiler: training is eager and slower; install g++")

# ---- What fits
print("\n## Memory and disk")
for name, left in limits().items():
    print(f"{name}: {left / GIB:,.1f} GiB free" + " for each rank" * (ranks > 1))
writable = True
if here:
    folder = next(path for path in (base_dir(), *base_dir().absolute().parents) if path.exists())
    free, writable = shutil.disk_usage(folder).free, os.access(folder, os.W_OK | os.X_OK)
    # Shards and their tokens; of each of four stages two checkpoints and one being written, up to 14 bytes a parameter.
    wanted = 1 if device.type == "cpu" else 200 if gpus > 1 else 130  # depth 24 and 20
    print(f"{base_dir()}: {free / GIB:,.1f} GiB free, {'writable' if writable else 'NOT writable'}; "
          f"speedrun.sh wants about {wanted} GiB here" + " -- too little is free" * (free < wanted * GIB))


def show_sizes() -> list[int]:
    """Print the table of sizes; returns the depths that fit."""
    sharing = f"ZeRO stage {zero_stage} on {ranks} ranks" if ranks > 1 else "one rank"
    print(f"\n## Largest device_batch_size by formula (powers of two up to {max_rows}) at max_seq_len={max_seq_len}, "
          f"{dtype_name}, {'compiled' if compiling else 'eager'}, vocabulary {vocab_size:,}, {sharing}")
    lines, fitting = [], []
    for layers in DEPTHS if depth == -1 else (depth,):
        model = shape(layers)
        plain, recomputing = (recommended_rows(layers, again, trying=False) for again in (False, True))
        one = needed_bytes(model, 1, model_dtype, device.type, compiling, ranks, stage=zero_stage)
        parameters = f"{sum(parameter_counts(model)):,}"
        lines.append([layers, parameters, plain or "-", recomputing or "-", f"{one / GIB:,.1f}"])
        fitting += [layers] if plain or recomputing else []
    titles = ["depth", "parameters", "rows", "rows with activation checkpointing", "GiB for one row"]
    print(markdown_table(titles, lines))
    return fitting


fitting = show_sizes()
if not here:
    raise SystemExit(0 if fitting else 1)

# ---- What works, last: it takes half a minute
if kernels:
    print("\n## Kernels, each run once and compared with its reference", flush=True)
    wanted = ["attention", "loss"] + ["compiled"] * compiling + ["collectives"] * (ranks > 1)
    for name in wanted:
        works, text = probe(device.type, dtype_name, name, ranks if name == "collectives" else 1)
        print(f"{'OK ' if works else 'NOT'} {name}: {text}", flush=True)
        if name == "compiled" and device.type != "cuda":  # there training would end with the same line
            compiling = works
            fitting = fitting if works else show_sizes()  # eager training takes more memory
        elif not works:
            broken.append(name)

# ---- What is missing, and how to train
print("\n## To train")
made = {kind: sorted(path.name for path in (base_dir() / kind).glob("[!.]*")) for kind in ("data", "tokenizer")}
made |= {f"{stage} model": list_tags(checkpoint_dir(stage, "")) for stage in STAGES}
print("here already: " + ("; ".join(f"{kind} {', '.join(made[kind])}" for kind in made if made[kind]) or "nothing yet"))
setting = ""
if device.type == "cpu" and depth == -1 and fitting:  # what is worth the time here, not what fits
    setting = "--depth=4 --max_seq_len=256 --device_batch_size=16 --total_batch_size=4096 --num_iterations=700"
elif fitting and not broken:
    for again in (False, True):
        rows = recommended_rows(max(fitting), again, can_try)
        if rows and not setting:
            setting = f"--depth={max(fitting)} --max_seq_len={max_seq_len} --device_batch_size={rows}"
            setting += " --activation_checkpointing" * again
problems = [f"{', '.join(broken)} failed"] if broken else []
problems += [] if setting else ["nothing fits into memory; free some, or try a smaller --max_seq_len"]
problems += [] if writable else [f"{base_dir()} is not writable; set NANOCHAT_BASE_DIR to another folder"]
if problems:
    print(f"NOT possible: {problems[0]}")
    raise SystemExit(1)
data = "tinyworld" if device.type == "cpu" else "climbmix"  # the first is made where it is needed
if data != "tinyworld" and data not in made["data"]:
    print(how_to_make(data, {}))
if data != "tinyworld" and data not in made["tokenizer"]:
    print(f"python -m scripts.tok_train --data={data} --vocab_size={vocab_size}")
launcher = f"torchrun --standalone --nproc_per_node={ranks} -m" if ranks > 1 else "python -m"
print(f"{launcher} scripts.base_train --data={data} {setting} --arch={arch}")
