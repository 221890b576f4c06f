"""
What this machine can do: which kernels work, how much memory and disk there is, what is made already, which models fit.

    python -m scripts.doctor
    python -m scripts.doctor --depth=4 --max_seq_len=512                  # one model
    python -m scripts.doctor --depth=12 --batch_only                      # just the device_batch_size, for a script
    python -m scripts.doctor --depth=12 --batch_only --memory_gib=24      # of a GPU that is not here
    python -m scripts.doctor --depth=4 --max_seq_len=256 --time_only      # just the milliseconds of a step here

Everything it finds goes to stdout; with --batch_only or --time_only that is one number. Exit code 0 if something can be
trained here, else 1; --batch_only answers 0 rows with exit code 0.
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
from nanochat.errors import UserError
from nanochat.files import base_dir
from nanochat.gpt import config_from_depth
from nanochat.plan.limits import Limit, free_disk, memory_limits
from nanochat.plan.memory import GIB, largest_rows, needed_bytes, parameter_counts
from nanochat.plan.probes import NEEDED, probe_all, rows_that_train, seconds_of_a_step
from nanochat.report import markdown_table
from nanochat.tokenizer import get_tokenizer

# ---- Model
depth = -1                  # [-1, 1..] layers; -1: a table of the usual ones
max_seq_len = 2048          # [1..] tokens per row
vocab_size = -1             # [-1, 1..] -1: 65,536 for a GPU, 8,192 for a CPU, as in speedrun.sh
kv_group = 1                # [1..] query heads per key head
# ---- Training
device_type: Literal["", "cuda", "mps", "cpu"] = ""  # empty: the best there is
dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of parameters and activations; auto: bfloat16 where it is fast
compile = True              # compile the blocks and the loss
activation_checkpointing = False  # of the answer to --batch_only; the table has both
zero_stage: Literal[0, 1, 2, 3] = 2  # what the ranks share
ranks = -1                  # [-1, 1..] -1: one for each GPU here
max_rows = 64               # [1..] largest device_batch_size to recommend
rows_by: Literal["auto", "trial", "formula"] = "auto"  # how rows are recommended; auto: by trial on a GPU that is here
# ---- What to tell
batch_only = False          # print the recommended device_batch_size and nothing else; 0 where none fits
time_only = False           # print the milliseconds of a training step of 16 rows and nothing else
memory_gib = -1.0           # [-1, >0] GiB of a GPU to ask about, whatever is here: 12, 24, 80, 141
kernels = True              # run each kernel
data = ""                   # data set that training would use; empty: fineweb-edu on a GPU, tinyworld on a CPU
verify = False              # read all of every checkpoint, also of the large ones
config = configure(globals())

DEPTHS = (4, 8, 12, 16, 20, 24, 26, 32)
SMALL = 2e9  # bytes of a checkpoint whose checksums are a matter of seconds

here = choose_device_type()
imagined = memory_gib > 0 or (device_type or here) == "cuda" != here  # a GPU that is not here
if memory_gib > 0 and (device_type in ("cpu", "mps") or time_only):
    other = "time_only measures what is here" if time_only else f"device_type={device_type} is no GPU"
    raise UserError(f"memory_gib={memory_gib:g} is about a GPU that is not here, but {other}; leave out one of the two")
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
can_try = not imagined and (device.type == "cpu" or device.type == "cuda" and ranks <= gpus)
if rows_by == "trial" and not can_try:
    raise UserError(f"rows_by=trial needs the device and the {ranks} rank(s) here; rows_by=formula does not")
trying = rows_by == "trial" or rows_by == "auto" and can_try and device.type == "cuda"


def size(count: float) -> str:
    """Bytes in the largest unit of which there is one."""
    power = max(power for power in range(4) if power == 0 or count >= 1024**power)
    return f"{count / 1024**power:,.1f} {('B', 'KiB', 'MiB', 'GiB')[power]}" if power else f"{count:.0f} B"


def limits() -> list[Limit]:
    """What training's memory is taken from."""
    if imagined:
        return [Limit("the GPU asked about", "device", memory_gib * GIB)]
    if device.type == "cuda":
        return [Limit(f"GPU {i}", "device", torch.cuda.mem_get_info(i)[0]) for i in range(gpus)]
    if device.type == "mps":
        return [Limit("what Metal recommends", "device", torch.mps.recommended_max_memory())]
    shared = {"resident": ranks}  # by all processes here; the others hold for each
    return [limit._replace(bytes=limit.bytes / shared.get(limit.counts, 1)) for limit in memory_limits()]


