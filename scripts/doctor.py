"""
What this machine can do: which kernels work, how much memory and disk there is, what is made already, which models fit.

    python -m scripts.doctor
    python -m scripts.doctor --depth=4 --max_seq_len=512                  # one model
    python -m scripts.doctor --depth=12 --batch_only                      # just the device_batch_size, for a script
    python -m scripts.doctor --depth=12 --batch_only --memory_gib=24      # of a GPU that is not here
    python -m scripts.doctor --depth=4 --max_seq_len=256 --time_only      # just the milliseconds of a training step here

Everything it finds goes to stdout; with --batch_only or --time_only that is one number. Exit code 0 if something can be trained
here, else 1; --batch_only answers 0 rows with exit code 0.
"""
import contextlib
import importlib.util
import os
import platform
import shutil
import sys
from typing import Literal

from configurator import configure

import torch

from nanochat.checkpoint import STAGES, checkpoint_dir, list_steps, list_tags, problem_with, step_dir
from nanochat.dataset import OFFLINE, how_to_make, load_manifest
from nanochat.distributed import choose_device_type, compute_dtype
from nanochat.errors import UserError, require_positive
from nanochat.files import base_dir
from nanochat.gpt import config_from_depth
from nanochat.plan.limits import Limit, free_disk, memory_limits
from nanochat.plan.memory import GIB, largest_rows, needed_bytes, parameter_counts
from nanochat.plan.probes import probe_all, seconds_of_a_step
from nanochat.tokenizer import get_tokenizer

# ---- Model
depth = -1                  # layers; -1: a table of the usual ones
max_seq_len = 2048          # tokens per row
vocab_size = -1             # -1: 65,536 for a GPU, 8,192 for a CPU, as in speedrun.sh
kv_group = 1                # query heads per key head
# ---- Training
device_type: Literal["", "cuda", "mps", "cpu"] = ""  # empty: the best there is
dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of parameters and activations; auto: bfloat16 where it is fast
compile = True              # compile the blocks and the loss
activation_checkpointing = False  # of the answer to --batch_only; the table has both
zero_stage: Literal[0, 1, 2, 3] = 2  # what the ranks share
ranks = -1                  # -1: one for each GPU here
max_rows = 64               # largest device_batch_size to recommend
# ---- What to tell
batch_only = False          # print the recommended device_batch_size and nothing else; 0 where none fits
time_only = False           # print the milliseconds of a training step of 16 rows and nothing else
memory_gib = -1.0           # GiB of a GPU to ask about, whatever is here: 12, 24, 80, 141
kernels = True              # run each kernel
data = ""                   # data set that training would use; empty: fineweb-edu on a GPU, tinyworld on a CPU
verify = False              # read all of every checkpoint, also of the large ones
config = configure(globals())

DEPTHS = (4, 8, 12, 16, 20, 24, 26, 32)
SMALL = 2e9  # bytes of a checkpoint whose checksums are a matter of seconds

require_positive(config, "max_rows", "max_seq_len", "kv_group")
for name, value in dict(depth=depth, vocab_size=vocab_size, ranks=ranks, memory_gib=memory_gib).items():
    if value != -1 and value <= 0:
        raise UserError(f"{name}={value} must be above 0, or -1")
if memory_gib > 0 and device_type in ("cpu", "mps"):
    raise UserError(f"memory_gib={memory_gib:g} is about a GPU; leave out device_type={device_type}")
here = choose_device_type()
imagined = memory_gib > 0 or (device_type or here) == "cuda" != here  # a GPU that is not here
if imagined and memory_gib < 0:
    raise UserError("device_type=cuda, but this torch sees no GPU; --memory_gib=24 asks about one of 24 GiB")
device = torch.device("cuda" if imagined else device_type or here)
gpus = torch.cuda.device_count() if here == "cuda" else 0
ranks = max(ranks if ranks > 0 else gpus if device.type == "cuda" else 1, 1)
vocab_size = vocab_size if vocab_size > 0 else 8192 if device.type == "cpu" else 65536
data = data or ("fineweb-edu" if device.type == "cuda" else "tinyworld")
model_dtype = torch.bfloat16 if imagined and dtype == "auto" else compute_dtype(dtype, device)
dtype_name = str(model_dtype).removeprefix("torch.")
compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), "")
compiling = compile and device.type != "mps" and (device.type != "cpu" or bool(shutil.which(compiler)))


def gib(count: float) -> str:
    return f"{count / GIB:,.1f} GiB"


