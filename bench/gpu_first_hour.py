"""
The first twelve minutes on a GPU, the decisive measurements first. Each part is a process of its own, so a failure
costs one part. It writes one Markdown file for an issue, gpu_first_hour.md in the base folder; the last line says which
estimate of nanochat/plan/step_time.py was furthest off.

    python -m bench.gpu_first_hour                               # all parts
    python -m bench.gpu_first_hour --rehearse                    # the same parts in small, on a CPU
    python -m bench.gpu_first_hour --part=steps --rows=32 --fp8  # one part: ms, MFU and peak memory of steps
"""
from typing import Literal

from configurator import configure

part: Literal["all", "products", "steps", "overlap"] = "all"
rehearse = False            # in small, on a CPU
data = "climbmix"           # real text; if missing, three shards are made
depth = 22                  # [1..] layers
vocab_size = 49152          # [300..] tokens
max_seq_len = 2048          # [64..] tokens per row
rows = 16                   # [1..] rows on each GPU
fp8 = False                 # 8-bit matrix products
configure(globals())
if rehearse:
    data, depth, vocab_size, max_seq_len, rows = "tinyworld", 1, 512, 64, 2

import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.profiler import profile

from bench.harness import DOCS
from nanochat.data.tokenizer import tokenizer_dir
from nanochat.model.compile import compile_model
from nanochat.model.fp8 import product, scaled, use_fp8
from nanochat.model.gpt_config import config_from_depth
from nanochat.plan.memory import GIB, step_bytes
from nanochat.plan.step_time import PRODUCTS, step_time
from nanochat.plan.step_trial import set_up_training, train_step
from nanochat.runtime.compiling import set_compile
from nanochat.runtime.devices import synchronize
from nanochat.runtime.distributed import compute_cleanup, set_up
from nanochat.runtime.files import base_dir, write_text
from nanochat.runtime.flops import gpu_here
from nanochat.training.metrics import peak_memory

HEAD = "| what | measured | estimated | ratio |\n| --- | ---: | ---: | ---: |"
ROW = r"\| (.+) \| .+ \| .+ \| ([\d.]+) \|"  # with an estimate
HOUR, BASE = ("-m", "bench.gpu_first_hour"), ("-m", "scripts.base_train")
# Depth 12 on real text: unchanged, and with one change each.
ARMS = ("--arch=modern", "--arch=modern,key_offset=False", "--fp8=True")


def run_all() -> None:
    small = ["--rehearse"] if rehearse else []
    text = [f"--data={data}", "--depth=12", "--num_iterations=300", "--total_batch_size=131072", "--save_every=150",
            "--eval_tokens=1048576", "--sample_every=-1", "--overwrite"]
    if rehearse:
        text += ["--depth=1", "--max_seq_len=64", "--num_iterations=2", "--total_batch_size=128", "--save_every=1",
                 "--device_batch_size=2", "--device_type=cpu", "--compile=False", "--eval_tokens=128"]
    parts = []
    if not tokenizer_dir(data).exists() and not rehearse:
        parts += [(["-m", "scripts.dataset", f"--source={data}", "--num_shards=3"], 120),
                  (["-m", "scripts.tok_train", f"--data={data}", f"--vocab_size={vocab_size}"], 120)]
    parts.append(([*HOUR, "--part=products", *small], 90))
    # Compiling the first step takes a minute.
    parts += [([*HOUR, "--part=steps", f"--rows={count}", f"--fp8={eight}", *small], 120)
              for count in (16, 32) for eight in (False, True)]
    parts += [([*BASE, *text, f"--model_tag=first{number}", arm], 60) for number, arm in enumerate(ARMS)]
    again = ["--model_tag=first0", f"--resume_from_step={1 if rehearse else 150}"]  # must end as that arm did
    ranks = f"--nproc_per_node={max(torch.cuda.device_count(), 1)}"
    parts += [([*BASE, *text, *again], 60),
              (["-m", "torch.distributed.run", "--standalone", ranks, *HOUR, "--part=overlap", *small], 90)]
    page, path, ratios = "# The first minutes on a GPU\n", base_dir() / "gpu_first_hour.md", {}
    for command, limit in parts:
        began = time.perf_counter()
        try:
            done = subprocess.run([sys.executable, *command], cwd=DOCS.parent, text=True, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, timeout=limit * (9 if rehearse else 1))
            output, end = done.stdout, f"exit code {done.returncode}"
        except subprocess.TimeoutExpired as expired:
            output, end = (expired.output or b"").decode(), "ended, too slow"
        title = " ".join(command)
        lines = "\n".join(output.splitlines()[-20:])
        page += f"\n## {title}\n\n{time.perf_counter() - began:.0f} s, {end}\n\n{lines}\n"
        print(page.rpartition("\n## ")[2], flush=True)
        ratios |= {f"{title}: {what}": float(ratio) for what, ratio in re.findall(ROW, output)}
        write_text(path, page)
    wrong = max(ratios, key=lambda what: max(ratios[what], 1 / max(ratios[what], 1e-9)), default="")
    page += f"\nFurthest from its estimate: {wrong}, {ratios.get(wrong)} of it\n"
    write_text(path, page)
    print(f"{page.splitlines()[-1]}\n{path} is written")


