"""
Runs generated Python in separate processes, to see whether it does what it should (HumanEval).

    run_python("print(1 + 1)")    # Result(ok=True, stdout='2\\n', stderr='', error=None, unprotected=())

The program has Python's standard library, an empty environment, no input, and a folder of its own that is removed
afterwards. Its supervisor, sandbox.py, builds the walls around it.

This contains a model's mistakes. It is not a sandbox against an attacker:

- The program reads every file that this user may read, keys included. It cannot send them away, but it can print them.
- It may use devices (a GPU), and anything that listens on a socket in the file system (Docker, a desktop).
- Until its time is up it may use all cores, MAX_PROCESSES times `memory_bytes`, and the disk below its folder. A
  bug in the kernel can give it everything.
- If the kernel has Landlock (Linux 5.13), it writes only in its folder.
- All else holds on Linux if namespaces are allowed; in most containers they are not. `Result.unprotected` names the
  missing walls:

      "network"      the program may use the network
      "sight"        the program sees all processes of this machine and their command lines (in /proc)
      "processes"    a process that leaves the program's process group again and again, fast, can survive (on macOS
                     a process that leaves it once). Before Linux 6.12 the program may end other processes of this user;
                     for root it runs under an unused user id, if that id may read Python's library
      "files"        the program writes wherever this user may
      "modes"        the program may change modes, times and attributes of all files that this user owns (root: nearly
                     all files), unless it runs under an unused user id
      "memory"       there is no memory limit (macOS)
"""
import ast
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from nanochat.runtime.console import print0

SANDBOX = str(Path(__file__).with_name("sandbox.py"))
GRACE_S = 60  # beyond the time limit, for starting and ending on a loaded machine


class Result(NamedTuple):
    """How a program ended."""

    ok: bool                      # on its own, with exit code 0
    stdout: str
    stderr: str
    error: str | None             # "timeout", "too much output", "exit code 1: AssertionError", "signal 11"
    unprotected: tuple[str, ...]  # walls that this machine does not allow, by the names above


def run_python(
    code: str, timeout: float = 5.0, memory_bytes: int = 512 * 2**20, max_output_bytes: int = 2**20
) -> Result:
    """
    Run a program to its end, at most `timeout` seconds. From any thread, many at a time.

    memory_bytes: address space of each of its processes. max_output_bytes: of stdout and of stderr; more ends it.
    RuntimeError if the supervisor fails. A folder that it cannot remove causes a warning.
    """
    settings = repr((timeout, memory_bytes, max_output_bytes, tempfile.gettempdir()))
    command = [sys.executable, "-I", "-S", "-X", "utf8", SANDBOX, settings]
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, env={}, cwd="/", start_new_session=True) as supervisor:
        report = complaint = b""
        try:
            report, complaint = supervisor.communicate(code.encode("utf-8", "surrogatepass"), timeout + GRACE_S)
        except subprocess.TimeoutExpired:
            # The supervisor was stopped, or cannot end the program's processes; or this process was stopped.
            supervisor.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                report, complaint = supervisor.communicate(timeout=1)
    # A program without walls can kill its supervisor, or end it silently.
    if supervisor.returncode < 0 or not report and not complaint:
        return Result(False, "", "", "killed", ("processes",))
    if supervisor.returncode or not report:
        raise RuntimeError(f"the supervisor of a program failed: {complaint.decode(errors='replace')}")
    if complaint:
        print0("warning:", complaint.decode(errors="replace").strip())
    limit, status, stdout, stderr, unprotected = ast.literal_eval(report.decode())
    error = limit or reason(status, stderr)
    return Result(error is None, stdout, stderr, error, tuple(unprotected))


def reason(status: int, stderr: str) -> str | None:
    """Why a program within its limits did not end well, None if it did. status: from os.wait."""
    if os.WIFSTOPPED(status):
        return "killed"
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return None
    if code < 0:
        return f"signal {-code}"
    last = stderr.strip().rpartition("\n")[2].strip()
    return f"exit code {code}: {last}".removesuffix(": ")
