"""
Runs generated Python apart from this program, to see whether it does what it should (HumanEval).

    run_python("print(1 + 1)")    # Result(ok=True, stdout='2\\n', stderr='', error=None, unprotected=())

The program has Python's standard library, an empty environment, no input, and a folder of its own that is gone
afterwards. This file, run as a script, is its supervisor: a small process that starts the program, reads what it
prints, and ends all that came of it when it is over, at its limits, or when nobody waits for it any more.

    here ── supervisor ── init ── the program ── what it starts
            (limits)      (process 1 of a namespace: when it ends, the kernel ends all that came after)

This keeps apart what a model writes by mistake. It is no sandbox against an attacker:

- The program reads every file that this user may read, keys included. It cannot send them away, but it can print them.
- It may use devices (a GPU), and whoever listens on a socket in the file system (Docker, a desktop).
- Until its time is over it may use all cores, MAX_PROCESSES times `memory_bytes`, and FOLDER_BYTES for its files, which
  are kept in memory. Nothing is kept from it that a mistake in the kernel gives away.
- All this holds on Linux where namespaces are allowed; in most containers they are not. `Result.unprotected` says what
  could not be had there. "network": it may use it. "processes": what leaves its process group again and again, fast,
  can stay behind (on macOS whatever leaves it once), and it may end other processes of this user (not from Linux 6.12
  on; root becomes nobody for it, if nobody can read Python's library). "files": it writes where this user may, and
  reads the environment of this user's other processes; Landlock (Linux 5.13) keeps it from both without namespaces,
  but not from changing modes and times, nor is there a limit on all its files together. "memory": no limit (macOS).
"""
import ast
import contextlib
import ctypes
import os
import resource
import select
import sys
import time
from typing import NamedTuple

MAX_PROCESSES = 16             # of a program at once, threads included
MAX_FILE_BYTES = 16 * 2**20    # of one file
FOLDER_BYTES = 64 * 2**20      # of all its files
GRACE_S = 60                   # what starting and ending may take on a loaded machine, beyond the time limit

LINUX = sys.platform == "linux"
LIBC = ctypes.CDLL(None)
NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000  # linux/sched.h
RDONLY, NOSUID, NODEV, NOEXEC, RECURSIVE, PRIVATE = 1, 2, 4, 8, 1 << 14, 1 << 18                   # linux/mount.h
PDEATHSIG, CHILD_SUBREAPER, NO_NEW_PRIVS = 1, 36, 38                                               # linux/prctl.h
MOUNT_SETATTR, LANDLOCK = 442, 444  # system calls; these numbers are the same on every architecture
SIGKILL = 9                         # the module `signal` would take a tenth of the start


class Result(NamedTuple):
    """What came of a program."""

    ok: bool                      # it ended by itself, with exit code 0
    stdout: str
    stderr: str
    error: str | None             # such as "timeout", "memory", "too much output", "exit code 1: AssertionError", "SIGSEGV"
    unprotected: tuple[str, ...]  # of "network", "processes", "files", "memory": what could not be guarded on this machine


def run_python(code: str, timeout: float = 5.0, memory_bytes: int = 512 * 2**20, max_output_bytes: int = 2**20) -> Result:
    """
    Run a program to its end, at most `timeout` seconds. From any thread, many at a time.

    memory_bytes: address space of each of its processes. max_output_bytes: of stdout and of stderr; more ends it.
    """
    import subprocess  # the supervisor, which starts anew for every program, does without
    import tempfile

    settings = timeout, memory_bytes, max_output_bytes, tempfile.gettempdir()
    command = [sys.executable, "-I", "-S", "-X", "utf8", os.path.abspath(__file__), *map(str, settings)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env={}, cwd="/", start_new_session=True) as supervisor:
        report, complaint = b"", b""
        try:
            report, complaint = supervisor.communicate(code.encode("utf-8", "surrogatepass"), timeout + GRACE_S)
        except subprocess.TimeoutExpired:  # it was stopped, or cannot end what it has started; or it ended while we were stopped
            supervisor.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                report, complaint = supervisor.communicate(timeout=1)
    if supervisor.returncode < 0 or not report and not complaint:  # without walls between processes the program can do both
        return Result(False, "", "", "killed", ("processes",))
    if supervisor.returncode > 0:
        raise RuntimeError(f"the supervisor of a program failed: {complaint.decode(errors='replace')}")
    limit, status, stdout, stderr, unprotected = ast.literal_eval(report.decode())
    error = limit or reason(status, stderr)
    return Result(error is None, stdout, stderr, error, unprotected)


