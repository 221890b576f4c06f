"""
The supervisor of one generated program, see execution.py: run as a script, it walls the program in, limits it, and
removes everything that it leaves. Each program gets a new supervisor, so it imports little, and nothing of nanochat.

    run_python ── supervisor ── init ── the program ── its children
                                (reads the output, keeps the limits; process 1 of a namespace, which ends with it)
"""
import ast
import contextlib
import ctypes
import os
import resource
import sys
import time
from collections.abc import Iterator

MAX_PROCESSES = 16             # of a program at once, threads included
MAX_FILE_BYTES = 16 * 2**20    # of each file
POLL_S = 0.002                 # between checks whether the program has ended

LINUX = sys.platform == "linux"
LIBC = ctypes.CDLL(None)
# Constants of the kernel: linux/sched.h, linux/mount.h, linux/prctl.h.
NAMESPACES = 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000  # IPC, users, processes, network
MOUNTS = 0x20000       # one more namespace
BIND = 0x1000
PROC_FLAGS = 0b1111    # read-only; no setuid programs, no devices, nothing to execute
PDEATHSIG = 1
CHILD_SUBREAPER = 36
NO_NEW_PRIVS = 38
# System calls; their numbers are the same on every architecture.
MOUNT_SETATTR = 442
LANDLOCK = 444
# Importing the module `signal` would take a tenth of the start-up.
SIGKILL = 9


def supervise() -> None:
    """Start init, and clean up after it. Returns only in the program's process, which is ready to begin."""
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
        except Exception as error:
            # Only a warning: a strange file that a program leaves does not change the verdict.
            print(f"the folder {folder} of a program could not be removed: {error!r}", file=sys.stderr, flush=True)
        os._exit(0)
    os.setsid()
    if LINUX:
        LIBC.prctl(PDEATHSIG, SIGKILL, 0, 0, 0)
        LIBC.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
        # When the machine runs out of memory, the kernel ends these processes first.
        write("/proc/self/oom_score_adj", "1000")
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
    # The pipe is broken if run_python's process has ended meanwhile.
    with contextlib.suppress(BrokenPipeError):
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
        # Orphans become children of process 1, which must reap them.
        ended, ended_status = os.waitpid(-1, os.WNOHANG)
        while ended not in (0, program):
            ended, ended_status = os.waitpid(-1, os.WNOHANG)
        if ended == program:
            status = ended_status
        elif time.monotonic() > deadline:
            limit = "timeout"
        for fd, data in received.items():
            # os.read raises BlockingIOError while there is no more.
            with contextlib.suppress(BlockingIOError):
                while len(data) <= max_output_bytes and (chunk := os.read(fd, 1 << 16)):
                    data += chunk
            if len(data) > max_output_bytes:
                limit = "too much output"
    stdout, stderr = (data[:max_output_bytes].decode(errors="replace") for data in received.values())
    return limit, status, stdout, stderr


def kill_all(init: int) -> None:
    """End all descendants of this process. If init had its own namespace, they have died with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(init, SIGKILL)
    # waitpid raises ChildProcessError when no child is left.
    with contextlib.suppress(ChildProcessError):
        while True:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            for pid, parent, group, *_ in processes():
                # Orphans become children of this process, a subreaper: in the end all descendants do.
                if parent == os.getpid():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, SIGKILL)
                        # The group also has the children started since the list was made.
                        os.killpg(group, SIGKILL)
            time.sleep(0.001)


def processes() -> Iterator[tuple[int, int, int, int, int]]:
    """(process, parent, process group, threads, user) of all processes on this machine. Linux only."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
            yield int(name), int(fields[1]), int(fields[2]), int(fields[17]), os.fstat(file.fileno()).st_uid


