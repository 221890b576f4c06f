"""Ranks and devices: who this process is, what it computes on, what all ranks share, and how they end together."""
import ctypes
import errno
import faulthandler
import functools
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.runtime import heartbeat
from nanochat.runtime.compiling import set_compile
from nanochat.runtime.errors import UserError, ending, first_line, is_rank0, tell_restarts

T = TypeVar("T")
# How long a rank waits for the others in a collective: at first rank 0 may be making data, or ranks may be compiling.
SETUP_TIMEOUT, TRAINING_TIMEOUT = timedelta(minutes=60), timedelta(minutes=10)
PIECE_BYTES = 2**26  # that concatenate_parts sends at once
# Seconds from a signal to the end of a rank that still waits for its device or for another rank:
DEATH_AFTER = 15   # if a rank of this node is dead
STUCK_AFTER = 240  # otherwise; less than the --shutdown-timeout=300 of the launchers here
SIGNALS_APART = 5  # seconds between those of two hosts' torchruns at most: each asks every second who wants to join
node_process_ids: list[int] = []  # of this node's ranks, filled by `join`

# torch 2.13 renamed the collectives on single tensors, and warns of the older names.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Setup(NamedTuple):
    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype      # of parameters and activations
    compiling: bool


def set_up(device_type: str, dtype: str, compile: bool, deterministic: bool = False) -> Setup:
    """How a training script begins: join the other ranks, choose what to compute on, and say so. COLLECTIVE."""
    if deterministic:
        be_deterministic()
    rank, world_size, device = compute_init(device_type)
    model_dtype = from_rank0(compute_dtype, dtype, device)  # hosts may have other processors
    setup = Setup(rank, world_size, device, model_dtype, set_compile(compile, device.type))
    name = str(setup.dtype).removeprefix("torch.")
    how = "compiled (the first time that takes a minute or so)" if setup.compiling else "eager"
    print0(f"{world_size} rank(s) on {device.type}, {name}, {how}")
    return setup


def be_deterministic() -> None:
    """The same bits from the same run on the same GPUs, as a CPU gives anyway; slower. It has not been run on a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass adds in any order
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # we read none


def choose_device_type(device_type: str = "") -> str:
    """
    "cuda", "mps" or "cpu": what is asked for, or for "" the best there is. UserError where it is not there, and where
    GPUs are there that torch cannot use, most often for an old driver, instead of falling back to the CPU.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    count = torch.cuda.device_count()
    if device_type in ("", "cuda") and count and not there["cuda"]:
        try:
            torch.cuda.init()
            why = "it does not say why"
        except Exception as error:
            why = first_line(error)
        raise UserError(f"this node has {count} GPU(s), which torch {torch.__version__} cannot use: {why}\n"
                        "    `. ./setup.sh` says what suits the driver; --device_type=cpu computes on the CPU")
    device_type = device_type or next(name for name, is_there in there.items() if is_there)
    if not there[device_type]:
        what = {"cuda": "this torch sees no GPU", "mps": "Metal is not available here"}[device_type]
        raise UserError(f"device_type={device_type}, but {what}; leave device_type out to use what is there")
    return device_type


