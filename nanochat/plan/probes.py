"""
What only trying tells: which kernels work here, how many rows fit, how long a training step takes.

    python -m nanochat.plan.probes cpu bfloat16 attention     # one probe, as scripts.doctor runs it

A kernel that brings its process down (a segmentation fault, a CUDA error that poisons the context) and a step that runs
out of memory must cost no more than an answer: each runs in a process of its own, which ends itself after TIMEOUT.
"""
import copy
import dataclasses
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing import start_processes
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanochat.attention import attention, reference_attention
from nanochat.compiling import set_compile
from nanochat.distributed import all_gather_single, compute_cleanup, compute_init, reduce_scatter
from nanochat.errors import UserError, install_one_line_errors
from nanochat.flops import synchronize
from nanochat.gpt import GPT, Block, GPTConfig, rotary_angles
from nanochat.loss import cap, softcapped_cross_entropy
from nanochat.optimizers import setup_optimizers
from nanochat.plan.memory import step_bytes
from nanochat.zero import Sharding

TIMEOUT = 300  # seconds of a probe or a trial, compiling included: what hangs does not work
FREE_SHARE = 0.95  # of a GPU's free memory that a trial may take: a long run fragments more of it
OTHERS = 2**26  # bytes of a CPU's run that a trial does not have: loader, tokenizer, metrics