def show(what: str, measured: float, estimated: float = 0.0) -> None:
    compared = f"{estimated:,.4g} | {measured / estimated:.2f}" if estimated else "- | -"
    if rank == 0:
        print(f"| {what} | {measured:,.4g} | {compared} |", flush=True)


def rate(what: str, flops: float, function: Callable, share: float, calls: int = 10) -> float:
    """Show TFLOP/s beside `share` of the peak, or the error. Returns seconds of a call; 0: it fails."""
    found = []
    try:
        for _ in range(4):  # the first warms up
            began = time.perf_counter()
            for _ in range(calls):
                function()
            synchronize(device)
            found.append((time.perf_counter() - began) / calls)
    except Exception as error:  # the kernel is missing, or does not take these shapes
        print(f"| {what} | {error!s:.90} | - | - |".replace("\n", " "), flush=True)
        return 0.0
    seconds = min(found[1:])
    show(f"{what}: TFLOP/s", flops / seconds / 1e12, share * gpu.peak / 1e12)
    return seconds


# ---- Parts

def products() -> None:
    """A block's products, forward and backward, and the head's, in bfloat16 and 8 bits."""
    T, C, V = rows * max_seq_len, config.n_embd, vocab_size
    for m, n, k in ((T, C, C), (T, 4 * C, C), (T, C, 4 * C), (C, C, T), (4 * C, C, T), (C, 4 * C, T), (T, V, C),
                    (V, C, T)):
        a, b = (torch.randn(size, k, device=device, dtype=dtype) for size in (m, n))
        (a8, _, x), (b8, _, y) = (scaled([t], torch.float8_e4m3fn) for t in (a, b))
        name, flops = f"{m} x {n} x {k}", 2 * m * n * k
        rate(name, flops, partial(torch.matmul, a, b.T), PRODUCTS)
        rate(f"{name}, 8 bits", flops, partial(product, a8, x, b8, y, dtype, True), 2 * PRODUCTS)


def compiled_step() -> tuple:
    """The arguments of `train_step` (two micro-steps), after the step that compiles."""
    model, sharding, optimizers = set_up_training(config, dtype, device)
    if fp8:
        use_fp8(model, device, rows * max_seq_len)
    if compiling:
        compile_model(model)
    arguments = model, sharding, optimizers, torch.randint(vocab_size, (rows, max_seq_len + 1), device=device), 2
    began = time.perf_counter()
    train_step(*arguments)
    synchronize(device)
    show("first step, which compiles: s", time.perf_counter() - began)
    return arguments


def training_steps() -> None:
    arguments = compiled_step()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    flops = 2 * rows * max_seq_len * arguments[0].estimate_flops()
    step = step_time(config, rows, 2, 1, gpu, fp8).seconds
    seconds = rate("model", flops, lambda: train_step(*arguments), flops / step / gpu.peak, calls=2)
    show("step: ms", 1e3 * seconds, 1e3 * step)
    show("MFU: %", 100 * flops / max(seconds, 1e-9) / gpu.peak)
    expected = step_bytes(config, rows, dtype, compiled=compiling) if device.type == "cuda" else 0
    show("peak memory: GiB", peak_memory(), expected / GIB)
    show("compiled again: graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs)


def busy(events: list) -> float:
    """Milliseconds in which at least one event runs."""
    total = until = 0.0
    for event in sorted(events, key=lambda event: event.time_range.start):
        total += max(event.time_range.end - max(event.time_range.start, until), 0)
        until = max(until, event.time_range.end)
    return total / 1e3


def overlap() -> None:
    if ranks < 2:
        print("| NCCL | needs two GPUs | - | - |")
        return
    arguments = compiled_step()
    with profile() as profiler:
        train_step(*arguments)
        synchronize(device)
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    others = [event for event in events if "nccl" not in event.name]
    show("NCCL in a step: ms", busy([event for event in events if "nccl" in event.name]))
    show("of it while nothing else runs: ms", busy(events) - busy(others))


if part == "all":
    run_all()
else:
    rank, ranks, device, dtype = set_up("cpu" if rehearse else "", "auto")
    gpu = gpu_here(device)
    compiling = set_compile(not rehearse, device.type)
    config = config_from_depth(depth, vocab_size, max_seq_len, arch="modern")
    if rank == 0:
        print(f"{gpu.name}\n\n{HEAD}")
    {"products": products, "steps": training_steps, "overlap": overlap}[part]()
    compute_cleanup()