def compute_init(device_type: str = "") -> tuple[int, int, torch.device]:
    """
    (rank, world_size, device) of this process; joins the process group under torchrun.

    One process per device, chosen by the *local* rank: the first rank of a second
    node uses device 0 of that node. UserError for a device that is not there.
    """
    device_type = choose_device_type(device_type)
    rank, local_rank, world_size = (int(os.environ.get(key, default)) for key, default in
                                    (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
    device = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device(device_type)
    if device_type == "cuda":
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise UserError(f"local rank {local_rank} has no GPU: this node has {count}; lower --nproc_per_node")
        # Read at the first allocation. A user's PYTORCH_CUDA_ALLOC_CONF takes precedence.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    elif device_type == "cpu":
        keep_freed_memory()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and not dist.is_initialized():
        join("nccl" if device_type == "cuda" else "gloo", rank, world_size)
    return rank, world_size, device


def keep_freed_memory() -> None:
    """
    The memory of a freed tensor serves the next one. Otherwise glibc gives large ones back to the system, which clears
    every page again for the next: a tenth of a step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    for parameter in (-3, -1) if mallopt else ():  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        mallopt(parameter, 2**31 - 1)


def join(backend: str, rank: int, world_size: int) -> None:
    """Join torchrun's process group. UserError with the line that ended an earlier attempt, if one did."""
    # The flight recorder: when a collective hangs, every rank writes down which collectives it was in.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    faulthandler.enable()  # a crash in native code shows where each thread is
    local_rank, ranks, node, nodes = (int(os.environ.get(key, default)) for key, default in (
        ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1), ("GROUP_RANK", 0), ("GROUP_WORLD_SIZE", 1)))
    # torchrun keeps its store over a restart, with the addresses of dead ranks: each attempt uses its own part of it.
    # A store of rank 0 (elastic runs, where the hosts' counts of restarts differ) is new in each attempt.
    job_store, *_ = next(dist.rendezvous("env://", timeout=SETUP_TIMEOUT))
    attempt = 0 if hosts_may_change() else os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    store = dist.PrefixStore(f"attempt {attempt}", job_store)
    first, host = rank - local_rank, socket.gethostname()
    of_node = range(first, first + ranks)
    store.set(f"process {rank}", str(os.getpid()))
    if local_rank == 0:
        store.set(f"host {node}", f"rank{f's {first} to {first + ranks - 1}' if ranks > 1 else f' {rank}'} on {host}")
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=SETUP_TIMEOUT)
    # An error that the user has to mend would only happen again: its line ends every restart, on all nodes.
    if job_store.check(["user error"]):
        raise UserError(job_store.get("user error").decode())
    tell_restarts.append(functools.partial(job_store.set, "user error"))
    node_process_ids[:] = filter(is_alive, [int(store.get(f"process {other}")) for other in of_node])
    hosts = [store.get(f"host {other}").decode() for other in (range(nodes) if rank == 0 else [0])]
    print0(*hosts, sep=", ")
    watching = store.clone() if nodes > 1 and local_rank == 0 else None
    heartbeat.start(f"rank {rank} on {host}", hosts, ending, node, watching)


