"""
What only trying tells: which kernels work here, how many rows fit, how long a training step takes.

    python -m nanochat.plan.probes cpu bfloat16 attention     # one probe, as scripts.doctor runs it

A kernel that brings its process down (a segmentation fault, a CUDA error that poisons the context) and a step that runs
out of memory must cost no more than an answer: each runs in a process of its own, which ends itself after a while.
"""
import copy
import dataclasses
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nanochat.model.attention import attention, reference_attention, window_blocks
from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import GPTConfig, architecture
from nanochat.model.layers import Block, rotary_angles
from nanochat.model.loss import cap, softcapped_cross_entropy
from nanochat.optim.optimizers import setup_optimizers
from nanochat.optim.pipeline import Pipeline
from nanochat.optim.zero import Sharding
from nanochat.plan.memory import step_bytes
from nanochat.runtime.collectives import all_gather_single, reduce_scatter
from nanochat.runtime.compiling import set_compile
from nanochat.runtime.devices import synchronize
from nanochat.runtime.distributed import compute_cleanup, compute_init
from nanochat.runtime.errors import UserError
from nanochat.runtime.exits import install_one_line_errors

# Seconds of a probe and of a trial, which compiles a whole model on every rank of a node whose caches are empty: what
# hangs does not work. All imports are done before.
TIMEOUT, TRIAL_TIMEOUT = 300, 900
FREE_SHARE = 0.95  # of a GPU's free memory that a trial may take: a long run fragments more of it
OTHERS = 2**26  # bytes of a CPU's run that a trial does not have: loader, tokenizer, metrics


