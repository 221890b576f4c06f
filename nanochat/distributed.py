"""Ranks and devices: who this process is, what it computes on, what all ranks share, and how they end together."""
import errno
import functools
import os
import signal
import threading
import time
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.compiling import set_compile
from nanochat.errors import UserError, tell_restarts

DEVICE_TYPES = ("cuda", "mps", "cpu")
# How long a rank waits for the others: rank 0 may be making data or every rank compiling, until training runs.
SETUP_TIMEOUT, TRAINING_TIMEOUT = timedelta(minutes=60), timedelta(minutes=10)
# Seconds between a signal and Python's handler, in which a rank may wait for its device or for a slower rank: just under
# the --shutdown-timeout=300 that the launchers here give.
STUCK_AFTER = 240

# torch 2.13 renamed the collectives on single tensors, and warns of the older names.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def autodetect_device_type() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def compute_init(device_type: str = "") -> tuple[bool, int, int, int, torch.device]:
    """
    (ddp, ddp_rank, ddp_local_rank, ddp_world_size, device) of this process; joins the process group under torchrun.

    device_type "" is the best one there is. One process per device, chosen by the *local* rank: rank 8 of a second
    node is that node's device 0.
    """
    device_type = device_type or autodetect_device_type()
    if device_type not in DEVICE_TYPES:
        raise UserError(f"device_type={device_type} is unknown; expected one of {', '.join(DEVICE_TYPES)}, or nothing to choose")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise UserError("device_type=cuda, but this torch sees no GPU; leave device_type out to use what is there")
    if device_type == "mps" and not torch.backends.mps.is_available():
        raise UserError("device_type=mps, but Metal is not available here; leave device_type out to use what is there")
    ddp = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    rank, local_rank, world_size = (int(os.environ.get(key, d)) for key, d in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
    device = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device(device_type)
    if device_type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(f"local rank {local_rank} has no GPU: this node has {torch.cuda.device_count()}; lower --nproc_per_node")
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    if ddp and not dist.is_initialized():
        # The flight recorder: when a collective hangs, every rank writes down which ones it was in.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        # torchrun keeps its store over a restart, where ranks would find the addresses of the dead: each attempt has its own part.
        job_store, *_ = next(dist.rendezvous("env://", timeout=SETUP_TIMEOUT))
        store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", job_store)
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", store=store, rank=rank, world_size=world_size, timeout=SETUP_TIMEOUT)
        # What the user has to mend would only happen again: such a line ends every restart, on all nodes, which have just met.
        if job_store.check(["user error"]):
            raise UserError(job_store.get("user error").decode())
        tell_restarts.append(functools.partial(job_store.set, "user error"))
    return ddp, rank, local_rank, world_size, device


def compute_cleanup() -> None:
    """Leave the process group, once no rank needs another any more."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def set_timeout(timeout: timedelta, *groups: dist.ProcessGroup | None) -> None:
    """How long collectives of these groups wait for a rank; None: the group of all ranks."""
    for group in groups if dist.is_initialized() else ():
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def expect_short_waits(*groups: dist.ProcessGroup | None) -> None:
    """From here on every rank is training: one that is not heard of for long has hung."""
    set_timeout(TRAINING_TIMEOUT, None, *groups)


class StopRequest:
    """
    SIGTERM, SIGINT and SIGHUP (the connection to the terminal is lost) become a request, `asked`, that the ranks agree on;
    from its making on. A SIGHUP that is ignored, as under nohup, stays ignored. A second Ctrl-C in a process of its own
    interrupts at once (torchrun passes every signal on a second time).

    Among several ranks, SIGTERM may also mean that another rank is dead. Who waits for it inside a collective on a GPU
    never gets to Python's handler, and would hold up the job until torchrun's patience ends: it is ended here.
    """

    def __init__(self):
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.ask)
        if dist.is_initialized():
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # written to at once, whatever the main thread waits for
            threading.Thread(target=self.watch, args=(reader,), daemon=True, name="signals").start()

    def watch(self, reader: int) -> None:
        """The thread: ends the process when a signal has come and the main thread has not been in Python for long since."""
        os.read(reader, 1)
        time.sleep(STUCK_AFTER)
        if not self.asked:
            os.write(2, f"stuck for {STUCK_AFTER} s after a signal, most likely waiting for a rank that is gone\n".encode())
            os._exit(1)

    def ask(self, number: int, _frame: object) -> None:
        again, self.asked = self.asked, True  # first of all: the next signal may come while this prints
        if again and number == signal.SIGINT and "RANK" not in os.environ:
            raise KeyboardInterrupt
        if not again and is_rank0():
            hint = "; Ctrl-C again ends at once" * (number == signal.SIGINT and "RANK" not in os.environ)
            try:  # print is not for handlers
                os.write(1, f"{signal.Signals(number).name}: finishing this step, then saving{hint}\n".encode())
            except OSError:
                discard_output()


def is_rank0() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


def print0(*values: object) -> None:
    """Print on rank 0, at once. A run goes on when its terminal, or what reads its pipe (`| tee`), is gone."""
    if is_rank0():
        try:
            print(*values, flush=True)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            discard_output()


def discard_output() -> None:
    """From here on what is printed goes nowhere; errors as well where they went to the same place."""
    for descriptor in (1, 2) if os.path.sameopenfile(1, 2) else (1,):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def rank0_first(function, *args):
    """Call on rank 0 before all others, so that what it makes (data, a tokenizer) is there when they look."""
    if not is_rank0() and dist.is_initialized():
        dist.barrier()
    result = function(*args)
    if is_rank0() and dist.is_initialized():
        dist.barrier()
    return result


def from_rank0(function, *args):
    """
    What the function returns on rank 0, on every rank: for decisions that must not differ. A UserError that it raises there
    is raised on every rank.
    """
    try:
        result = [function(*args) if is_rank0() else None]
    except UserError as error:
        result = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(result, src=0)
    if isinstance(result[0], UserError):
        raise result[0]
    return result[0]


def reduce_scatter(output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None):
    """
    Starts output = this rank's chunk of the sum of all ranks' inputs, and returns the work to `wait()` for.

    input: (N · n,), output: (n,), both referenced until the wait is over. Gloo's own reduce-scatter is an all-reduce
    in disguise, which sends twice the bytes and blocks at its start: there the chunks go to their owners, who add.
    """
    if dist.get_backend(group) != "gloo":
        return reduce_scatter_single(output, input, group=group, async_op=True)
    received = torch.empty_like(input)
    return SumOfChunks(dist.all_to_all_single(received, input, group=group, async_op=True), received, output)


class SumOfChunks:
    """The chunks of all ranks on their way to their owner, who adds them in the order of ranks."""

    def __init__(self, work: dist.Work, received: Tensor, output: Tensor):
        self.work, self.received, self.output = work, received, output

    def wait(self) -> None:
        self.work.wait()
        torch.sum(self.received.view(-1, len(self.output)), dim=0, out=self.output)


def all_reduce_sum(tensor: Tensor) -> None:
    """The tensor becomes its sum over the ranks, in place; nothing happens on one rank."""
    if dist.is_initialized():
        dist.all_reduce(tensor)


def sum_dtype(device: torch.device) -> torch.dtype:
    """float64 for long sums, but for Apple GPUs, which have none."""
    return torch.float32 if device.type == "mps" else torch.float64


def compute_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """
    The dtype of parameters and activations: `auto` is bfloat16 where the hardware multiplies it faster than
    float32 (GPUs from Ampere on, CPUs with AVX512-BF16 or AMX), else float32.
    """
    if dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    elif device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        fast = bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
        fast &= torch.backends.cpu.get_cpu_capability().startswith("AVX512")  # ATEN_CPU_CAPABILITY=avx2 makes an older CPU of it
    else:
        fast = True  # Apple GPUs: half the bytes, the same rate
    return torch.bfloat16 if fast else torch.float32


class Machine(NamedTuple):
    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype      # of parameters and activations
    compiling: bool


def set_up(device_type: str, dtype: str, compile: bool) -> Machine:
    """What a training script begins with: joins the other ranks, and says what it computes on. COLLECTIVE."""
    _, rank, _, world_size, device = compute_init(device_type)
    machine = Machine(rank, world_size, device, compute_dtype(dtype, device), set_compile(compile, device.type))
    name = str(machine.dtype).removeprefix("torch.")
    print0(f"{world_size} rank(s) on {device.type}, {name}, {'compiled' if machine.compiling else 'eager'}")
    return machine
