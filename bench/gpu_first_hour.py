"""
Parts of bench/gpu_first_hour.sh: what only a GPU can tell about training and answering. Each is a process of its own.

    python -m bench.gpu_first_hour --part=steps --depth=20       # ms, tok/s, MFU and peak memory of compiled steps
    python -m bench.gpu_first_hour --part=profile --depth=20     # its longest kernels; how long the device is idle
    python -m bench.gpu_first_hour --part=prefill --depth=20     # seconds to the first token at 20 lengths
"""
import statistics
import time
from collections import defaultdict
from typing import Literal

from configurator import configure

import torch
from torch.profiler import ProfilerActivity, profile

from nanochat.distributed import compute_cleanup, set_up
from nanochat.engine import Engine
from nanochat.flops import peak_flops, synchronize
from nanochat.gpt_config import config_from_depth
from nanochat.metrics import peak_memory
from nanochat.plan.probes import set_up_training, train_step
from nanochat.report import markdown_table
from nanochat.sampling import SamplingParams
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer

part: Literal["steps", "profile", "prefill"] = "steps"
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

rank, ranks, device, dtype, compiling = set_up(device_type, "auto", True)
config = config_from_depth(depth, vocab_size, max_seq_len, arch=arch)


def training() -> tuple:
    """What `train_step` takes, after the step that compiles."""
    model, sharding, optimizers = set_up_training(config, dtype, device)
    if fp8:
        from nanochat.fp8 import fp8_linear  # where it has been built

        model.multiply_by(fp8_linear)
    if compiling:
        model.compile_blocks()
    tokens = torch.randint(vocab_size, (device_batch_size, max_seq_len + 1), device=device)
    began = time.perf_counter()
    train_step(model, sharding, optimizers, tokens, micro_steps)
    synchronize(device)
    print(f"first step, which compiles: {time.perf_counter() - began:.1f} s")
    return model, sharding, optimizers, tokens, micro_steps


def measure_steps() -> None:
    arguments, seconds = training(), []
    for _ in range(steps):
        began = time.perf_counter()
        train_step(*arguments)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    step, tokens = statistics.median(seconds), device_batch_size * max_seq_len * micro_steps
    peak = peak_flops(device, dtype)
    mfu = arguments[0].estimate_flops() * tokens / step / peak.flops
    print(f"depth {depth}, {device_batch_size} rows, {micro_steps} micro-steps{', fp8' * fp8}: {1e3 * step:.1f} ms "
          f"(median of {steps}; {1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f}), {tokens / step:,.0f} tok/s, "
          f"MFU {mfu:.1%} ({peak.source}), peak memory {peak_memory():.2f} GiB")


def profile_step() -> None:
    arguments = training()
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


def measure_prefill() -> None:
    """Each length twice: the first time whatever is planned or compiled for a new length comes on top."""
    model = set_up_training(config, dtype, device)[0]
    tokenizer = Tokenizer([bytes(divmod(i, 256)) for i in range(vocab_size - 256 - len(SPECIAL_TOKENS))])
    engine, sampling = Engine(model, tokenizer), SamplingParams(1, temperature=0, stop=())
    lengths, rows = [max_seq_len // 8 + 37 * i * max_seq_len // 2048 for i in range(20)], []
    for length in lengths:
        seconds = []
        for again in range(2):
            prompt = torch.randint(256, (length,), generator=torch.Generator().manual_seed(again)).tolist()
            began = time.perf_counter()
            list(engine.stream(prompt, sampling))
            seconds.append(time.perf_counter() - began)
        rows.append([length, *(f"{1e3 * s:.1f}" for s in seconds)])
    print(markdown_table(["tokens", "first time, ms", "again, ms"], rows, ()))


{"steps": measure_steps, "profile": profile_step, "prefill": measure_prefill}[part]()
compute_cleanup()
