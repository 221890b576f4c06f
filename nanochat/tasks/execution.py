"""
Runs generated Python apart from this program, to see whether it does what it should (HumanEval).

    run_python("print(1 + 1)")    # Result(ok=True, stdout='2\\n', stderr='', error=None, unprotected=())

The program has Python's standard library, an empty environment, no input, and a folder of its own that is removed
afterwards. This file, run as a script, is its supervisor, which ends and removes everything that is left of it:

    here ── supervisor ── init ── the program ── what it starts
                          (reads the output, keeps the limits; process 1 of a namespace: the kernel ends all with it)

This keeps apart what a model writes by mistake. It is no sandbox against an attacker:

- The program reads every file that this user may read, keys included. It cannot send them away, but it can print them.
- It may use devices (a GPU), and anything that listens on a socket in the file system (Docker, a desktop).
- Until its time is over it may use all cores, MAX_PROCESSES times `memory_bytes`, and the disk below its folder. A
  mistake in the kernel can give it everything.
- Where the kernel has Landlock (Linux 5.13) it writes nowhere but in its folder.
- All else holds on Linux where namespaces are allowed; in most containers they are not. `Result.unprotected` lists what
  could not be guarded:

      "network"      the program may use the network
      "sight"        the program sees all processes of this machine and their command lines (in /proc)
      "processes"    a process that leaves the program's process group again and again, fast, can stay behind (on macOS
                     one that leaves it once). Before Linux 6.12 the program may end other processes of this user; for
                     root it runs under an unused user id, if that id may read Python's library
      "files"        the program writes wherever this user may
      "modes"        the program may change modes, times and attributes of all files that this user owns (root: nearly
                     all there are), unless it runs under an unused user id
      "memory"       there is no memory limit (macOS)
"""
import ast
import contextlib
import ctypes
import os
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

MAX_PROCESSES = 16             # of a program at once, threads included
MAX_FILE_BYTES = 16 * 2**20    # of each file
GRACE_S = 60                   # what starting and ending may take on a loaded machine, beyond the time limit
POLL_S = 0.002                 # between two checks whether the program has ended

LINUX = sys.platform == "linux"
LIBC = ctypes.CDLL(None)
NAMESPACES = 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000  # IPC, users, processes, network: linux/sched.h
MOUNTS = 0x20000       # one more namespace
BIND = 0x1000          # linux/mount.h
PROC_FLAGS = 0b1111    # read-only; no setuid programs, no devices, nothing to execute
PDEATHSIG = 1          # linux/prctl.h
CHILD_SUBREAPER = 36
NO_NEW_PRIVS = 38
MOUNT_SETATTR = 442  # system calls; their numbers are the same on every architecture
LANDLOCK = 444
SIGKILL = 9     # the module `signal` would take a tenth of the start


class Result(NamedTuple):
    """What came of a program."""

    ok: bool                      # it ended by itself, with exit code 0
    stdout: str
    stderr: str
    error: str | None             # "timeout", "too much output", "exit code 1: AssertionError", "signal 11"
    unprotected: tuple[str, ...]  # what is not guarded on this machine: the names above


def run_python(
    code: str, timeout: float = 5.0, memory_bytes: int = 512 * 2**20, max_output_bytes: int = 2**20
) -> Result:
    """
    Run a program to its end, at most `timeout` seconds. From any thread, many at a time.

    memory_bytes: address space of each of its processes. max_output_bytes: of stdout and of stderr; more ends it.
    RuntimeError where the supervisor fails. A folder that it cannot remove is a warning.
    """
    import subprocess  # these here: the supervisor, which starts anew for every program, does without
    import tempfile

    from nanochat.runtime.console import print0

    settings = repr((timeout, memory_bytes, max_output_bytes, tempfile.gettempdir()))
    command = [sys.executable, "-I", "-S", "-X", "utf8", os.path.abspath(__file__), settings]
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, env={}, cwd="/", start_new_session=True) as supervisor:
        report = complaint = b""
        try:
            report, complaint = supervisor.communicate(code.encode("utf-8", "surrogatepass"), timeout + GRACE_S)
        except subprocess.TimeoutExpired:  # stopped, or cannot end what it started; or we were stopped
            supervisor.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                report, complaint = supervisor.communicate(timeout=1)
    if supervisor.returncode < 0 or not report and not complaint:  # a program that is not walled in can do both
        return Result(False, "", "", "killed", ("processes",))
    if supervisor.returncode or not report:
        raise RuntimeError(f"the supervisor of a program failed: {complaint.decode(errors='replace')}")
    if complaint:
        print0("warning:", complaint.decode(errors="replace").strip())
    limit, status, stdout, stderr, unprotected = ast.literal_eval(report.decode())
    error = limit or reason(status, stderr)
    return Result(error is None, stdout, stderr, error, tuple(unprotected))


