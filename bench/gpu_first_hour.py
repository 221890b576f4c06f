"""
The first fifteen minutes on a GPU, what decides most first. Each part is a process of its own, which ends at its limit,
so a failure costs one part; time that a part leaves, later parts may use. What they print is shown, and written to
gpu_first_hour.md in the base folder, as it comes: one file for an issue. It takes an H100 of 80 GB or more; it has not
been run on a GPU.

    rank        rank 3 of 8 as it will train: 8 bits, 32 rows, weight averages, real text, for two minutes. The other
                ranks do not exist, so nothing travels or is waited for, and losses mean nothing
    bfloat16    the same in bfloat16
    width       8 bits and bfloat16 at depth 22: bits per byte after the same steps
    offset      offset keys and none, at depth 8 with the pieces and recipe of large models
    engine      decoding: tokens per second of 1, 64 and 256 rows

    python -m bench.gpu_first_hour                  # all parts; makes three shards of text first if there are none
    python -m bench.gpu_first_hour --rehearse       # all parts in small, on a CPU
    python -m bench.gpu_first_hour --part=width     # one part
"""
from typing import Literal

from configurator import configure

part: Literal["all", "text", "rank", "bfloat16", "width", "offset"] = "all"  # text: tokenizes it
rehearse = False            # in small, on a CPU
data = "climbmix"           # real text
vocab_size = 49152          # [300..] tokens
configure(globals())
if rehearse:
    data, vocab_size = "tinyworld", 512

import gc
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from bench.harness import DOCS, one_rank_of
from nanochat.data.batch_shape import BatchShape
from nanochat.data.dataloader import Batch, document_loader, validation_rows
from nanochat.data.embedded import ensure_dataset, ensure_tokenizer
from nanochat.data.tokenizer import tokenizer_dir
from nanochat.eval.loss_eval import evaluate_split
from nanochat.model.compile import compile_model
from nanochat.model.fp8 import use_fp8
from nanochat.model.gpt_config import LARGE, GPTConfig, config_from_depth
from nanochat.optim.recipe import LONG_RUN
from nanochat.optim.schedule import set_rates
from nanochat.plan.memory import GIB, step_bytes
from nanochat.plan.step_time import step_time
from nanochat.plan.step_trial import set_up_training, train_step
from nanochat.runtime.compiling import eagerly, set_compile
from nanochat.runtime.devices import synchronize
from nanochat.runtime.distributed import set_up
from nanochat.runtime.files import base_dir
from nanochat.runtime.flops import gpu_here
from nanochat.training.metrics import peak_memory


class Arm(NamedTuple):
    """A run of a part."""

    name: str
    fp8: bool
    ranks: int
    rows: int           # of a rank, in a micro-step
    micro_steps: int
    steps: int
    depth: int = 22
    pieces: dict[str, Any] = {}

    @property
    def rank(self) -> int:
        """The one that exists: rank 3, or the only one."""
        return min(3, self.ranks - 1)


MAX_SEQ_LEN = 64 if rehearse else 2048
PARTS = {
    "rank": [Arm("8 bits", True, 8, 32, 2, 150)],
    "bfloat16": [Arm("bfloat16", False, 8, 32, 2, 50)],
    "width": [Arm("8 bits", True, 1, 16, 4, 60), Arm("bfloat16", False, 1, 16, 4, 60)],
    "offset": [Arm("offset keys", False, 1, 32, 1, 1000, 8, LARGE),
               Arm("no offset", False, 1, 32, 1, 1000, 8, LARGE | {"key_offset": False})],
}
if rehearse:
    for name, arms in PARTS.items():
        PARTS[name] = [arm._replace(rows=2, steps=4, depth=2) for arm in arms]
# Seconds: to start, compile and make FlashAttention 4's kernels; to compile a second arm. Published steps took up to
# 1.2 times as long as estimated, but on eight GPUs, which wait for each other.
START, SECOND, RESERVE = 75, 20, 1.15
EVAL_TOKENS = 2**10 if rehearse else 2**20
# Of the first GPU's multiprocessors, and of all of it.
CLOCK_AND_POWER = "nvidia-smi --id=0 --query-gpu=clocks.sm,power.draw --format=csv,noheader 2>/dev/null || echo -"


def config_of(arm: Arm) -> GPTConfig:
    return replace(config_from_depth(arm.depth, vocab_size, MAX_SEQ_LEN, "modern", bos), **arm.pieces)


def estimated(arm: Arm) -> float:
    """Seconds of a step."""
    return step_time(config_of(arm), arm.rows, arm.micro_steps, arm.ranks, gpu, arm.fp8).seconds


