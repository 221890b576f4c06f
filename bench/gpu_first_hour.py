"""
The first minutes on a GPU, in the order of what is most worth knowing; ten at most. Takes one GPU, and writes one
Markdown file for an issue, gpu_first_hour.md in the base folder.

    python -m bench.gpu_first_hour                               # all parts; each is a process of its own
    python -m bench.gpu_first_hour --rehearse                    # the same parts in small, on a CPU
    python -m bench.gpu_first_hour --part=steps --depth=20       # ms, tok/s, MFU and peak memory of compiled steps
    python -m bench.gpu_first_hour --part=profile --depth=20     # its longest kernels; how long the device is idle
"""
from typing import Literal

from configurator import configure

part: Literal["all", "steps", "profile"] = "all"
rehearse = False            # all parts in small, on a CPU
depth = 20                  # [1..] layers
arch = "modern"             # pieces of the model
vocab_size = 65536          # [300..] tokens
max_seq_len = 2048          # [64..] tokens per row
device_batch_size = 16      # [1..] rows
micro_steps = 2             # [1..] in an optimizer step
steps = 10                  # [3..] optimizer steps measured, after one that compiles
fp8 = False                 # the blocks' products in 8 bits
device_type: Literal["", "cuda", "cpu"] = ""  # empty: the best there is
configure(globals())

import statistics
import subprocess
import sys
import time
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from bench.harness import DOCS
from nanochat.model.fp8 import use_fp8
from nanochat.model.gpt_config import config_from_depth
from nanochat.plan.step_trial import set_up_training, train_step
from nanochat.runtime.compiling import set_compile
from nanochat.runtime.devices import synchronize
from nanochat.runtime.distributed import compute_cleanup, set_up
from nanochat.runtime.files import base_dir, write_text
from nanochat.runtime.flops import peak_flops
from nanochat.runtime.tables import markdown_table
from nanochat.training.metrics import peak_memory


def run_all() -> None:
    hour = ["-m", "bench.gpu_first_hour"]
    doctor, engine = ["-m", "scripts.doctor", "--depth=20"], ["-m", "bench.engine", "--depth=12"]
    large, slow = ["--depth=20"], 1
    if rehearse:
        cpu = ["--device_type=cpu", "--vocab_size=512"]
        large = [*cpu, "--depth=2", "--max_seq_len=128", "--device_batch_size=2", "--steps=3"]
        doctor, slow = ["-m", "scripts.doctor", *cpu, "--depth=2", "--max_seq_len=64"], 3
        engine = ["-m", "bench.engine", "--vocab_size=512", "--new_tokens=8", "--repeats=1", "--batch_size=2"]
    parts = [
        ("What fits into memory", 120, doctor),
        ("Compiled steps, depth 20", 90, [*hour, "--part=steps", *large]),
        ("Where a step's time goes, depth 20", 60, [*hour, "--part=profile", *large]),
        ("Decoding", 60, engine),
        ("fp8, depth 20", 70, [*hour, "--part=steps", "--fp8=True", *large]),
        ("Model beside its references", 70, ["-m", "pytest", "tests/test_gpt.py", "tests/test_optimizers.py"]),
    ]
    page, path = "# The first minutes on a GPU\n", base_dir() / "gpu_first_hour.md"
    for title, limit, command in parts:
        began = time.perf_counter()
        try:
            done = subprocess.run([sys.executable, *command], cwd=DOCS.parent, text=True, timeout=limit * slow,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            output, end = done.stdout, f"exit code {done.returncode}"
        except subprocess.TimeoutExpired as expired:
            output, end = (expired.output or b"").decode(), "ended, too slow"
        tail = "\n".join(output.splitlines()[-60:])
        seconds = time.perf_counter() - began
        section = f"\n## {title}\n\n`python {' '.join(command)}`: {seconds:.0f} s, {end}\n\n```\n{tail}\n```\n"
        print(section, flush=True)
        page += section
        write_text(path, page)
    print(f"{path} is written")


def set_up_step() -> tuple:
    """What `train_step` takes, after the step that compiles."""
    model, sharding, optimizers = set_up_training(config, dtype, device)
    if fp8:
        use_fp8(model, device, device_batch_size * max_seq_len)
    if compiling:
        model.compile_blocks()
    tokens = torch.randint(vocab_size, (device_batch_size, max_seq_len + 1), device=device)
    began = time.perf_counter()
    train_step(model, sharding, optimizers, tokens, micro_steps)
    synchronize(device)
    print(f"first step, which compiles: {time.perf_counter() - began:.1f} s")
    return model, sharding, optimizers, tokens, micro_steps


def measure_steps() -> None:
    arguments, seconds = set_up_step(), []
    for _ in range(steps):
        began = time.perf_counter()
        train_step(*arguments)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    step, tokens = statistics.median(seconds), device_batch_size * max_seq_len * micro_steps
    peak = peak_flops(device, dtype)
    mfu = arguments[0].estimate_flops() * tokens / step / peak
    print(f"{1e3 * step:.1f} ms (median of {steps}; {1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f}), "
          f"{tokens / step:,.0f} tok/s, MFU {mfu:.1%}, peak memory {peak_memory():.2f} GiB")


def profile_step() -> None:
    arguments = set_up_step()
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiler:
        began = time.perf_counter()
        for _ in range(3):
            train_step(*arguments)
        synchronize(device)
        wall = 1e6 * (time.perf_counter() - began)
    spent, busy, until = defaultdict(list), 0.0, 0.0
    for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
        spent[event.name].append(event.time_range.elapsed_us())
        busy += max(event.time_range.end - max(event.time_range.start, until), 0)  # what runs at the same time once
        until = max(until, event.time_range.end)
    longest = sorted(spent.items(), key=lambda item: -sum(item[1]))[:25]
    print(f"three steps: {wall / 1e3:.1f} ms, of which nothing runs on the device: {max(1 - busy / wall, 0):.1%}\n")
    print(markdown_table(["kernel", "times", "ms", "of the time"], [
        [name[:90], len(times), f"{sum(times) / 1e3:.1f}", f"{sum(times) / wall:.1%}"] for name, times in longest]))


if part == "all":
    run_all()
else:
    rank, ranks, device, dtype = set_up(device_type, "auto")
    compiling = set_compile(True, device.type)
    config = config_from_depth(depth, vocab_size, max_seq_len, arch=arch)
    {"steps": measure_steps, "profile": profile_step}[part]()
    compute_cleanup()