def reason(status: int | None, stderr: str) -> str | None:
    """Why a program within its limits did not end well, None if it did. status: as of os.wait, None if nobody saw it."""
    import signal

    if status is None or os.WIFSTOPPED(status):
        return "killed"
    code = os.waitstatus_to_exitcode(status)
    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "")
    if code == -signal.SIGXCPU:
        return "timeout"
    if code < 0:  # most real-time signals have no name
        return signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
    if code > 0 and (last.startswith("MemoryError") or "[Errno 12]" in last):
        return "memory"
    return f"exit code {code}: {last}".removesuffix(": ") if code > 0 else None


# ---- The supervisor ---------------------------------------------------------------------------------------------


def supervise() -> None:
    """Start the program, end it, report. Returns only in the program's own process, which is ready to begin."""
    timeout, memory_bytes, max_output_bytes = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    code = sys.stdin.buffer.read()
    folder = os.path.join(sys.argv[4], f"nanochat-{os.getpid()}-{os.urandom(8).hex()}")
    os.mkdir(folder, 0o700)
    unprotected, processes = isolate()
    (out, out_end), (err, err_end), (note, note_end) = pipes = os.pipe(), os.pipe(), os.pipe()
    init = os.fork()
    if init == 0:
        be_init(folder, note_end, namespaces="processes" not in unprotected)  # returns in a further process
        return be_the_program(code, folder, out_end, err_end, int(timeout) + 1, memory_bytes, processes)
    for _, end in pipes:
        os.close(end)
    streams = {out: bytearray(), err: bytearray(), note: bytearray()}
    limit = watch(streams, note, timeout, max_output_bytes)
    kill_all(init)
    for fd, received in streams.items():  # what is still in the pipes
        os.set_blocking(fd, False)
        with contextlib.suppress(BlockingIOError):
            while len(received) <= max_output_bytes and (chunk := os.read(fd, 1 << 16)):
                received += chunk
    if max(len(streams[out]), len(streams[err])) > max_output_bytes:
        limit = limit or "too much output"
    sys.setrecursionlimit(5000)  # folders in each other; more cannot be named in a path
    with contextlib.suppress(OSError):
        remove(folder)
    stdout, stderr = (streams[fd][:max_output_bytes].decode(errors="replace") for fd in (out, err))
    notes = streams[note].decode().split()
    status = int(notes[-1]) if notes and notes[-1].isdigit() else None
    unprotected += [word for word in notes if not word.isdigit()]
    with contextlib.suppress(BrokenPipeError):
        print(repr((limit, status, stdout, stderr, tuple(unprotected))), flush=True)
    os._exit(0)


def watch(streams: dict[int, bytearray], note: int, timeout: float, max_output_bytes: int) -> str | None:
    """Read until init is gone, and with it the other end of `note`. Returns the limit that was reached before, if any."""
    deadline = time.monotonic() + timeout
    poll = select.poll()
    for fd in streams:
        poll.register(fd, select.POLLIN)
    poll.register(1, 0)  # tells of an error there: the one who would read the report is gone
    while (left := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(1000 * left):
            if fd == 1:
                return "abandoned"
            chunk = os.read(fd, 1 << 16)
            streams[fd] += chunk
            if not chunk:
                poll.unregister(fd)
            if fd == note and not chunk:
                return None
            if len(streams[fd]) > max_output_bytes and fd != note:
                return "too much output"
    return "timeout"


def kill_all(init: int) -> None:
    """End all descendants of this process. Where init has a namespace of its own they die with it."""
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError):
            kill(init, SIGKILL)
    os.waitpid(init, 0)
    with contextlib.suppress(ChildProcessError):  # raised when there are none left: orphans become our own children
        while True:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            for pid, group in descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, SIGKILL)
                    os.killpg(group, SIGKILL)  # also those that were born since we looked
            time.sleep(0.001)