def recommended_rows(depth: int, checkpointing: bool, trying: bool) -> int:
    """The recommended device_batch_size; 0 where not even one row fits."""
    model = config_from_depth(depth, vocab_size, max_seq_len, kv_group)
    settings = dict(checkpointing=checkpointing, stage=zero_stage, ranks=ranks)
    if trying:
        return rows_that_train(max_rows, model, model_dtype, device.type, compiling, **settings)
    known = [(limit.counts, limit.bytes) for limit in limits()]
    return largest_rows(known, max_rows, model, model_dtype, device.type, compiling, **settings)


# ---- One number
if time_only:
    model = config_from_depth(depth if depth > 0 else 4, vocab_size, max_seq_len, kv_group)
    with contextlib.redirect_stdout(sys.stderr):  # where compiling fails, that is said
        seconds = seconds_of_a_step(model, 16, model_dtype, device, compiling)
    print(round(1000 * seconds))
    raise SystemExit(0)
if batch_only:
    rows = recommended_rows(depth if depth > 0 else 20, activation_checkpointing, trying)
    print(rows)
    if not rows:
        advice = "try a smaller depth, --activation_checkpointing or --max_seq_len"
        print(f"not one row of {max_seq_len} tokens fits; {advice}", file=sys.stderr)
    raise SystemExit(0)  # 0 rows is an answer too, with which a script can go on

# ---- Devices and kernels
broken: list[str] = []
if not imagined:
    print(f"## Devices\ntorch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
          f"{os.cpu_count()} cores, {torch.get_num_threads()} threads")
    for i in range(gpus):
        gpu = torch.cuda.get_device_properties(i)
        print(f"GPU {i}: {gpu.name}, {size(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}")
    than = "faster than float32" if model_dtype == torch.bfloat16 else "at least as fast as bfloat16"
    reason = "as asked for" if dtype != "auto" else f"this {device.type} multiplies it {than}"
    print(f"device {device.type}, dtype {dtype_name} ({reason})")
    missing = "none; torch.compile on a CPU needs one, without it training is eager and slower"
    print(f"C++ compiler: {compiler or missing}")
if not imagined and kernels:
    print("\n## Kernels, each run once and compared with its reference", flush=True)
    for found in probe_all(device.type, dtype_name, compiling):
        print(f"{'OK ' if found.ok else 'NOT'} {found.name}: {found.text}", flush=True)
        compiling = compiling and (found.ok or found.name != "compiled")
        broken += [found.name] if found.name in NEEDED and not found.ok else []

# ---- Memory and disk
print("\n## Memory and disk")
for limit in limits():
    of_what = f" (of {limit.counts} memory)" + f" for each of {ranks} ranks" * (ranks > 1)
    print(f"{limit.name}: {size(limit.bytes)} free{of_what * (device.type == 'cpu')}")
free, writable = free_disk(base_dir())
if not imagined:
    # Shards and their tokens; of each of four stages two checkpoints and one being written, up to 14 bytes a parameter.
    wanted = 1 * GIB if device.type == "cpu" else 120 * GIB if gpus >= 8 else 40 * GIB
    can_write = "writable" if writable else "NOT writable: set NANOCHAT_BASE_DIR to another folder"
    print(f"{base_dir()}: {size(free)} free, {can_write}; speedrun.sh wants about {size(wanted)} here"
          + " -- too little is free" * (free < wanted))

# ---- What is there
made: dict[str, list[str]] = {"data": [], "tokenizer": []} | {stage: [] for stage in STAGES}


def data_set(name: str) -> str:
    shards = load_manifest(name)["shards"]
    return f"{len(shards)} shards, {size(sum(shard['bytes'] for shard in shards))}"


if not imagined:
    print("\n## What is there")
    described = {"data": data_set, "tokenizer": lambda name: f"{get_tokenizer(name).get_vocab_size():,} tokens"}
    for kind, describe in described.items():
        for folder in sorted(path for path in (base_dir() / kind).glob("[!.]*") if path.is_dir()):
            try:
                print(f"{kind} {folder.name}: {describe(folder.name)}")
                made[kind].append(folder.name)
            except UserError as error:
                print(f"{kind} {folder.name}: {error}")
    for stage, tag in [(name, tag) for name in STAGES for tag in list_tags(checkpoint_dir(name, ""))]:
        step = list_steps(checkpoint_dir(stage, tag))[-1]
        newest = step_dir(checkpoint_dir(stage, tag), step)
        count = sum(file.stat().st_size for file in newest.iterdir())
        whole = verify or count < SMALL
        unread = None if (newest / "manifest.json").exists() else "manifest.json is missing"
        problem = problem_with(newest) if whole else unread
        state = problem or ("valid" if whole else "not read: --verify does")
        print(f"{stage} {tag}: step {step}, {size(count)}, {state}")
        made[stage] += [] if problem else [tag]
    if not any(made.values()):
        print("nothing yet")

