"""
What fits, how long it takes, what it costs: by trial here, by formula on GPUs to rent. Exit code 1: nothing does.

    python -m scripts.plan                                     # this machine: what speedrun.sh trains on it
    python -m scripts.plan --depth=12                          # the same with so many layers
    python -m scripts.plan --gpus=8 --gpu=H100 --price=2.5     # speedrun.sh on GPUs to rent
    python -m scripts.plan --gpus=64 --gpu=H100 --depth=32 --between=ndr    # one model on them: the fastest layout
"""
from configurator import configure

# ---- Machine
gpus = 0                    # [0..] GPUs to rent; 0: this machine's
gpu = ""                    # which, as in nanochat/runtime/gpus.toml: H100; perhaps with its GB: A100,40
price = 0.0                 # [0..] dollars per GPU and hour; 0: as guessed in nanochat/runtime/gpus.toml
gpus_per_node = 8           # [1..] GPUs on each host
link = "nvlink4"            # between GPUs of a host: a name in nanochat/plan/links.toml
between = "ndr"             # between hosts, for each GPU
# ---- Model
depth = -1                  # [-1, 1..] layers; -1: chosen. On a CPU always its model, with this many layers
# ---- One model on GPUs to rent, if depth is given
arch = "modern"             # architecture, as in base_train
vocab_size = 32768          # [1..] tokens
max_seq_len = 2048          # [1..] tokens per row
device_batch_size = 8       # [1..] rows per rank and micro-step
total_batch_size = -1       # [-1, 1..] tokens per optimizer step, over all ranks; -1: chosen as in base_train
target_param_data_ratio = 8.0  # [>0] training tokens per parameter of matrices and head
# ---- For speedrun.sh
hours = 0.0                 # [0..] for all stages: the largest depth that ends, with less RL; 0: one that takes a day
file = ""                   # where its variables are kept, or a CPU's seconds of each step; empty: they are printed
configure(globals())

# A layout's table: bytes that a rank holds and sends on each stage of ZeRO, seconds that a step waits, hours of
# pretraining.
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
    every_depth,
    pretraining,
)
from nanochat.plan.machines import LINKS, Cluster, Layout, bytes_on_a_rank, fastest_layout, plan_step
from nanochat.plan.memory import GIB, largest_rows, needed_bytes, samples_at_once, shaped
from nanochat.plan.step_time import step_time
from nanochat.plan.step_trial import rows_that_train, try_steps
from nanochat.runtime.devices import choose_device_type, compute_dtype
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import base_dir, write_text
from nanochat.runtime.flops import datasheet_gpu, gpu_here
from nanochat.runtime.tables import markdown_table

if bool(gpus) != bool(gpu):
    raise UserError(f"gpus={gpus} gpu={gpu}: expected both, such as --gpus=8 --gpu=H100, or none for this machine")
here = not gpu
kept = Path(file).read_text() if Path(file).is_file() else ""


def check_disk(wanted: int) -> None:
    """UserError if a run that begins here would fill the disk."""
    base_dir().mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(base_dir()).free / GIB
    if free < wanted and not kept:
        raise UserError(f"a run wants {wanted} GiB of disk, and {free:,.1f} are free in {base_dir()}; free some there, "
                        "or set NANOCHAT_BASE_DIR to a folder of a larger disk")


# ---- This machine
if here:
    device = torch.device(choose_device_type(""))
    gpus = torch.cuda.device_count()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} of "
          f"{os.cpu_count()} cores, {gpus} GPU(s); device {device.type}, "
          f"dtype {compute_dtype('auto', device)}")

# ---- A CPU: nothing is chosen; timed steps give the time
if not gpus:
    check_disk(1)
    depth = max(depth, 2)
    # What runs/cpu.sh trains: its vocabulary, length of rows, architecture and rows of a step.
    config = config_from_depth(depth, 4096, 512, arch="modern,head_dim=64")
    seconds = cpu_seconds(depth, try_steps(config, 8))
    if file:
        write_text(Path(file), json.dumps(seconds))
    left = sum(seconds[name] for name in seconds if not (base_dir() / "once" / f"{name}.json").exists())
    print(f"on this machine, as busy as it is now, what is left will take about {left / 60:.0f} minutes")
    raise SystemExit(0)

# ---- GPUs
kind = gpu_here(device) if here else datasheet_gpu(gpu)
price = price or kind.price