def device_limits() -> list[Limit]:
    """What training's memory is taken from."""
    if imagined:
        return [Limit("the GPU asked about", "device", memory_gib * GIB)]
    if device.type == "cuda":
        return [Limit(f"GPU {i}", "device", torch.cuda.mem_get_info(i)[0]) for i in range(gpus)]
    if device.type == "mps":
        return [Limit("what Metal recommends", "device", torch.mps.recommended_max_memory())]
    return [Limit(name, counts, count / (ranks if counts == "resident" else 1)) for name, counts, count in memory_limits()]


def rows_of(depth: int, checkpointing: bool) -> int:
    """The recommended device_batch_size; 0 where not even one row fits."""
    model = config_from_depth(depth, vocab_size, max_seq_len, kv_group)
    return largest_rows(
        [(limit.counts, limit.bytes) for limit in limits], max_rows, model, model_dtype, device.type, compiling,
        ranks=ranks, stage=zero_stage, checkpointing=checkpointing,
    )


if time_only:
    if imagined:
        raise UserError("time_only measures what is here; leave out memory_gib")
    model = config_from_depth(depth if depth > 0 else 4, vocab_size, max_seq_len, kv_group)
    with contextlib.redirect_stdout(sys.stderr):  # where compiling fails, that is said
        seconds = seconds_of_a_step(model, rows=16, dtype=model_dtype, device=device, compiled=compiling)
    print(round(1000 * seconds))
    raise SystemExit(0)
limits = device_limits()
if batch_only:
    rows = rows_of(depth if depth > 0 else 20, activation_checkpointing)
    print(rows)
    if not rows:
        print(f"not one row of {max_seq_len} tokens fits; try a smaller depth, --activation_checkpointing or --max_seq_len", file=sys.stderr)
    raise SystemExit(0)  # 0 rows is an answer too, with which a script can go on

# ---- Devices
working = []
if not imagined:
    print("## Devices")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
          f"{os.cpu_count()} cores, {torch.get_num_threads()} threads")
    for i in range(gpus):
        gpu = torch.cuda.get_device_properties(i)
        free_memory = gib(torch.cuda.mem_get_info(i)[0])
        print(f"GPU {i}: {gpu.name}, {gib(gpu.total_memory)}, {free_memory} free, compute capability {gpu.major}.{gpu.minor}")
    than = "faster than float32" if model_dtype == torch.bfloat16 else "at least as fast as bfloat16"
    reason = "as asked for" if dtype != "auto" else f"this {device.type} multiplies it {than}"
    print(f"device {device.type}, dtype {dtype_name} ({reason})")
    print(f"C++ compiler: {compiler or 'none; torch.compile on a CPU needs one, without it training is eager and slower'}")

# ---- Kernels
if not imagined and kernels:
    print("\n## Kernels, each run once and compared with its reference", flush=True)
    for found in probe_all(device.type, dtype_name, compiling):
        working.append(found)
        print(f"{'OK ' if found.ok else 'NOT'} {found.name}: {found.text}", flush=True)
    if any(found.name == "compiled block" and not found.ok for found in working):
        compiling = False
    broken = [found.name for found in working if not found.ok and found.name.startswith(("matmul", "rms_norm", "attention", "loss"))]
else:
    broken = []

# ---- Memory and disk
print("\n## Memory and disk" if not imagined else "")
for limit in limits:
    of_what = f" (of {limit.counts} memory)" + f" for each of {ranks} ranks" * (ranks > 1) if device.type == "cpu" else ""
    print(f"{limit.name}: {gib(limit.bytes)}{of_what}")
free, writable = free_disk(base_dir())
# Shards and their tokens; of each of four stages two checkpoints, and one being written, at up to 14 bytes a parameter.
wanted = 1 * GIB if device.type == "cpu" else 120 * GIB if gpus >= 8 else 40 * GIB
if not imagined:
    print(f"{base_dir()}: {gib(free)} free, {'writable' if writable else 'NOT writable: set NANOCHAT_BASE_DIR to another folder'}; "
          f"speedrun.sh wants about {gib(wanted)} here" + " -- too little is free" * (free < wanted))

# ---- What is there
made: dict[str, list[str]] = {"data": [], "tokenizer": []} | {stage: [] for stage in STAGES}
if not imagined:
    print("\n## What is there")
    for folder in sorted(path for path in (base_dir() / "data").glob("[!.]*") if path.is_dir()):
        try:
            manifest = load_manifest(folder.name)
            made["data"].append(folder.name)
            print(f"data {folder.name}: {len(manifest['shards'])} shards, {gib(sum(shard['bytes'] for shard in manifest['shards']))}")
        except UserError as error:
            print(f"data {folder.name}: {error}")
    for folder in sorted((base_dir() / "tokenizer").glob("[!.]*")):
        try:
            print(f"tokenizer {folder.name}: {get_tokenizer(folder.name).get_vocab_size():,} tokens")
            made["tokenizer"].append(folder.name)
        except UserError as error:
            print(f"tokenizer {folder.name}: {error}")
    for stage in STAGES:
        for tag in list_tags(checkpoint_dir(stage, "")):
            step = list_steps(checkpoint_dir(stage, tag))[-1]
            newest = step_dir(checkpoint_dir(stage, tag), step)
            size = sum(file.stat().st_size for file in newest.iterdir())
            whole = verify or size < SMALL
            problem = problem_with(newest) if whole else None if (newest / "manifest.json").exists() else "manifest.json is missing"
            print(f"{stage} {tag}: step {step}, {gib(size)}, {problem or ('valid' if whole else 'not read: --verify does')}")
            made[stage] += [] if problem else [tag]
    if not any(made.values()):
        print("nothing yet")