def reason(status: int, stderr: str) -> str | None:
    """Why a program within its limits did not end well, None if it did. status: as of os.wait."""
    if os.WIFSTOPPED(status):
        return "killed"
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return None
    if code < 0:
        return f"signal {-code}"
    last = stderr.strip().rpartition("\n")[2].strip()
    return f"exit code {code}: {last}".removesuffix(": ")


# ---- The supervisor and init ----------------------------------------------------------------------------------------

def supervise() -> None:
    """Start init, and end and remove what it leaves. Returns only in the program's process, which is ready to begin."""
    timeout, memory_bytes, max_output_bytes, place = ast.literal_eval(sys.argv[1])
    code = sys.stdin.buffer.read()
    folder = os.path.join(place, f"nanochat-{os.getpid()}-{os.urandom(8).hex()}")
    os.mkdir(folder, 0o700)
    unprotected, max_processes = isolate()
    init = os.fork()
    if init > 0:
        os.waitpid(init, 0)
        kill_all(init)
        try:
            remove(folder)
        except Exception as error:  # whatever a program has left: it is judged all the same
            print(f"the folder {folder} of a program could not be removed: {error!r}", file=sys.stderr, flush=True)
        os._exit(0)
    os.setsid()
    if LINUX:
        LIBC.prctl(PDEATHSIG, SIGKILL, 0, 0, 0)
        LIBC.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
        write("/proc/self/oom_score_adj", "1000")  # when the machine's memory runs out, this goes first
        if "modes" not in unprotected:
            unprotected += remount(folder)
        if not landlock(folder):
            unprotected.append("files")
    out, out_end = os.pipe()
    err, err_end = os.pipe()
    program = os.fork()
    if program == 0:
        return be_the_program(code, folder, out_end, err_end, memory_bytes, max_processes)
    limit, status, stdout, stderr = watch(program, out, err, timeout, max_output_bytes)
    report = (limit, status, stdout, stderr, unprotected)
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        print(repr(report), flush=True)
    os._exit(0)


def watch(program: int, out: int, err: int, timeout: float, max_output_bytes: int) -> tuple[str | None, int, str, str]:
    """Read what the program prints until it ends or reaches a limit: (the limit, its status, stdout, stderr)."""
    received = {out: bytearray(), err: bytearray()}
    for fd in received:
        os.set_blocking(fd, False)
    limit = status = None
    deadline = time.monotonic() + timeout
    while limit is None and status is None:
        time.sleep(POLL_S)
        ended, ended_status = os.waitpid(-1, os.WNOHANG)  # orphans come to process 1, and must be waited for
        while ended not in (0, program):
            ended, ended_status = os.waitpid(-1, os.WNOHANG)
        if ended == program:
            status = ended_status
        elif time.monotonic() > deadline:
            limit = "timeout"
        for fd, data in received.items():
            with contextlib.suppress(BlockingIOError):  # there is no more yet
                while len(data) <= max_output_bytes and (chunk := os.read(fd, 1 << 16)):
                    data += chunk
            if len(data) > max_output_bytes:
                limit = "too much output"
    stdout, stderr = (data[:max_output_bytes].decode(errors="replace") for data in received.values())
    return limit, status, stdout, stderr


def kill_all(init: int) -> None:
    """End all descendants of this process. Where init had a namespace of its own they have died with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(init, SIGKILL)
    with contextlib.suppress(ChildProcessError):  # raised when there are none left
        while True:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            for pid, parent, group, *_ in processes():
                if parent == os.getpid():  # orphans become our own children: so, in turn, do their children
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, SIGKILL)
                        os.killpg(group, SIGKILL)  # also children that were born since
            time.sleep(0.001)


def processes() -> Iterator[tuple[int, int, int, int, int]]:
    """(process, parent, process group, threads, user) of all that run on this machine. Linux only."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
            yield int(name), int(fields[1]), int(fields[2]), int(fields[17]), os.fstat(file.fileno()).st_uid


def remove(folder: str) -> None:
    """
    Remove a folder and everything in it. Here, not by `rm`: after init's end its namespace takes no new process.
    Each folder in it is moved beside it before it is emptied, so no nesting is too deep and no path too long.
    """
    folders = [folder]
    os.chmod(folder, 0o700)  # the program may have changed it
    for path in folders:  # grows meanwhile
        for entry in list(os.scandir(path)):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)
                folders.append(f"{folder}-{len(folders)}")
                os.rename(entry.path, folders[-1])
            else:
                os.unlink(entry.path)
        os.rmdir(path)


# ---- Walls ----------------------------------------------------------------------------------------------------------