def remove(folder: str) -> None:
    """
    Remove a folder and everything in it. Without `rm`: after init's end its namespace takes no new process.
    Each folder in it is moved beside it before it is emptied, so no nesting is too deep and no path too long.
    """
    folders = [folder]
    # The program may have changed the modes.
    os.chmod(folder, 0o700)
    # The list grows in the loop.
    for path in folders:
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
    Put all processes forked from now on into their own namespaces: no network, no other processes to reach.
    Returns the walls that this machine does not allow, and the limit on processes that leaves MAX_PROCESSES to the
    program.
    """
    if not LINUX:
        return ["network", "sight", "processes", "files", "modes", "memory"], -1
    LIBC.prctl(CHILD_SUBREAPER, 1, 0, 0, 0)
    user = os.geteuid()
    group = os.getegid()
    supervisor_and_init = 2
    if user == 0:
        # The kernel limits the number of processes of every real user id except root's, so root takes an unused id.
        # Some containers have no such id.
        with contextlib.suppress(OSError):
            os.setresuid(2**30 + os.getpid(), user, user)
    if LIBC.unshare(NAMESPACES) != 0:
        others = sum(threads for *_, threads, owner in processes() if owner == user == os.getuid())
        return ["network", "sight", "processes", "modes"], others + supervisor_and_init + MAX_PROCESSES
    write("/proc/self/setgroups", "deny")
    # The id inside is not 0, because then started programs would have root's rights.
    write("/proc/self/uid_map", f"65534 {user} 1")
    write("/proc/self/gid_map", f"65534 {group} 1")
    # A new user namespace counts its processes from zero.
    return [], supervisor_and_init + MAX_PROCESSES


def write(path: str, text: str) -> None:
    """Write to one of the kernel's files, if allowed."""
    with contextlib.suppress(OSError), open(path, "w") as file:
        file.write(text)


def remount(folder: str) -> list[str]:
    """
    For this process and its children, in their own namespaces: all file systems except `folder` are read-only, and
    /proc shows only these processes. Returns the walls that this machine does not allow.
    """
    inside = folder.encode()
    # struct mount_attr: the flags to set, the flags to clear.
    read_only = (ctypes.c_uint64 * 4)(1, 0)
    writable = (ctypes.c_uint64 * 4)(0, 1)
    recursive = 0x8000
    is_read_only = (
        LIBC.unshare(MOUNTS) == 0
        and LIBC.mount(inside, inside, None, BIND, None) == 0
        and LIBC.syscall(MOUNT_SETATTR, -1, b"/", recursive, read_only, 32) == 0
        and LIBC.syscall(MOUNT_SETATTR, -1, inside, 0, writable, 32) == 0)
    unprotected = [] if is_read_only else ["modes"]
    # Not allowed in a container that hides a part of /proc.
    if LIBC.mount(b"proc", b"/proc", b"proc", PROC_FLAGS, None) != 0:
        unprotected.append("sight")
    return unprotected


def landlock(folder: str) -> bool:
    """For this process and its children: writing is allowed only in `folder`. False on a machine without Landlock."""
    version = LIBC.syscall(LANDLOCK, None, 0, 1)
    if version < 1:
        return False
    # LANDLOCK_ACCESS_FS_*: all rights except reading and executing.
    changes = 0b1_1111_1111_0010
    if version >= 2:
        changes |= 0x2000  # REFER
    if version >= 3:
        changes |= 0x4000  # TRUNCATE
    # Refused: changes to files, TCP (bind, connect), and reaching processes outside (signals, abstract sockets).
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
    # If root has taken an unused id (see `isolate`), os.access checks this id's rights.
    user = os.getuid()
    has_unused_id = os.geteuid() == 0 and user != 0
    if has_unused_id and os.access(ast.__file__, os.R_OK) and os.access(os.path.dirname(folder), os.X_OK):
        # Root's rights reach every process and file, so the program must not have them.
        os.chown(folder, user, user)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    os.chdir(folder)
    with open("main.py", "wb") as file:
        file.write(code)
    os.environ.clear()
    # So a killed program has written its lines so far.
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
        except (OSError, ValueError):
            # macOS refuses some of these limits.
            if LINUX:
                raise


if __name__ == "__main__":
    supervise()
    import runpy
    import site

    # Defines exit() and quit(), which -S leaves out.
    site.setquit()
    runpy.run_path("main.py", run_name="__main__")