# ---- Which models fit
print(f"\n## Largest device_batch_size (powers of two up to {max_rows}) at max_seq_len={max_seq_len}, {dtype_name}, "
      f"{'compiled' if compiling else 'eager'}, vocabulary {vocab_size:,}, "
      f"{f'ZeRO stage {zero_stage} on {ranks} ranks' if ranks > 1 else 'one rank'}")
table, fits = [("depth", "parameters", "rows", "rows with activation checkpointing", "memory for one row")], {}
for candidate in DEPTHS if depth == -1 else (depth,):
    model = config_from_depth(candidate, vocab_size, max_seq_len, kv_group)
    fits[candidate] = plain, recomputing = rows_of(candidate, False), rows_of(candidate, True)
    one = needed_bytes(model, 1, model_dtype, device.type, compiling, "device" if device.type != "cpu" else "resident", ranks, stage=zero_stage)
    table.append((str(candidate), f"{sum(parameter_counts(model)):,}", str(plain or "-"), str(recomputing or "-"), gib(one)))
widths = [max(map(len, column)) for column in zip(*table)]
for line in table:
    print("  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths)))
can_train = any(map(any, fits.values())) and not broken
if imagined:
    raise SystemExit(0 if can_train else 1)

# ---- Verdicts
print("\n## Stages")
fitting = [candidate for candidate, found in fits.items() if any(found)]
in_time = [candidate for candidate in fitting if device.type != "cpu" or candidate <= 4]  # a CPU has no time for more
best = max(in_time, default=min(fitting, default=0))
chat = [stage for stage in STAGES if stage != "base" and made[stage]]
web = [package for package in ("fastapi", "uvicorn", "prometheus_client") if importlib.util.find_spec(package) is None]
model_setting = f" --depth={best} --max_seq_len={max_seq_len} --device_batch_size={fits[best][0] or fits[best][1]}" if best else ""
model_setting += " --activation_checkpointing" if best and not fits[best][0] else ""
no_base, no_chat = "python -m scripts.base_train", "python -m scripts.mid_train && python -m scripts.chat_sft"


def verdict(stage: str, *problems: str) -> None:
    problem = next(filter(None, problems), "")
    print(f"{stage}: {f'NOT ready: {problem}' if problem else 'ready'}")


itself = data in OFFLINE
cannot = f"{', '.join(broken)} failed" if broken else "nothing fits into memory; free some, or try a smaller --max_seq_len" if not best else ""
read_only = "" if writable else f"{base_dir()} is not writable; set NANOCHAT_BASE_DIR to another folder"
verdict("data", "" if data in made["data"] else f"no {data!r}; {how_to_make(data, {})}")
verdict("tokenizer", "" if data in made["tokenizer"] else f"none for {data!r}; python -m scripts.tok_train --data={data}")
missing = "" if itself else f"no data {data!r}" if data not in made["data"] else f"no tokenizer for {data!r}" if data not in made["tokenizer"] else ""
verdict("base_train", cannot, read_only, missing)
if not (cannot or read_only):
    if device.type == "cpu" and depth == -1:  # what is worth the time here, not what fits
        model_setting = " --depth=4 --max_seq_len=256 --device_batch_size=16 --total_batch_size=4096 --num_iterations=700"
    print(f"    python -m scripts.base_train --data={data}{model_setting}")
verdict("mid_train", cannot, read_only, "" if made["base"] else f"no base model; {no_base}")
no_mid = f"no model after mid-training; {'python -m scripts.mid_train' if made['base'] else no_base}"
verdict("chat_sft", cannot, read_only, "" if made["mid"] else no_mid)
verdict("chat_rl", cannot, read_only, "" if made["sft"] else f"no fine-tuned model; {'python -m scripts.chat_sft' if made['mid'] else no_chat}")
verdict("chat_eval", "" if chat else f"no chat model; {no_chat}")
verdict("chat_web", f"{', '.join(web)} not installed; . ./setup.sh" if web else "", "" if chat or made["base"] else f"no model; {no_base}")
raise SystemExit(0 if can_train and writable else 1)