# ---- Which models fit
sharing = f"ZeRO stage {zero_stage} on {ranks} ranks" if ranks > 1 else "one rank"
print(f"\n## Largest device_batch_size by formula (powers of two up to {max_rows}) at max_seq_len={max_seq_len}, "
      f"{dtype_name}, {'compiled' if compiling else 'eager'}, vocabulary {vocab_size:,}, {sharing}")
lines, fits = [], {}
for layers in DEPTHS if depth == -1 else (depth,):
    model = config_from_depth(layers, vocab_size, max_seq_len, kv_group)
    plain, recomputing = fits[layers] = [recommended_rows(layers, again, trying=False) for again in (False, True)]
    counts = "device" if device.type != "cpu" else "resident"
    one = needed_bytes(model, 1, model_dtype, device.type, compiling, counts, ranks, stage=zero_stage)
    lines.append([layers, f"{sum(parameter_counts(model)):,}", plain or "-", recomputing or "-", size(one)])
titles = ["depth", "parameters", "rows", "rows with activation checkpointing", "memory for one row"]
print(markdown_table(titles, lines))
if imagined:
    raise SystemExit(0 if any(map(any, fits.values())) else 1)

# ---- What can be done next
fitting = [layers for layers, found in fits.items() if any(found)]
in_time = [layers for layers in fitting if device.type != "cpu" or layers <= 4]  # a CPU has no time for more
best = max(in_time, default=min(fitting, default=0))
if best and trying and not broken:  # what fits by formula, by trial
    fits[best] = [recommended_rows(best, again, trying) for again in (False, True)]
    print(f"tried at depth {best}: {fits[best][0]} rows, {fits[best][1]} with activation checkpointing")
    best = best if any(fits[best]) else 0
cannot = f"{', '.join(broken)} failed" if broken else ""
cannot = cannot or ("" if best else "nothing fits into memory; free some, or try a smaller --max_seq_len")
cannot = cannot or ("" if writable else f"{base_dir()} is not writable; set NANOCHAT_BASE_DIR to another folder")
no_data = "" if data in made["data"] else f"no {data!r}; {how_to_make(data, {})}"
no_tokenizer = "" if data in made["tokenizer"] else f"none for {data!r}; python -m scripts.tok_train --data={data}"
no_base = "" if made["base"] else "no base model; python -m scripts.base_train"
no_mid = "" if made["mid"] else no_base or "no model after mid-training; python -m scripts.mid_train"
no_sft = "" if made["sft"] else no_mid or "no fine-tuned model; python -m scripts.chat_sft"
has_chat = any(made[stage] for stage in STAGES if stage != "base")
no_web = ", ".join(name for name in ("starlette", "uvicorn", "prometheus_client") if not importlib.util.find_spec(name))
problems = {
    "data": no_data, "tokenizer": no_tokenizer,
    "base_train": cannot or ("" if data in OFFLINE else no_data or no_tokenizer),
    "mid_train": cannot or no_base, "chat_sft": cannot or no_mid, "chat_rl": cannot or no_sft,
    "chat_eval": "" if has_chat else no_sft,
    "chat_web": f"{no_web} not installed; . ./setup.sh" if no_web else "" if has_chat else no_base,
}
print("\n## Stages")
for stage, problem in problems.items():
    print(f"{stage}: {f'NOT ready: {problem}' if problem else 'ready'}")
    if stage == "base_train" and not cannot:
        setting = f"--depth={best} --max_seq_len={max_seq_len} --device_batch_size={fits[best][0] or fits[best][1]}"
        setting += " --activation_checkpointing" * (not fits[best][0])
        if device.type == "cpu" and depth == -1:  # what is worth the time here, not what fits
            setting = "--depth=4 --max_seq_len=256 --device_batch_size=16 --total_batch_size=4096 --num_iterations=700"
        print(f"    python -m scripts.base_train --data={data} {setting}")
raise SystemExit(1 if cannot else 0)