def in_own_process(*arguments: str, ranks: int = 1) -> subprocess.CompletedProcess:
    """`python -m nanochat.plan.probes arguments…`, on so many ranks."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m"] if ranks > 1 else []
    command = [sys.executable, "-m", *launcher, "nanochat.plan.probes", *arguments]
    return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)


# ---- Kernels, beside plain references


def probe(device_type: str, dtype: str, name: str, ranks: int = 1) -> tuple[bool, str]:
    """(whether a kernel works, its largest error beside what is allowed or one line why not)."""
    done = in_own_process(device_type, dtype, name, ranks=ranks)
    if done.returncode < 0:
        return False, f"ended its process: {signal.Signals(-done.returncode).name}"
    text = next(reversed(done.stdout.strip().splitlines()), f"ended its process: exit code {done.returncode}")
    return done.returncode == 0, text


def largest_error(
    function: Callable, reference: Callable, device: torch.device, dtype: torch.dtype, *shapes: tuple[int, ...]
) -> float:
    """
    Of results and gradients for normal inputs of these shapes, relative to the largest entry of the reference's, which
    is computed in float64 on the CPU.
    """
    generator, results = torch.Generator().manual_seed(0), []
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    for f, place, kind in ((function, device, dtype), (reference, torch.device("cpu"), torch.float64)):
        leaves = [x.detach().to(place, kind).requires_grad_() for x in drawn]
        y = f(*leaves)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.device, y.dtype))
        results.append([t.detach().cpu().double() for t in (y, *(x.grad for x in leaves))])
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*results))


def grouped_attention(device: torch.device, dtype: torch.dtype) -> float:
    q, kv = (2, 4, 96, 64), (2, 2, 96, 64)
    kernels = [[partial(f, window=window) for f in (attention, reference_attention)] for window in (96, 40)]
    return max(largest_error(*pair, device, dtype, q, kv, kv) for pair in kernels)


def loss(device: torch.device, dtype: torch.dtype) -> float:
    targets = torch.arange(64) % 100

    def ours(x: Tensor, head: Tensor) -> Tensor:
        return softcapped_cross_entropy(x, head, targets.to(device), 100, 15.0)

    def plain(x: Tensor, head: Tensor) -> Tensor:
        return F.cross_entropy(cap(x @ head[:100].T, 15.0), targets, reduction="sum")

    return largest_error(ours, plain, device, dtype, (64, 64), (128, 64))


def compiled_block_and_loss(device: torch.device, dtype: torch.dtype) -> float:
    if not set_compile(True, device.type):
        raise RuntimeError("no compiler: torch.compile cannot make kernels here, training runs eagerly")
    config = GPTConfig(64, 256, 3, 128, 2, 1, **architecture("modern"))  # it has every operation of a classic one
    block, angles = Block(config, 0).to(device, dtype), rotary_angles(64, 64, 1e4, device)
    plain = copy.deepcopy(block).to("cpu", torch.float64)
    block.compile_body(device)

    def ours(x: Tensor) -> Tensor:
        return block.body(x, (), *angles, x[..., :64], window_blocks(64, block.attn.window, device))

    def reference(x: Tensor) -> Tensor:
        return plain.body(x, (), *(angle.cpu() for angle in angles), x[..., :64], None)

    return max(largest_error(ours, reference, device, dtype, (2, 64, 128)), loss(device, dtype))


def collectives(device: torch.device, dtype: torch.dtype) -> float:
    """Those that training uses, among all ranks, on whole numbers, whose sums are exact; infinite if one is wrong."""
    rank, ranks, device = compute_init(device.type)
    numbers = torch.arange(2.0 * ranks, device=device).view(ranks, 2)
    total = numbers * (rank + 1)
    own, whole, swapped = torch.empty_like(total[0]), torch.empty_like(total), torch.empty_like(total)
    dist.all_to_all_single(swapped, total)
    reduce_scatter(own, total.flatten()).wait()
    all_gather_single(whole.view(-1), own)
    dist.all_reduce(total)
    factors = torch.arange(1.0, ranks + 1, device=device)[:, None]
    right = [(swapped, factors * numbers[rank]), (whole, factors.sum() * numbers), (total, factors.sum() * numbers)]
    compute_cleanup()
    return 0.0 if all(torch.equal(found, expected) for found, expected in right) else math.inf


PROBES: dict[str, Callable[[torch.device, torch.dtype], float]] = {
    "attention": grouped_attention, "loss": loss, "compiled": compiled_block_and_loss, "collectives": collectives,
}


def main(device_type: str, dtype: str, name: str) -> None:
    """One probe: its text on stdout; exit code 0 if it works."""
    allowed = 3e-2 if dtype == "bfloat16" else 1e-4
    try:
        error = PROBES[name](torch.device(device_type), getattr(torch, dtype))
    except Exception as problem:  # whatever a kernel can say: that is the finding
        print((str(problem).strip() or type(problem).__name__).splitlines()[0][:160])
        sys.exit(1)
    print(f"error {error:.1e}, allowed {allowed:.1e}")
    sys.exit(0 if error <= allowed else 1)  # NaN is not allowed either


# ---- Training steps


def set_up_training(
    config: GPTConfig, dtype: torch.dtype, device: torch.device, stage: int = 2, compiled: bool = False
) -> tuple[GPT, Sharding, tuple]:
    """(model, sharding, optimizers) as base_train has them; `device` may be "meta"."""
    with torch.device("meta"):
        model = GPT(config)
    weights = None if device.type == "meta" else lambda name: model.draw(name, seed=0)
    sharding = Sharding(model, model.units(), device, dtype, stage, weights=weights)
    if compiled:
        model.compile_blocks()
    return model, sharding, setup_optimizers(model, sharding)


def train_step(
    model: GPT, sharding: Sharding, optimizers: Iterable, tokens: Tensor, micro_steps: int,
    pipeline: Pipeline | None = None, micro_batches: int = 1,
) -> None:
    """An optimizer step as in base_train; tokens: (rows, T + 1), those of every micro-step."""
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    for micro_step in range(micro_steps):
        with sharding.accumulate(last=micro_step == micro_steps - 1, passes=micro_batches):
            if micro_batches > 1:
                loss = pipeline.step(inputs, targets)
            else:
                loss = model(inputs, targets)
                (loss / micro_steps).backward()
    stats = sharding.reduce_and_clip(loss, pipeline.is_last if pipeline else 1.0)
    for optimizer in optimizers:
        optimizer.step(stats)
    sharding.all_gather_params()


def try_steps(
    config: GPTConfig, rows: int, dtype: torch.dtype, device: torch.device, compiled: bool, stage: int = 2,
    checkpointing: bool = False, micro_steps: int = 1, seconds: float = 0.0,
) -> float:
    """Seconds of the fastest training step but the first, which compiles; at least two, and for so many seconds."""
    model, *others = set_up_training(config, dtype, device, stage, set_compile(compiled, device.type))
    model.activation_checkpointing = checkpointing
    tokens = torch.randint(0, config.vocab_size, (rows, config.sequence_len + 1), device=device)
    times: list[float] = []
    while len(times) < 2 or sum(times[1:]) < seconds:
        began = time.perf_counter()
        train_step(model, *others, tokens, micro_steps)
        synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def rows_that_train(
    most: int, config: GPTConfig, dtype: torch.dtype, device_type: str, compiled: bool,
    checkpointing: bool = False, stage: int = 2, ranks: int = 1,
) -> int:
    """
    The largest power of two of rows up to `most` with which two training steps do not run out of memory here, by
    trying; 0: none. UserError when a step fails for another reason.
    """
    how, model = dict(compiled=compiled, checkpointing=checkpointing, stage=stage), dataclasses.asdict(config)
    place = (device_type, str(dtype).removeprefix("torch."), json.dumps(model))
    rows = 2 ** int(math.log2(most))
    while rows:
        done = in_own_process("trial", *place, json.dumps(how | {"rows": rows}), ranks=ranks)
        if done.returncode == 0:
            return rows
        if "out of memory" not in done.stderr and "SIGKILL" not in done.stderr and done.returncode != -signal.SIGKILL:
            said = next(reversed(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
            raise UserError(f"a training step with device_batch_size={rows} fails: {said}")
        rows //= 2
    return 0


def trial(device_type: str, dtype: str, model: str, how: str) -> None:
    """Two optimizer steps, on every rank; running out of memory is said in one line, as base_train says it."""
    config, settings = GPTConfig(**json.loads(model)), json.loads(how)
    install_one_line_errors({"device_batch_size": settings["rows"]})
    _, ranks, device = compute_init(device_type)
    settings |= {"config": config, "dtype": getattr(torch, dtype), "device": device, "micro_steps": 2}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(FREE_SHARE * free / total)
    else:
        saving = step_bytes(config, 1, settings["dtype"], "cpu", stage=settings["stage"], ranks=ranks).saving
        others = torch.ones(int(saving) + OTHERS, dtype=torch.uint8)  # noqa: F841 (held while it trains)
    try_steps(**settings)
    compute_cleanup()


if __name__ == "__main__":
    signal.alarm(TRIAL_TIMEOUT if sys.argv[1] == "trial" else TIMEOUT)
    trial(*sys.argv[2:]) if sys.argv[1] == "trial" else main(*sys.argv[1:])