def isolate() -> tuple[list[str], int]:
    """
    Put what this process forks from now on into namespaces of its own: no network, no other processes to reach.
    Returns what could not be guarded, and the limit on processes that leaves MAX_PROCESSES to the program.
    """
    if not LINUX:
        return ["network", "sight", "processes", "files", "modes", "memory"], -1
    LIBC.prctl(CHILD_SUBREAPER, 1, 0, 0, 0)
    user = os.geteuid()
    group = os.getegid()
    supervisor_and_init = 2
    if user == 0:  # the kernel limits the processes of a real user id, but not root's: take an unused id
        with contextlib.suppress(OSError):  # a container that has no such id
            os.setresuid(2**30 + os.getpid(), user, user)
    if LIBC.unshare(NAMESPACES) != 0:
        others = sum(threads for *_, threads, owner in processes() if owner == user == os.getuid())
        return ["network", "sight", "processes", "modes"], others + supervisor_and_init + MAX_PROCESSES
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"65534 {user} 1")  # not 0 inside, or programs that it starts would have root's rights
    write("/proc/self/gid_map", f"65534 {group} 1")
    return [], supervisor_and_init + MAX_PROCESSES  # a new user namespace counts anew


def write(path: str, text: str) -> None:
    """Write to one of the kernel's files, where allowed."""
    with contextlib.suppress(OSError), open(path, "w") as file:
        file.write(text)


def remount(folder: str) -> list[str]:
    """
    For this process and its children, in namespaces of their own: all file systems but `folder` are read-only, and
    /proc has these processes alone. Returns what of it could not be guarded.
    """
    inside = folder.encode()
    read_only = (ctypes.c_uint64 * 4)(1, 0)  # struct mount_attr: to set, to clear
    writable = (ctypes.c_uint64 * 4)(0, 1)
    recursive = 0x8000
    is_read_only = (
        LIBC.unshare(MOUNTS) == 0
        and LIBC.mount(inside, inside, None, BIND, None) == 0
        and LIBC.syscall(MOUNT_SETATTR, -1, b"/", recursive, read_only, 32) == 0
        and LIBC.syscall(MOUNT_SETATTR, -1, inside, 0, writable, 32) == 0)
    unprotected = [] if is_read_only else ["modes"]
    if LIBC.mount(b"proc", b"/proc", b"proc", PROC_FLAGS, None) != 0:  # where a container hides a part of /proc
        unprotected.append("sight")
    return unprotected


def landlock(folder: str) -> bool:
    """For this process and its children: nothing is written, made or removed but in `folder`. False if not there."""
    version = LIBC.syscall(LANDLOCK, None, 0, 1)
    if version < 1:
        return False
    changes = 0b1_1111_1111_0010  # …_ACCESS_FS_…: all but to read and to execute
    if version >= 2:
        changes |= 0x2000  # REFER
    if version >= 3:
        changes |= 0x4000  # TRUNCATE
    # Refused: changes of files, TCP (bind, connect), and what reaches processes outside (signals, abstract sockets).
    refused = (ctypes.c_uint64 * 3)(changes, 0b11, 0b11)
    size = 8
    if version >= 4:
        size = 16
    if version >= 6:
        size = 24
    rules = LIBC.syscall(LANDLOCK, refused, size, 0)
    for path, allowed in ((folder, changes), ("/dev/null", 0b10)):
        place = os.open(path, os.O_PATH)
        rule = ctypes.create_string_buffer(allowed.to_bytes(8, sys.byteorder) + place.to_bytes(4, sys.byteorder))
        LIBC.syscall(LANDLOCK + 1, rules, 1, rule, 0)
    return LIBC.syscall(LANDLOCK + 2, rules, 0) == 0


def be_the_program(
    code: bytes, folder: str, out_end: int, err_end: int, memory_bytes: int, max_processes: int
) -> None:
    """Turn this process into the program: its streams, folder and limits; no rights, nothing inherited."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out_end, 1)
    os.dup2(err_end, 2)
    os.closerange(3, 256)
    user = os.getuid()  # for root an unused id, see `isolate`; os.access checks what this user may do
    has_unused_id = os.geteuid() == 0 and user != 0
    if has_unused_id and os.access(ast.__file__, os.R_OK) and os.access(os.path.dirname(folder), os.X_OK):
        os.chown(folder, user, user)  # root's rights reach every process and file, so they go
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    os.chdir(folder)
    with open("main.py", "wb") as file:
        file.write(code)
    os.environ.clear()
    # What it said before it was ended is known.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # stdout of a new process is a TextIOWrapper
    sys.argv = ["main.py"]
    limits = {
        resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: 256, resource.RLIMIT_CORE: 0,
    }
    if LINUX:
        limits[resource.RLIMIT_NPROC] = max_processes
        LIBC.prctl(PDEATHSIG, SIGKILL, 0, 0, 0)
        LIBC.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        try:
            resource.setrlimit(kind, (limit, limit))
        except (OSError, ValueError):  # macOS refuses some
            if LINUX:
                raise


if __name__ == "__main__":
    supervise()
    import runpy
    import site

    site.setquit()  # exit() and quit()
    runpy.run_path("main.py", run_name="__main__")