def in_own_process(*arguments: str, ranks: int = 1) -> subprocess.CompletedProcess:
    """`python -m nanochat.plan.probes arguments…`, on so many ranks."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m"] if ranks > 1 else []
    command = [sys.executable, "-m", *launcher, "nanochat.plan.probes", *arguments]
    return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)


# ---- Kernels, beside plain references


class Found(NamedTuple):
    name: str
    ok: bool
    text: str  # the largest error beside what is allowed, or one line why not


def probe_all(device_type: str, dtype: str, compiled: bool) -> Iterator[Found]:
    """Every probe that means something here, two at a time; never an error."""
    skipped = set() if compiled else {"compiled"}
    skipped |= set() if device_type == "cuda" else {backend for backend in PROBES if backend.startswith("SDPA")}
    names = [name for name in PROBES if name not in skipped]
    with ThreadPoolExecutor(2) as pool:  # more at once might be more than a small machine's memory
        yield from pool.map(lambda name: probe(device_type, dtype, name), names)


def probe(device_type: str, dtype: str, name: str) -> Found:
    done = in_own_process(device_type, dtype, name)
    if done.returncode < 0:
        return Found(name, False, f"ended its process: {signal.Signals(-done.returncode).name}")
    text = next(reversed(done.stdout.strip().splitlines()), f"ended its process: exit code {done.returncode}")
    return Found(name, done.returncode == 0, text)


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


def matmul(device: torch.device, dtype: torch.dtype) -> float:
    return largest_error(torch.matmul, torch.matmul, device, dtype, (128, 256), (256, 64))


def grouped_attention(device: torch.device, dtype: torch.dtype) -> float:
    q, kv = (2, 4, 96, 64), (2, 2, 96, 64)
    return largest_error(attention, reference_attention, device, dtype, q, kv, kv)


def sdpa(backend: SDPBackend) -> Callable[[torch.device, torch.dtype], float]:
    """A probe of one of PyTorch's attention kernels, among which a GPU's `attention` chooses."""
    def one(device: torch.device, dtype: torch.dtype) -> float:
        with sdpa_kernel([backend]):
            return largest_error(attention, reference_attention, device, dtype, *[(2, 4, 96, 64)] * 3)
    return one


def loss(device: torch.device, dtype: torch.dtype) -> float:
    targets = torch.arange(64) % 100

    def ours(x: Tensor, head: Tensor) -> Tensor:
        return softcapped_cross_entropy(x, head, targets.to(device), 100, 15.0)

    def plain(x: Tensor, head: Tensor) -> Tensor:
        return F.cross_entropy(cap(x @ head.T, 100, 15.0), targets, reduction="sum")

    return largest_error(ours, plain, device, dtype, (64, 64), (128, 64))


def compiled_block_and_loss(device: torch.device, dtype: torch.dtype) -> float:
    if not set_compile(True, device.type):
        raise RuntimeError("no compiler: torch.compile cannot make kernels here, training runs eagerly")
    block, angles = Block(GPTConfig(64, 256, 1, 128, 2, 1)).to(device, dtype), rotary_angles(64, 64, device)
    plain, quick = copy.deepcopy(block).to("cpu", torch.float64), torch.compile(block.forward, dynamic=False)

    def ours(x: Tensor) -> Tensor:
        return quick(x, *angles)

    def reference(x: Tensor) -> Tensor:
        return plain(x, *(angle.cpu() for angle in angles))

    return max(largest_error(ours, reference, device, dtype, (2, 64, 128)), loss(device, dtype))


def collectives(device: torch.device, dtype: torch.dtype) -> float:
    """Those that training uses between two ranks, on whole numbers, whose sums are exact."""
    backend = "nccl" if device.type == "cuda" and torch.cuda.device_count() > 1 else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        start_processes(talk, (backend, f"file://{folder}/store"), nprocs=2, start_method="spawn")
    return 0.0


def talk(rank: int, backend: str, store: str) -> None:
    """One of two ranks."""
    signal.alarm(TIMEOUT)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store, rank=rank, world_size=2)
    numbers = torch.arange(8.0, device=device).view(2, 4)
    mine, total = numbers * (rank + 1), numbers * (rank + 1)
    own, whole, swapped = torch.empty_like(mine[0]), torch.empty_like(mine), torch.empty_like(mine)
    dist.all_reduce(total)
    reduce_scatter(own, mine.flatten(), dist.group.WORLD).wait()
    all_gather_single(whole.view(-1), own)
    dist.all_to_all_single(swapped, mine)
    swap = torch.stack([numbers[rank], 2 * numbers[rank]])
    results = {"all_reduce": (total, 3 * numbers), "reduce_scatter": (own, 3 * numbers[rank]),
               "all_gather": (whole, 3 * numbers), "all_to_all": (swapped, swap)}
    wrong = [name for name, (found, expected) in results.items() if not torch.equal(found, expected)]
    dist.destroy_process_group()
    if wrong:
        raise RuntimeError(f"{', '.join(wrong)}: wrong sums or rows between two ranks")


PROBES: dict[str, Callable[[torch.device, torch.dtype], float]] = {
    "matmul": matmul, "attention": grouped_attention,
    "SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION), "SDPA cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
    "SDPA memory-efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "loss": loss, "compiled": compiled_block_and_loss, "collectives": collectives,
}
NEEDED = {"matmul", "attention", "loss"}  # without the others one can train


def main(device_type: str, dtype: str, name: str) -> None:
    """One probe: its text on stdout; exit code 0 if it works."""
    allowed = 3e-2 if dtype == "bfloat16" else 1e-4
    try:
        error = PROBES[name](torch.device(device_type), getattr(torch, dtype))
    except Exception as problem:  # whatever a kernel can say: that is the finding
        lines = [line for line in str(problem).splitlines() if line.strip()]
        print((lines or [type(problem).__name__])[-1 if name == "collectives" else 0][:160])
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
    model.to_empty(device=device)
    if device.type != "meta":
        model.init_weights(0)
    sharding = Sharding(model, model.units(), device, dtype, stage)
    if compiled:
        model.compile_blocks()
    return model, sharding, setup_optimizers(model, sharding)


def train_step(model: GPT, sharding: Sharding, optimizers: Iterable, tokens: Tensor, micro_steps: int) -> None:
    """An optimizer step as in base_train; tokens: (rows, T + 1), those of every micro-step."""
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    for micro_step in range(micro_steps):
        with sharding.accumulate(last=micro_step == micro_steps - 1):
            loss = model(inputs, targets)
            (loss / micro_steps).backward()
    stats = sharding.reduce_and_clip(loss)
    for optimizer in optimizers:
        optimizer.step(stats)
    sharding.all_gather_params()


def seconds_of_a_step(config: GPTConfig, rows: int, dtype: torch.dtype, device: torch.device, compiled: bool) -> float:
    """Of a training step here: the fastest in 3 seconds, after a first one, which compiles."""
    training = set_up_training(config, dtype, device, compiled=set_compile(compiled, device.type))
    tokens = torch.randint(0, config.vocab_size, (rows, config.sequence_len + 1), device=device)
    times: list[float] = []
    while len(times) < 2 or sum(times[1:]) < 3:
        began = time.perf_counter()
        train_step(*training, tokens, micro_steps=1)
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
    settings = dict(
        config=dataclasses.asdict(config), dtype=str(dtype).removeprefix("torch."), device_type=device_type,
        compiled=compiled, checkpointing=checkpointing, stage=stage,
    )
    rows = 2 ** int(math.log2(most))
    while rows:
        done = in_own_process("trial", json.dumps(settings | {"rows": rows}), ranks=ranks)
        if done.returncode == 0:
            return rows
        if "out of memory" not in done.stderr and "SIGKILL" not in done.stderr and done.returncode != -signal.SIGKILL:
            said = next(reversed(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
            raise UserError(f"a training step with device_batch_size={rows} fails: {said}")
        rows //= 2
    return 0


def trial(text: str) -> None:
    """Two optimizer steps, on every rank; running out of memory is said in one line, as base_train says it."""
    settings = json.loads(text)
    rows, compiled, dtype = settings["rows"], settings["compiled"], getattr(torch, settings["dtype"])
    install_one_line_errors({"device_batch_size": rows})
    _, world_size, device = compute_init(settings["device_type"])
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(FREE_SHARE * free / total)
    config, stage = GPTConfig(**settings["config"]), settings["stage"]
    if device.type == "cpu":
        saving = step_bytes(config, rows, dtype, "cpu", stage=stage, ranks=world_size, saving=True).saving
        others = torch.ones(int(saving) + OTHERS, dtype=torch.uint8)  # noqa: F841 (held while it trains)
    training = set_up_training(config, dtype, device, stage, set_compile(compiled, device.type))
    training[0].activation_checkpointing = settings["checkpointing"]
    tokens = torch.randint(0, config.vocab_size, (rows, config.sequence_len + 1), device=device)
    for _ in range(2):
        train_step(*training, tokens, micro_steps=2)
    synchronize(device)
    compute_cleanup()


if __name__ == "__main__":
    signal.alarm(TIMEOUT)
    trial(sys.argv[2]) if sys.argv[1] == "trial" else main(*sys.argv[1:])
