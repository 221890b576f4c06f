"""
A Python that need not start: its processes are forked from one that has imported torch, in a tenth of a second.

`warm_python()` is the path of a program that takes `-m module` of this repo or torch.distributed.run, or `-c program`,
as Python does; anything else, and a program with open files, it hands to Python itself. Beside it is a `torchrun`. The
program is a small real process: its standard files, environment, folder and ignored signals are those of the fork;
signals that come to it go on to the fork, and its death is that of the fork's process group; it ends as the fork ends.
sys.executable of the fork is this program again.
"""
import atexit
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn

import torch
from ranks import REPO, context, run_as_main

PROGRAM = r"""#!{python} -IS
import os, sys
args = sys.argv[2:] if sys.argv[1:2] == ["-u"] else sys.argv[1:]
if os.path.basename(sys.argv[0]) == "torchrun":
    args = ["-m", "torch.distributed.run", *args]
ours = args[1:2] == ["torch.distributed.run"] or args[1:2] and args[1].split(".")[0] in ("scripts", "bench", "nanochat")
alone = len(os.listdir("/dev/fd")) <= 4  # no files but the standard ones are handed on, and this folder
if not (args[:1] == ["-c"] and alone or args[:1] == ["-m"] and ours):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
import json, signal, socket
server, numbers = socket.socket(socket.AF_UNIX), (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
server.connect({address!r})
socket.send_fds(server, [b"x"], [0, 1, 2])
ignored = [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN]
request = [os.path.realpath(__file__), args, dict(os.environ), os.getcwd(), ignored]
server.sendall(json.dumps(request).encode() + b"\n")
for number in numbers:  # ignored ones as well: the fork may have a handler of its own
    signal.signal(number, lambda number, _: server.send(bytes([number])))
status = int(server.makefile().readline() or 1)
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def warm_python() -> str:
    return str(started()[0])


@functools.cache
def started() -> tuple[Path, *tuple[object, ...]]:
    """The program, whose server starts with the first call; what is kept until this process ends."""
    folder = tempfile.TemporaryDirectory()
    address, program, ready = Path(folder.name, "address"), Path(folder.name, "python"), context.Event()
    program.write_text(PROGRAM.format(python=sys.executable, address=str(address)))
    program.chmod(0o755)
    program.with_name("torchrun").symlink_to(program)
    server = context.Process(target=serve, args=(str(address), ready), daemon=True)
    server.start()
    while not ready.wait(0.1):
        assert server.is_alive(), "the server of scripts has ended"
    return program, folder, server


def run_module(module: str, *args: str, env: dict | None = None, timeout: float = 300,
               fresh: bool = False) -> subprocess.CompletedProcess:
    """`python -m module args…` from the repo's root, with the test's environment; `fresh` really starts Python."""
    command = [sys.executable if fresh else warm_python(), "-m", module, *args]
    return subprocess.run(command, cwd=REPO, env=os.environ | (env or {}), timeout=timeout, text=True,
                          capture_output=True)


class Job:
    """
    torchrun with two ranks of a script, its output in a file. kill: (ranks, pattern): the first process of each of
    these ranks ("1", "01") gets the signal `by` once a path matches. SIGTERM goes to torchrun instead, while the rank
    waits for it.
    """

    def __init__(self, log: Path, module: str, args: list[str], launcher: tuple[str, ...] = (),
                 kill: tuple[str, Path] | None = None, by: int = signal.SIGKILL, **environment: str):
        self.log = log
        environment |= {"OMP_NUM_THREADS": "1"}
        if kill:
            environment |= {"KILL_RANKS": kill[0], "KILL_AT": str(kill[1]), "KILL_BY": str(int(by))}
        command = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *launcher,
                   "-m", module, "--", *args]
        with open(log, "w") as output:
            self.process = subprocess.Popen(command, cwd=REPO, stdout=output, stderr=subprocess.STDOUT,
                                            env=os.environ | environment)
        if kill and by == signal.SIGTERM:
            while not kill[1].exists() and self.process.poll() is None:
                time.sleep(0.01)
            self.process.send_signal(by)

    def text(self) -> str:
        return self.log.read_text()

    def end(self, timeout: float = 300) -> int:
        try:
            return self.process.wait(timeout)
        finally:
            self.process.kill()


def serve(address: str, ready) -> None:
    """For each connection a process, which forks what was asked for and waits for it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(100)
    ready.set()
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            attend(connection)
        connection.close()
        os.waitpid(-1, os.WNOHANG)  # one that has ended, if any


def attend(connection: socket.socket) -> NoReturn:
    os.setsid()
    _, descriptors, *_ = socket.recv_fds(connection, 1, 3)
    stream = connection.makefile("rb")
    executable, args, environment, folder, ignored = json.loads(stream.readline())
    if (pid := os.fork()) == 0:
        connection.close()
        for target, descriptor in enumerate(descriptors):
            os.dup2(descriptor, target)
            os.close(descriptor)
        sys.executable, sys.stdin = executable, open(0, closefd=False)
        os.chdir(folder)
        sys.path[:0] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        torch.set_num_threads(1)
        like_python(environment, ignored, lambda: run(args))
    for descriptor in descriptors:
        os.close(descriptor)
    ended = threading.Event()
    threading.Thread(target=forward, args=(stream, pid, ended), daemon=True).start()
    _, status = os.waitpid(pid, 0)
    ended.set()
    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


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


def forward(stream: BinaryIO, pid: int, ended: threading.Event) -> None:
    """Signals of the program, until it has died."""
    while number := stream.read(1):
        os.kill(pid, number[0])
    if not ended.is_set():
        os.killpg(0, signal.SIGKILL)  # with this process


def run(args: Sequence[str]) -> None:
    """`-m module args…` or `-c program args…`."""
    if args[0] == "-m":
        run_as_main(args[1], args[2:])
        return
    sys.argv = ["-c", *args[2:]]
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(args[1])
        file.flush()
        runpy.run_path(file.name, run_name="__main__")