def hosts_may_change() -> bool:
    """Whether this is an elastic run, as runs/multi_node.sh starts it: torchrun's store is not for the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False"


def several_hosts() -> bool:
    return int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1


def is_alive(process_id: int) -> bool:
    """Whether a process of this node exists."""
    try:
        os.kill(process_id, 0)
    except OSError:  # there is none, or its id now belongs to another user's process
        return False
    return True


def compute_cleanup(stop: "StopRequest | None" = None) -> None:
    """
    Leave the process group, when all ranks have come here. stop: if it was asked for on another host only, wait for
    this host's torchrun to ask as well: it may be about to start the ranks again, with hosts that have come, and would
    take a rank that has ended before for the end of the run.
    """
    if dist.is_initialized():
        stopping = any(gather_objects(stop is not None and stop.asked))  # waits for all ranks
        ending.set()
        deadline = time.monotonic() + SIGNALS_APART
        while stopping and several_hosts() and not stop.asked and time.monotonic() < deadline:
            time.sleep(0.05)
        dist.destroy_process_group()


def set_timeout(timeout: timedelta, *groups: dist.ProcessGroup | None) -> None:
    """How long collectives of these groups wait for a rank; None: the group of all ranks."""
    for group in groups if dist.is_initialized() else ():
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def after_first_step(*groups: dist.ProcessGroup | None) -> None:
    """
    Every rank has compiled and is training now: a rank that is silent for TRAINING_TIMEOUT hangs. Objects that exist
    now are kept to the end: the garbage collector skips them, or other ranks would wait for it.
    """
    set_timeout(TRAINING_TIMEOUT, None, *groups)
    gc.collect()
    gc.freeze()


class StopRequest:
    """
    Turns SIGTERM, SIGINT and SIGHUP (the terminal is gone) into `asked`, which the loop shares with all ranks. An
    ignored SIGHUP (nohup) stays ignored. Without torchrun, which repeats signals, a second Ctrl-C interrupts at once.

    A rank that waits in a collective on a GPU for a dead rank never runs Python's signal handler. A thread ends such a
    process, so that it does not hold up the job: DEATH_AFTER seconds after torchrun's signal if a rank of this node is
    dead, else after STUCK_AFTER. (Ranks of other nodes lose their connections to it, which NCCL notices.)
    """

    current: "StopRequest | None" = None  # of a training script

    def __init__(self):
        self.asked, self.interrupted = False, False  # interrupted: by Ctrl-C, without torchrun
        self.before = {}  # by signal: its handler without this class
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self.before[number] = signal.signal(number, self.ask)
        os.register_at_fork(after_in_child=self.forget)
        StopRequest.current = self
        if dist.is_initialized():
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # written to at once, even in a collective
            threading.Thread(target=self.watch, args=(reader,), daemon=True, name="signals").start()

    def watch(self, reader: int) -> None:
        """The thread: ends a process that would wait for a dead rank, but not one that is ending by itself."""
        os.read(reader, 1)
        time.sleep(DEATH_AFTER)
        why = "another rank of this node is dead"
        if ending.is_set() or all(map(is_alive, node_process_ids)):
            time.sleep(STUCK_AFTER - DEATH_AFTER)
            if self.asked:
                return
            why = f"stuck for {STUCK_AFTER} s after a signal, most likely waiting for a dead rank"
        os.write(2, f"{why}: this one ends, too\n".encode())
        os._exit(1)

    def forget(self) -> None:
        """In a forked child: a signal to it is none to this process, whose pipe it would write to."""
        signal.set_wakeup_fd(-1)
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def ask(self, number: int, _frame: object) -> None:
        """The signal handler."""
        again, self.asked = self.asked, True  # first of all: the next signal may come while this prints
        alone = number == signal.SIGINT and "RANK" not in os.environ
        self.interrupted |= alone
        if again and alone:
            raise KeyboardInterrupt
        if not again and is_rank0():
            hint = "; Ctrl-C again ends at once" * alone
            try:  # os.write: print is not safe in a signal handler
                name = signal.Signals(number).name
                os.write(1, f"{name}: finishing this step, or batch of an evaluation, then saving{hint}\n".encode())
            except OSError:
                discard_output()

    def end(self, step: int) -> NoReturn:
        """
        End a run that was stopped, once it is saved. After Ctrl-C its exit code is that of an interrupted command, so
        that what follows it in a script does not begin; under torchrun, which would start it again, 0. COLLECTIVE.
        """
        print0(f"stopped after step {step}; --resume=auto continues")
        compute_cleanup(self)
        raise SystemExit(128 + signal.SIGINT if self.interrupted else 0)


class Stopped(Exception):
    """Raised on all ranks in the same place, where some rank was asked to stop. See `Metrics.stoppable`."""


def until_stopped(items: Iterable[T], every: int = 1) -> Iterator[T]:
    """
    The items of each rank, in a training script until some rank is asked to stop; then Stopped is raised on all.
    COLLECTIVE at every `every`-th item. Ranks may have different numbers of items: those that have finished go on
    voting until all have.
    """
    for number, item in enumerate(items):
        if number % every == 0:
            vote(finished=False)
        yield item
    while not vote(finished=True):
        pass


def vote(finished: bool) -> bool:
    """Whether all ranks have finished. Stopped if any rank of a training script was asked to stop. COLLECTIVE."""
    if StopRequest.current is None:
        return True
    device = "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"
    votes = torch.tensor([StopRequest.current.asked, not finished], dtype=torch.float32, device=device)
    all_reduce_sum(votes)
    asked, unfinished = votes.tolist()
    if asked:
        raise Stopped
    return unfinished == 0


def print0(*values: object, sep: str = " ") -> None:
    """
    Print on rank 0, at once. A run continues when its terminal, or the reader of its pipe (`| tee`), is gone, and
    without its last lines while the disk that they go to is full.
    """
    if is_rank0():
        try:
            print(*values, sep=sep, flush=True)
        except OSError as error:
            if error.errno in (errno.EIO, errno.EPIPE):
                discard_output()
            elif error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise


def discard_output() -> None:
    """Send all further output to /dev/null; errors as well if they went to the same place."""
    for descriptor in (1, 2) if os.path.sameopenfile(1, 2) else (1,):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def on_first_of_host() -> bool:
    """Whether this is the rank of its host that does there what is done once on each disk."""
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def rank0_first(function, *args):
    """
    Call on rank 0, then on the first rank of each host, whose disk may be its own, then on the others: what it makes
    (data, a tokenizer) is there for them. COLLECTIVE.
    """
    own_turn = 0 if is_rank0() else 1 if on_first_of_host() else 2
    for turn in range(3):
        if turn == own_turn:
            result = function(*args)
        if dist.is_initialized():
            dist.barrier()
    return result


def from_rank0(function, *args):
    """
    What the function returns on rank 0, on every rank: for decisions that must be the same. A UserError that it raises
    there is raised on every rank. COLLECTIVE.
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