# ---- One model on GPUs to rent: ZeRO's stages, each over a host and over all ranks; then the fastest that fits
if depth > 0 and not here and not file:
    for name, chosen in (("link", link), ("between", between)):
        if chosen not in LINKS:
            raise UserError(f"{name}={chosen} is unknown; expected one of {', '.join(LINKS)}")
    if gpus > gpus_per_node and gpus % gpus_per_node:
        raise UserError(f"gpus={gpus} must be a multiple of gpus_per_node={gpus_per_node}, or fewer")
    config = config_from_depth(depth, vocab_size, max_seq_len, arch=arch)
    cluster = Cluster(gpus, min(gpus, gpus_per_node), LINKS[link], LINKS[between])
    run = pretraining(config, gpus, device_batch_size, target_param_data_ratio, total_batch_size)
    flops = run.total_batch_size * shaped(config).estimate_flops() / gpus  # of a GPU in a step
    step = step_time(config, device_batch_size, run.micro_steps, gpus, kind)
    rate = flops / (step.seconds - step.muon)
    print(f"{run.steps:,} steps of {run.total_batch_size:,} tokens in {run.micro_steps} micro-step(s); "
          f"passes reach {rate / kind.peak:.0%} MFU")
    layouts = [Layout(0, 1, device_batch_size, run.micro_steps)]
    for zero_stage in (1, 2, 3):
        for shards in sorted({cluster.per_host, gpus}):
            layouts.append(Layout(zero_stage, shards, device_batch_size, run.micro_steps))
    best = fastest_layout(config, cluster, rate, kind.dtype, run.total_batch_size, kind.memory * GIB)
    if best:
        layouts.append(best[0])
    table = []
    for layout in dict.fromkeys(layouts):
        plan = plan_step(config, cluster, layout, rate, kind.dtype, run.total_batch_size)
        gigabytes = bytes_on_a_rank(config, cluster, layout, kind.dtype), plan.within, plan.between
        table.append([layout.zero_stage, layout.shards, layout.pipeline_stages, layout.rows,
                      *(f"{n / 1e9:.2f}" for n in gigabytes),
                      *(f"{n:.3f}" for n in (plan.exposed, plan.bubble, plan.seconds)),
                      f"{flops / plan.seconds / kind.peak:.1%}", f"{run.steps * plan.seconds / 3600:.2f}"])
    print(f"\nA rank, over {link} within a host and {between} between hosts:\n")
    print(markdown_table(["stage", "shard_size", "pipeline", "rows", "needs, GB", "sends within a host, GB",
                          "to others, GB", "waits, s", "bubble, s", "step, s", "MFU", "hours"], table))
    if not best:
        raise UserError("nothing fits: take more GPUs or a smaller depth")
    layout, plan = best
    print(f"\nthe fastest that fits into {kind.memory:g} GiB: --zero_stage={layout.zero_stage} "
          f"--device_batch_size={layout.rows} --shard_size={layout.shards} --pipeline_stages={layout.pipeline_stages} "
          f"--activation_checkpointing={layout.checkpointing}, {plan.seconds:.3f} s a step")
    raise SystemExit(0)

# ---- speedrun.sh: depth and rows. A run that continues, perhaps on another machine, keeps them
if here and importlib.util.find_spec("datasets") is None:
    raise UserError("the tasks need the datasets package: . ./setup.sh hub")
ranks = 2 ** (gpus.bit_length() - 1)  # a power of two, which divides every batch


def rows_that_fit(most: int, depth: int, checkpointing: bool) -> int:
    config = config_of(depth)
    if here:
        return rows_that_train(most, config, checkpointing, ranks)
    memory = kind.memory * GIB
    return largest_rows(most, lambda rows: needed_bytes(config, rows, kind.dtype, ranks, checkpointing) <= memory)


if kept:
    variables = dict(re.findall(r"(\w+)=(\w+)", kept))
    if variables.get("DEPTH") not in map(str, SIZES):
        raise UserError(f"{file} has no depth of {', '.join(map(str, SIZES))}: delete it to choose again, or go on "
                        "with the version that chose it")
    print(f"the run goes on as {file} says")
    choice = Choice(int(variables["DEPTH"]), int(variables["ROWS"]), variables["RECOMPUTE"] == "True",
                    int(variables.get("RL", RL_STEPS[0])))
else:
    choice = choose_size(ranks, kind, rows_that_fit, hours, depth)
size = SIZES[choice.depth]
if here:
    check_disk(disk(choice.depth))
# Fine-tuning puts the 32 conversations of a step into about eight rows; more rows at a time would be padding.
line = (f"RANKS={ranks} DEPTH={choice.depth} ROWS={choice.rows} FEW={max(min(choice.rows, 8, 32 // ranks), 1)} "
        f"RECOMPUTE={choice.recompute} VOCAB={size.vocab_size} RATIO={size.ratio:g} SHARDS={size.shards} "
        f"RL={choice.rl_steps} SAMPLES={samples_at_once(config_of(choice.depth), ranks, kind)}")
if file:
    write_text(Path(file), line + "\n")
else:
    print(line)
print(described(choice, ranks, gpus, kind, price))
if not here:
    print("\nEvery depth that fits into memory, with all of reinforcement learning:\n"
          f"{every_depth(ranks, gpus, kind, price, rows_that_fit)}")