def descendants(ancestor: int) -> list[tuple[int, int]]:
    """(process, process group) of all that descend from a process, but for those in its own group. From /proc."""
    children: dict[int, list[tuple[int, int]]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
            _state, parent, group, *_ = file.read().rpartition(")")[2].split()
            children.setdefault(int(parent), []).append((int(name), int(group)))
    found = [(ancestor, os.getpgrp())]
    for pid, _ in found:
        found += children.get(pid, [])
    return [(pid, group) for pid, group in found if group != os.getpgrp()]


def remove(path: str) -> None:
    """Remove a file, or a folder and what is in it, whatever modes the program has left."""
    if os.path.islink(path) or not os.path.isdir(path):
        return os.unlink(path)
    os.chmod(path, 0o700)
    for name in os.listdir(path):
        remove(os.path.join(path, name))
    os.rmdir(path)


# ---- Walls ------------------------------------------------------------------------------------------------------


def isolate() -> tuple[list[str], int]:
    """
    Put what this process forks from now on into namespaces of its own: no network, no sight of other processes.
    Returns what could not be guarded, and the limit on processes that leaves MAX_PROCESSES to the program.
    """
    if not LINUX:
        return ["network", "processes", "files", "memory"], -1
    LIBC.prctl(CHILD_SUBREAPER, 1, 0, 0, 0)
    user, group, supervisor_and_init = os.geteuid(), os.getegid(), 2
    if user == 0:  # the kernel does not count root's processes, but goes by the real id: let that be nobody's
        with contextlib.suppress(OSError):  # a container that has no such id
            os.setresuid(2**30 + os.getpid(), user, user)
    if LIBC.unshare(NEWUSER | NEWPID | NEWNET | NEWIPC) != 0:
        others = count_tasks(user) if os.getuid() == user else 0
        return ["network", "processes"], others + supervisor_and_init + MAX_PROCESSES
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"65534 {user} 1")  # not 0 inside, or programs that it starts would have root's rights there
    write("/proc/self/gid_map", f"65534 {group} 1")
    return [], supervisor_and_init + MAX_PROCESSES  # a new user namespace counts anew


def write(path: str, text: str) -> None:
    """Write to one of the kernel's files, where allowed."""
    with contextlib.suppress(OSError), open(path, "w") as file:
        file.write(text)


def count_tasks(user: int) -> int:
    """Processes and threads of a user."""
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            total += len(os.listdir(f"/proc/{name}/task")) if os.stat(f"/proc/{name}").st_uid == user else 0
    return total


def be_init(folder: str, note_end: int, namespaces: bool) -> None:
    """Fork the program, in which this returns; wait for it here, tell how it ended, and end all others by ending."""
    os.setsid()
    if LINUX:
        LIBC.prctl(PDEATHSIG, SIGKILL, 0, 0, 0)
        write("/proc/self/oom_score_adj", "1000")  # when the machine's memory runs out, this goes first
        if not namespaces:
            LIBC.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
            become_nobody(folder)
        if not (namespaces and mount_private(folder) or landlock(folder)):
            os.write(note_end, b"files\n")
    program = os.fork()
    if program == 0:
        return
    while True:
        pid, status = os.wait()
        if pid == program:
            os.write(note_end, f"{status}\n".encode())
            os._exit(0)