def rank_and_size() -> tuple[int, int]:
    """This process's rank, and how many ranks there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather_objects(value: T) -> list[T]:
    """The value of each rank, in the order of ranks, on every rank. COLLECTIVE."""
    values = [value] * rank_and_size()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def require_same(what: str, values: dict[str, object], advice: str, ranks: int | None = None) -> None:
    """
    UserError on every rank where the values of some rank are not those of the first of its group of so many neighbours
    (None: of rank 0): "rank 1 {what} than rank 0 (the first is {name of the value}); {advice}". COLLECTIVE.
    """
    of_ranks = gather_objects(values)
    for rank, theirs in enumerate(of_ranks):
        expected = of_ranks[first := rank // ranks * ranks if ranks else 0]
        if different := [name for name in expected | theirs if expected.get(name) != theirs.get(name)]:
            raise UserError(f"rank {rank} {what} than rank {first} (the first is {different[0]}); {advice}")


def reduce_scatter(output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None):
    """
    Start output = this rank's chunk of the sum of all ranks' inputs; returns the work to `wait()` for.

    input: (N · n,), output: (n,); keep both until the wait is over. Gloo's own reduce-scatter is an all-reduce, which
    sends twice the bytes and blocks when it starts: with gloo the chunks are sent to their owners, who add them.
    """
    if dist.get_backend(group) != "gloo":
        return reduce_scatter_single(output, input, group=group, async_op=True)
    received = torch.empty_like(input)
    return SumOfChunks(dist.all_to_all_single(received, input, group=group, async_op=True), received, output)


class SumOfChunks:
    """Chunks that are being sent to their owner; `wait` adds them in the order of ranks."""

    def __init__(self, work: dist.Work, received: Tensor, output: Tensor):
        self.work, self.received, self.output = work, received, output

    def wait(self) -> None:
        self.work.wait()
        torch.sum(self.received.view(-1, len(self.output)), dim=0, out=self.output)


def all_reduce_sum(tensor: Tensor) -> None:
    """The tensor becomes its sum over the ranks, in place; nothing happens on one rank."""
    if dist.is_initialized():
        dist.all_reduce(tensor)


def concatenate_parts(part: np.ndarray) -> np.ndarray:
    """
    The arrays of all ranks end to end, in the order of ranks, on every rank; a rank's may be empty. They travel in
    pieces, so that a GPU needs little memory for it. COLLECTIVE.
    """
    if not dist.is_initialized():
        return part
    sizes = gather_objects(len(part))
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    whole = np.empty(sum(sizes), part.dtype)
    for rank, own in enumerate(np.split(whole, np.cumsum(sizes)[:-1])):  # views of each rank's range
        if rank == dist.get_rank():
            own[:] = part
        content = torch.from_numpy(own.view(np.uint8))
        for start in range(0, len(content), PIECE_BYTES):
            piece = content[start : start + PIECE_BYTES]
            sent = piece.to(device)  # on a CPU it is the piece itself
            dist.broadcast(sent, src=rank)
            piece.copy_(sent)
    return whole


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
        # ATEN_CPU_CAPABILITY=avx2 limits torch's kernels, whatever the CPU has.
        fast &= torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    else:
        fast = True  # Apple GPUs: half the bytes, the same rate
    return torch.bfloat16 if fast else torch.float32