def run_all() -> None:
    """Each part with its limit in seconds: first what makes the data, if there is none, then PARTS, then the engine."""
    this = ["-m", "bench.gpu_first_hour"]
    if rehearse:
        this.append("--rehearse")
    parts = [([*this, "--part=text"], 180.0)]
    if not tokenizer_dir(data).exists() and not rehearse:
        parts = [(["-m", "scripts.dataset", f"--source={data}", "--num_shards=3"], 120),
                 (["-m", "scripts.tok_train", f"--data={data}", f"--vocab_size={vocab_size}"], 120), *parts]
    for name, arms in PARTS.items():
        seconds = sum(arm.steps * estimated(arm) for arm in arms)
        parts.append(([*this, f"--part={name}"], START + SECOND * (len(arms) - 1) + RESERVE * seconds))
    size = ["--depth=2", "--batch_size=4"] if rehearse else ["--depth=22", "--batch_size=256"]
    parts.append((["-m", "bench.engine", "--arch=modern", f"--vocab_size={vocab_size}", "--new_tokens=64",
                   "--repeats=2", *size], 60))
    base_dir().mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    due = 0.0  # seconds from there until this part must end
    with open(base_dir() / "gpu_first_hour.md", "w", encoding="utf-8") as page:
        def say(line: str) -> None:
            for file in (sys.stdout, page):
                print(line, file=file, flush=True)

        say(f"# The first minutes on a GPU: {gpu.name}\n\nAll limits: {sum(limit for _, limit in parts):.0f} s. "
            "Exit code -9: a part has reached its limit.")
        for command, limit in parts:
            start = time.perf_counter() - began
            due += limit
            say(f"\n## {' '.join(command)}\n\nlimit {limit:.0f} s; with what was left before {due - start:.0f} s\n")
            with subprocess.Popen([sys.executable, "-u", *command], cwd=DOCS.parent, text=True, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT) as process:
                timer = threading.Timer(due - start, process.kill)
                timer.start()
                for line in process.stdout or ():
                    say(line.rstrip())
                timer.cancel()
            say(f"\n{time.perf_counter() - began - start:.0f} s, exit code {process.returncode}")
        print(f"{page.name} is written")


def read(arm: Arm, device: torch.device) -> Generator[Batch]:
    """The micro-batches of the arm's rank."""
    shape = BatchShape(arm.rows, MAX_SEQ_LEN, arm.rank, arm.ranks, device)
    rows_per_step = shape.rows_per_micro_step * arm.micro_steps
    return document_loader(data, "train", tokenizer, shape, rows_per_step=rows_per_step)


def train(arm: Arm) -> None:
    """Train as a long run of a large model would, on real text, with the rates of scripts/base_train.py."""
    recipe = LONG_RUN
    steps = arm.steps
    model, sharding, optimizers = set_up_training(config_of(arm), dtype, device, recipe=recipe)
    if arm.fp8:
        use_fp8(model, device, arm.rows * MAX_SEQ_LEN)
    if compiling:
        compile_model(model)
    loader = read(arm, device)
    block = max(steps // 10, 1)  # steps between two looks at the time: each waits for the device
    times: list[float] = []      # seconds of a step
    began = time.perf_counter()
    for step in range(steps):
        set_rates(optimizers, recipe.at(step, steps))
        train_step(model, sharding, optimizers, [next(loader) for _ in range(arm.micro_steps)])
        if step % block == 0:
            # The device still works on what it was sent; otherwise this would take time, in half of the blocks.
            state = subprocess.getoutput(CLOCK_AND_POWER) if step % (2 * block) == 0 else "-"
            synchronize(device)
            now = time.perf_counter()
            times.append((now - began) / (block if step else 1))
            print(f"| {arm.name}, step {step}: ms; clock, power | {1e3 * times[-1]:,.0f}; {state} | - |")
            began = now
    loader.close()
    # The first step compiles.
    print(f"| {arm.name}: ms a step | {1e3 * statistics.median(times[1:]):,.0f} | {1e3 * estimated(arm):,.0f} |")
    if arm.ranks > 1:
        peak = step_bytes(config_of(arm), arm.rows, dtype, arm.ranks, micro_steps=arm.micro_steps, compiled=compiling)
        print(f"| {arm.name}: peak GiB | {peak_memory():.1f} | {peak / GIB:.1f} |")
    else:
        with eagerly():
            bpb = evaluate_split(model, data, "val", tokenizer, EVAL_TOKENS, arm.rows, MAX_SEQ_LEN)
        print(f"| {arm.name}: bits per byte | {bpb:.5f} | - |")


_, _, device, dtype = set_up("cpu" if rehearse else "cuda", "auto")
gpu = gpu_here(device)
bos = -1  # until there is a tokenizer: no estimate depends on it
if part == "all":
    run_all()
else:
    ensure_dataset(data)
    tokenizer = ensure_tokenizer(data)
    vocab_size, bos = tokenizer.get_vocab_size(), tokenizer.get_bos_token_id()
    if part == "text":
        (arm,) = PARTS["rank"]
        for _ in zip(range(arm.steps * arm.micro_steps), read(arm, torch.device("cpu"))):
            pass
        validation_rows(data, tokenizer, EVAL_TOKENS, MAX_SEQ_LEN)
    else:
        compiling = set_compile(not rehearse, device.type)
        print("| what | measured | estimated |\n| --- | ---: | ---: |")
        for arm in PARTS[part]:
            with one_rank_of(arm.ranks, arm.rank):
                train(arm)
            gc.collect()
            torch.cuda.empty_cache()