def become_nobody(folder: str) -> None:
    """Root's rights reach every process and file, so they go, unless Python's library would be out of reach as well."""
    user = os.getuid()  # of nobody, see `isolate`; it is for that one that os.access asks
    if os.geteuid() == 0 != user and os.access(ast.__file__, os.R_OK) and os.access(os.path.dirname(folder), os.X_OK):
        os.chown(folder, user, user)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        LIBC.prctl(PDEATHSIG, SIGKILL, 0, 0, 0)  # was cleared


def mount_private(folder: str) -> bool:
    """For this process and its children: a file system in memory at `folder`, all else read-only. False if refused."""
    path = folder.encode()
    size = f"size={FOLDER_BYTES},nr_inodes=10000,mode=700".encode()
    set_read_only, clear_read_only = ((ctypes.c_uint64 * 4)(*attributes) for attributes in ((RDONLY, 0, 0, 0), (0, RDONLY, 0, 0)))
    done = (
        LIBC.unshare(NEWNS) == 0
        and LIBC.mount(None, b"/", None, RECURSIVE | PRIVATE, None) == 0
        and LIBC.mount(b"tmpfs", path, b"tmpfs", NOSUID | NODEV, size) == 0
        and LIBC.syscall(MOUNT_SETATTR, -1, b"/", 0x8000, set_read_only, 32) == 0  # 0x8000: and all below
        and LIBC.syscall(MOUNT_SETATTR, -1, path, 0, clear_read_only, 32) == 0
    )
    if done:  # only its own processes to be seen; where this is refused, it sees the others, but not into them
        LIBC.mount(b"proc", b"/proc", b"proc", RDONLY | NOSUID | NODEV | NOEXEC, None)
    return done


def landlock(folder: str) -> bool:
    """For this process and its children: nothing is written, made or removed but in `folder`. False if it is not there."""
    version = LIBC.syscall(LANDLOCK, None, 0, 1)
    if version < 1:
        return False
    changes = 0b1_1111_1111_0010 | (0x2000 if version >= 2 else 0) | (0x4000 if version >= 3 else 0)  # LANDLOCK_ACCESS_FS_…
    # Handled: changes to files, TCP (bind, connect), and what reaches processes outside (signals, abstract sockets).
    handled = (ctypes.c_uint64 * 3)(changes, 0b11, 0b11)
    rules = LIBC.syscall(LANDLOCK, handled, 24 if version >= 6 else 16 if version >= 4 else 8, 0)
    for path, allowed in ((folder, changes), ("/dev/null", 0b10)):
        place = os.open(path, os.O_PATH)
        rule = ctypes.create_string_buffer(allowed.to_bytes(8, sys.byteorder) + place.to_bytes(4, sys.byteorder))
        LIBC.syscall(LANDLOCK + 1, rules, 1, rule, 0)
    return LIBC.syscall(LANDLOCK + 2, rules, 0) == 0


def be_the_program(
    code: bytes, folder: str, out_end: int, err_end: int, cpu_s: int, memory_bytes: int, processes: int
) -> None:
    """Make of this process what the program is to be: its streams, folder and limits; no rights, nothing inherited."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out_end, 1)
    os.dup2(err_end, 2)
    os.closerange(3, 256)
    os.chdir(folder)
    with open("main.py", "wb") as file:
        file.write(code)
    os.environ.clear()
    sys.stdout.reconfigure(line_buffering=True)  # what it said before it was ended is known
    sys.argv = ["main.py"]
    limits = {
        resource.RLIMIT_CPU: cpu_s, resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: 256, resource.RLIMIT_CORE: 0,
    }
    if LINUX:
        limits[resource.RLIMIT_NPROC] = processes
        LIBC.prctl(PDEATHSIG, SIGKILL, 0, 0, 0)
        LIBC.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        with contextlib.suppress(() if LINUX else (OSError, ValueError)):
            resource.setrlimit(kind, (limit, limit))


if __name__ == "__main__":
    supervise()
    import runpy
    import site

    site.setquit()  # exit() and quit()
    runpy.run_path("main.py", run_name="__main__")
