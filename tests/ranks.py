"""
Other processes: a function on several ranks (joined by gloo, or by NCCL where there is a GPU for each), and a script
under torchrun; a script by itself is in warm_python.py. They end in any case.
"""
import atexit
import faulthandler
import gc
import glob
import importlib
import multiprocessing
import os
import pickle
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple, NoReturn

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
    "nanochat.eval.task_eval", "nanochat.corpus.eval_bundle", "nanochat.corpus.learn_tokenizer",
    "nanochat.corpus.make_dataset", "nanochat.training.starting", "nanochat.training.metrics",
    "nanochat.optim.optimizers", "nanochat.optim.pipeline", "nanochat.training.rollouts",
    "nanochat.training.session", "nanochat.optim.schedule", "nanochat.tasks", "nanochat.plan.machines",
    "nanochat.plan.step_trial",
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


def begin(environment: dict, stdout: Path, stderr: Path) -> None:
    """What a process has that was started rather than forked: environment, folder, path, output and one thread."""
    gc.freeze()
    flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
    for descriptor, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, flags), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    os.chdir(REPO)
    torch.set_num_threads(1)


def run_as_main(module: str, args: Sequence[str]) -> None:
    """
    The module as this process's `__main__`. The machine's speed, the unit of the MFU, is not measured. A test may name
    a function of its module in the environment, CHANGE, that is called before.
    """
    from nanochat.runtime import flops

    flops.measured_matmul_flops = lambda *_: 1e11
    if change := os.environ.get("CHANGE"):
        test, _, name = change.rpartition(".")
        getattr(importlib.import_module(test), name)()
    sys.argv = [module, *args]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def send_in_evaluation(number: int, name: str, step: int) -> list[int]:
    """
    From here on this process sends itself a signal in the first call of a function ("module.function") at this step of
    a training script. Returns a list that gets the step of each call.
    """
    from nanochat.training.saving import CheckpointWriter

    where, _, function = name.rpartition(".")
    owner = pkgutil.resolve_name(where)
    original, set_state, steps, calls = getattr(owner, function), CheckpointWriter.set_state, [0], []

    def set_and_count(writer, step: int, *others, **meta) -> None:
        steps.append(step)
        set_state(writer, step, *others, **meta)

    def called(*args, **settings):
        calls.append(steps[-1])
        if calls.count(step) == 1 and calls[-1] == step:
            os.kill(os.getpid(), number)
        return original(*args, **settings)

    CheckpointWriter.set_state = set_and_count
    setattr(owner, function, called)
    return calls


class ForkedRank(subprocess.Popen):
    """A rank as torchrun starts it with Popen, but forked from torchrun's process, which has imported everything."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others) -> None:
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            try:
                rank_of_torchrun(args, env)
            finally:
                os._exit(1)  # nothing of torchrun's goes on in here


def rank_of_torchrun(command: Sequence[str], environment: dict) -> None:
    """The life of a rank: `python -u -m module args…`."""
    os.setsid()
    from nanochat.runtime import heartbeat

    heartbeat.BEAT = float(environment["BEAT"])
    if environment["RANK"] in environment.get("KILL_RANKS", "") and environment["TORCHELASTIC_RESTART_COUNT"] == "0":
        threading.Thread(target=kill, args=(environment["KILL_AT"], int(environment["KILL_BY"])), daemon=True).start()
        wait_for_signal(environment["KILL_AT"])
    like_python(environment, [], lambda: run_as_main(command[3], command[4:]))


def like_python(environment: dict, ignored: Sequence[int], run: Callable[[], None]) -> NoReturn:
    """The life of a process that was forked rather than started, with the signals that Python has, and its ends."""
    gc.freeze()
    atexit._clear()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN if signal.SIGINT in ignored else signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    status = 0
    try:
        run()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def kill(pattern: str, number: int) -> None:
    """A signal from the test's process could come too late on a busy machine. SIGTERM goes to torchrun."""
    while not glob.glob(pattern):
        time.sleep(0.001)
    os.kill(os.getppid() if number == signal.SIGTERM else os.getpid(), number)


def wait_for_signal(pattern: str) -> None:
    """Once a path matches, this process waits for a signal before its next forward pass: so none comes too late."""
    from nanochat.model.gpt import GPT
    from nanochat.runtime.stopping import StopRequest

    forward, ask, heard = GPT.forward, StopRequest.ask, threading.Event()

    def heard_and_ask(self, *args) -> None:
        heard.set()
        ask(self, *args)

    def wait_and_forward(self, *args, **settings):
        while glob.glob(pattern) and not heard.is_set():
            time.sleep(0.001)
        return forward(self, *args, **settings)

    GPT.forward, StopRequest.ask = wait_and_forward, heard_and_ask


def torchrun_main(command: Sequence[str], environment: dict, log: Path) -> None:
    """The life of torchrun, and before it forks, that of its ranks."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    begin(environment, log, log)
    subprocess_handler.Popen = ForkedRank
    try:
        run_as_main(command[2], command[3:])
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


class Job:
    """
    torchrun with two ranks of a script, its output in a file; all are forked where the imports are done. kill: (ranks,
    pattern): the first process of each of these ranks ("1", "01") gets SIGKILL, from its own thread, once a path
    matches; SIGTERM goes to torchrun instead. beat: seconds between
    two signs of life.
    """

    def __init__(self, log: Path, module: str, args: list[str], launcher: tuple[str, ...] = (),
                 kill: tuple[str, Path] | None = None, by: int = signal.SIGKILL, beat: float = 5):
        self.log = log
        environment = os.environ | {"OMP_NUM_THREADS": "1", "BEAT": str(beat)}
        if kill:
            environment |= {"KILL_RANKS": kill[0], "KILL_AT": str(kill[1]), "KILL_BY": str(int(by))}
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *launcher]
        command = [*launch, "-m", module, "--", *args]
        self.process = context.Process(target=torchrun_main, args=(command, environment, log), daemon=True)
        self.process.start()

    def text(self) -> str:
        return self.log.read_text()

    def end(self, timeout: float = 300) -> int:
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"not ended after {timeout} s:\n{self.text()}"
        return self.process.exitcode
