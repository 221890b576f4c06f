"""
Other processes: a function on several ranks (joined by gloo, or by NCCL where there is a GPU for each), which end in
any case. Scripts as processes of their own, also under torchrun, are in warm_python.py.
"""
import atexit
import faulthandler
import gc
import glob
import importlib
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

REPO = Path(__file__).parent.parent
# What the tests find is this repo's, whatever checkout the environment has installed and wherever they are run. Python
# 3.11's forkserver gets no path from us but by the environment, and so do programs that are started.
if sys.path[0] != str(REPO):
    sys.path.insert(0, str(REPO))
inherited = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
if inherited[:1] != [str(REPO)]:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPO), *inherited])
# In ranks, torchruns and the server of scripts as well: all import this file.
found = importlib.import_module("nanochat").__file__
assert Path(found).is_relative_to(REPO), f"the tests of {REPO} would test {found}"

# Ranks and scripts are forked from a server that has imported what takes seconds. It starts with the first call and
# ends with this process.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining", "pytest", "pyarrow.parquet",
    "tiktoken", "tokenizers", "safetensors.torch", "yaml", "requests", "torch.distributed.run",
    "nanochat.eval.core_eval", "nanochat.training.run_report", "nanochat.training.resharding",
    "nanochat.eval.task_eval", "nanochat.eval.eval_bundle", "nanochat.corpus.learn_tokenizer",
    "nanochat.corpus.make_dataset", "nanochat.training.starting", "nanochat.training.metrics",
    "nanochat.optim.optimizers", "nanochat.optim.pipeline", "nanochat.training.rollouts",
    "nanochat.training.session", "nanochat.optim.schedule", "nanochat.tasks.notes",
    "nanochat.plan.choice", "nanochat.plan.step_trial",
])

CONSEQUENCES = 0.3  # seconds after the first failure in which other ranks may report: the cause can arrive later


class Failure(NamedTuple):
    """How a rank ended badly: when on the machine's clock, what was raised (None: the process died), and the story."""

    time: float
    error: BaseException | None
    text: str


def run_on_ranks(world_size: int, function: Callable, *args, timeout: float = 300) -> list:
    """
    [function(rank, world_size, *args) of each rank]; the function is a test module's own, args and results are pickled.

    Each rank is a process with the environment of this moment, one thread, and the default process group joined. The
    earliest exception of a rank is raised here, with the tracebacks of all as notes. A rank that dies is a
    RuntimeError; one that has not finished after `timeout` seconds dies with its stacks as its traceback. No rank
    outlives the call.
    """
    processes, connections = [], []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                job = (function.__module__, function.__qualname__, pickle.dumps(args), dict(os.environ), timeout)
                process = context.Process(target=rank_main, args=(rank, world_size, *job, folder, theirs), daemon=True)
                process.start()
                theirs.close()  # so that the rank's death is the end of the file here
                processes.append(process)
                connections.append(ours)
            outcomes = collect(processes, connections, Path(folder))
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
    failures = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, Failure)}
    if failures:
        first = min(failures.values(), key=lambda failure: failure.time)
        error = first.error or RuntimeError(f"a rank of {world_size} died")
        for rank, failure in failures.items():
            error.add_note(f"--- rank {rank} of {world_size}\n{failure.text}")
        raise error
    return [outcomes[rank] for rank in range(world_size)]


def collect(processes: list, connections: list[Connection], folder: Path) -> dict:
    """What each rank reports, or has reported shortly after the first failure: {rank: result or Failure}."""
    outcomes, patience = {}, None
    pending = {connection: rank for rank, connection in enumerate(connections)}
    while pending and (ready := wait(list(pending), patience)):
        for connection in ready:
            rank = pending.pop(connection)
            try:
                outcomes[rank] = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                # Errors of other ranks can only follow from a death: a rank that raised keeps its connections open.
                processes[rank].join(5)
                died = f"died, exit code {processes[rank].exitcode}\n{(folder / str(rank)).read_text()}"
                outcomes[rank] = Failure(0.0, None, died)
            if isinstance(outcomes[rank], Failure):
                patience = CONSEQUENCES
    return outcomes


def device_of(rank: int, world_size: int) -> torch.device:
    """A GPU for each rank where there are so many, else the CPU for all."""
    return torch.device("cuda", rank) if torch.cuda.device_count() >= world_size else torch.device("cpu")


def rank_main(
    rank: int, world_size: int, module: str, name: str, args: bytes,
    environment: dict, timeout: float, folder: str, report: Connection,
) -> None:
    """The life of one rank: join, call, report, and stay until killed, so that no other rank loses a connection."""
    gc.freeze()  # what was imported before the fork need not be searched for garbage in every process
    # The end of a script is not this process's: its connections stay. What the server registered is not this process's.
    atexit._clear()
    distributed = importlib.import_module("nanochat.runtime.distributed")
    distributed.os = types.SimpleNamespace(**vars(os) | {"_exit": sys.exit})
    dump = open(Path(folder, str(rank)), "w")
    faulthandler.enable(dump)
    faulthandler.dump_traceback_later(timeout, exit=True, file=dump)
    try:
        os.environ.clear()  # the server's is that of the first call
        os.environ.update(environment | {"RANK": str(rank), "LOCAL_RANK": str(rank),
                                         "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)})
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if "lo" in dict(socket.if_nameindex()).values() else "lo0"
        torch.set_num_threads(1)
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        device = device_of(rank, world_size)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", f"file://{folder}/rendezvous", rank=rank,
            world_size=world_size, timeout=timedelta(seconds=2 * timeout)
        )
        outcome = pickle.dumps(function(rank, world_size, *pickle.loads(args)))
        if dist.is_initialized():
            dist.barrier()  # finds a rank with one collective more than the others
    except BaseException as error:
        outcome = pickle.dumps(Failure(time.monotonic(), portable(error), traceback.format_exc()))
    report.send_bytes(outcome)
    report.poll(None)  # nothing ever comes: ends when the parent kills this rank, or is gone itself
    os._exit(0)


def portable(error: BaseException) -> BaseException | None:
    """The error, if it survives pickling."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return None


def run_as_main(module: str, args: Sequence[str]) -> None:
    """
    The module as this process's `__main__`. The machine's speed, the unit of the MFU, is not measured. A test may name
    a function of its module in the environment, CHANGE, that is called before. KILL_*: see `Job`.
    """
    from nanochat.runtime import flops

    flops.measured_matmul_flops = lambda *_: 1e11
    if change := os.environ.get("CHANGE"):
        test, _, name = change.rpartition(".")
        getattr(importlib.import_module(test), name)()
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    if first and os.environ.get("RANK", "-") in os.environ.get("KILL_RANKS", ""):
        pattern, number = os.environ["KILL_AT"], int(os.environ["KILL_BY"])
        if number == signal.SIGTERM:
            wait_for_signal(pattern)
        else:
            threading.Thread(target=kill, args=(pattern, number), daemon=True).start()
    sys.argv = [module, *args]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def kill(pattern: str, number: int) -> None:
    """A signal from the test's process could come too late on a busy machine."""
    while not glob.glob(pattern):
        time.sleep(0.001)
    os.kill(os.getpid(), number)


def wait_for_signal(pattern: str) -> None:
    """Once a path matches, this process waits for a signal before its next forward pass: so none comes too late."""
    from nanochat.model.gpt import GPT
    from nanochat.runtime.stopping import StopRequest

    forward = GPT.forward

    def wait_and_forward(*args, **settings):
        while glob.glob(pattern) and not StopRequest.current.asked:
            time.sleep(0.001)
        return forward(*args, **settings)

    GPT.forward = wait_and_forward
