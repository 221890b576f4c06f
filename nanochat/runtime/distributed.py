"""How a process joins the other ranks, how long it waits for them, and how it leaves them."""
import atexit
import contextlib
import faulthandler
import gc
import os
import socket
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from nanochat.runtime.collectives import first_problem, from_rank0, gather_objects, rank_and_size
from nanochat.runtime.console import is_rank0, print0
from nanochat.runtime.devices import choose_device_type, compute_dtype, prepare_device
from nanochat.runtime.errors import UserError
from nanochat.runtime.exits import job_stores
from nanochat.runtime.files import base_dir

# How long a rank waits for the others in a collective: at first rank 0 may be making data, or ranks may be compiling.
# A rank that dies is noticed at once, by torchrun on its host and elsewhere by the lost connection. A rank that falls
# silent (a stopped process, a host that is cut off) costs this time; then torchrun restarts the ranks.
SETUP_TIMEOUT = timedelta(minutes=60)
TRAINING_TIMEOUT = timedelta(minutes=10)
# Seconds between the signals of two hosts' torchruns. Each torchrun looks once a second for hosts that want to join.
MAX_SIGNAL_DELAY = 5


def environment_number(name: str, default: int) -> int:
    """A number that torchrun sets; the default in a process without it."""
    return int(os.environ.get(name, default))


def set_up(device_type: str, dtype: str) -> tuple[int, int, torch.device, torch.dtype]:
    """
    Begin a training script: join the other ranks, choose and print device and dtype. Returns rank, world_size, device,
    dtype of parameters and activations. COLLECTIVE. `set_compile` comes later, when settings and files are checked,
    because it takes seconds.
    """
    device = compute_init(device_type)
    rank, world_size = rank_and_size()
    if environment_number("GROUP_WORLD_SIZE", 1) > 1:
        require_shared_folder()
    # Hosts may have different processors, but all ranks need one dtype.
    model_dtype = from_rank0(compute_dtype, dtype, device)
    print0(f"{world_size} rank(s) on {device.type}, {str(model_dtype).removeprefix('torch.')}")
    return rank, world_size, device, model_dtype


def compute_init(device_type: str) -> torch.device:
    """
    The device of this process; joins the process group under torchrun.

    One process per device, chosen by the *local* rank: the first rank of a second
    node uses device 0 of that node. UserError for a device that is not there.
    """
    device_type = choose_device_type(device_type)
    device = prepare_device(device_type, environment_number("LOCAL_RANK", 0))
    if "RANK" in os.environ and not dist.is_initialized():
        join("nccl" if device_type == "cuda" else "gloo")
    return device


def join(backend: str) -> None:
    """
    Join torchrun's process group, and print where each rank is. UserError with the line that ended an earlier attempt,
    if one did.
    """
    # A crash in native code then shows where each thread is.
    faulthandler.enable()
    # torchrun keeps its store over a restart, with the addresses of dead ranks: each attempt uses its own part of it.
    # A store of rank 0 (elastic runs, where the hosts' counts of restarts differ) is new in each attempt.
    job_store, rank, world_size = next(dist.rendezvous("env://", timeout=SETUP_TIMEOUT))
    attempt = 0 if hosts_may_change() else environment_number("TORCHELASTIC_RESTART_COUNT", 0)
    store = dist.PrefixStore(f"attempt {attempt}", job_store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=SETUP_TIMEOUT)
    # An error that the user has to fix would only happen again: its line ends every restart, on all nodes.
    if job_store.check(["user error"]):
        raise UserError(job_store.get("user error").decode())
    job_stores.append(job_store)
    hosts = Counter(gather_objects(socket.gethostname()))
    if world_size > 1:
        print0(", ".join(f"{ranks} ranks on {host}" for host, ranks in hosts.items()))


def require_shared_folder() -> None:
    """UserError on every rank unless all hosts see the base folder of rank 0. COLLECTIVE."""
    def make_mark() -> str:
        base_dir().mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix=".shared-", dir=base_dir())

    mark = Path(from_rank0(make_mark))
    problem = None
    # Only the name is compared, because hosts may mount the disk in different places.
    if not (base_dir() / mark.name).exists():
        problem = f"{base_dir()} on {socket.gethostname()} is not rank 0's: all hosts must share the base folder"
    problem = first_problem(problem)
    if is_rank0():
        mark.rmdir()
    if problem:
        raise UserError(problem)


def hosts_may_change() -> bool:
    """Whether this is an elastic run, as runs/multi_node.sh starts it: torchrun's store is not for the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False"


def mark_begun() -> None:
    """Tell restarts by the same torchrun, which repeats all settings, that they must go on. Rank 0 only."""
    for store in job_stores:
        store.set("begun", "1")


def was_begun() -> bool:
    """Whether ranks that this torchrun started before have called `mark_begun`. Never in an elastic run."""
    return any(store.check(["begun"]) for store in job_stores)


def compute_cleanup(stopping: bool = False) -> None:
    """
    The end of a program: leave the process group when all ranks are here. Under torchrun it does not return: the
    process ends with exit code 0. stopping: a signal has asked this rank to stop. It may come from a torchrun that is
    about to restart the ranks with hosts that have joined. If a rank on another host ended before its torchrun knew of
    them, torchrun would think that the run is over: so all wait until every torchrun knows.
    """
    if not dist.is_initialized():
        return
    # This also waits for all ranks.
    if any(gather_objects(stopping)) and environment_number("GROUP_WORLD_SIZE", 1) > 1:
        time.sleep(MAX_SIGNAL_DELAY)
    dist.destroy_process_group()
    # What an orderly exit does, but the interpreter is not taken down: that would abort the process if a thread of gloo
    # has yet to drop a message's tensor, for which it needs the GIL. destroy_process_group waits for the threads of the
    # default group only, not for other groups'.
    atexit._run_exitfuncs()
    for output in (sys.stdout, sys.stderr):
        # The reader of the pipe may be gone, or the log's disk full.
        with contextlib.suppress(OSError):
            output.flush()
    os._exit(0)


# ---- Timeouts


def set_timeout(timeout: timedelta, *groups: dist.ProcessGroup | None) -> None:
    """Set how long collectives of these groups wait for a rank; None: the group of all ranks."""
    if dist.is_initialized():
        for group in groups:
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def after_first_step(*groups: dist.ProcessGroup | None) -> None:
    """
    Every rank has compiled and is training now: a rank that is silent for TRAINING_TIMEOUT hangs. The garbage collector
    skips objects that exist now, which stay to the end; otherwise other ranks would wait for it.
    """
    set_timeout(TRAINING_TIMEOUT, None, *groups)
    gc.collect()
    gc.freeze()
