"""
Runs generated Python in separate processes, to see whether it does what it should (HumanEval).

    run_python("print(1 + 1)")    # '2\\n'; None if it fails or takes too long

The program has Python's standard library, an empty environment, no input, limits of time, memory and file sizes, and a
folder of its own that is removed afterwards. Where bubblewrap is installed (`apt install bubblewrap`) and may make
namespaces, the program also has no network, sees and reaches no other process, and writes only in its folder; nothing
that it started outlives it. Elsewhere a warning says what is missing, and a program that leaves its process group, or
whose trainer is killed, can go on.

This contains a model's mistakes. It is not a sandbox against an attacker: the program reads every file that this user
may read, and until its time is up it may use all cores, MAX_PROCESSES times the memory, and the disk.
"""
import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile

from nanochat.runtime.console import print0

MAX_PROCESSES = 16             # of a program at once, threads included; the kernel does not limit root's
MAX_FILE_BYTES = 16 * 2**20    # of each file, and of what it prints
MEMORY_BYTES = 512 * 2**20  # address space of each of its processes

# The program's process sets its own limits, before it reads the program. Its hard limits cannot be raised again.
START = """
import contextlib, resource, site, sys
for kind, limit in {limits}.items():
    with contextlib.suppress(OSError, ValueError):  # macOS refuses some
        resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (limit, limit))
with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
    file.write("1000")  # when the machine runs out of memory, the kernel ends this process first
site.setquit()  # defines exit() and quit(), which -S leaves out
sys.stdout.reconfigure(line_buffering=True)  # so a killed program has written its lines so far
sys.argv = ["main.py"]
exec(compile(sys.stdin.buffer.read(), "main.py", "exec"), {{"__name__": "__main__"}})
"""


@functools.cache
def bubblewrap() -> list[str]:
    """The command that walls a program in, without its folder; [] and a warning where it does not work."""
    walls = ("bwrap --unshare-all --die-with-parent --uid 65534 --gid 65534 --cap-drop ALL "
             "--ro-bind / / --dev /dev --proc /proc").split()
    try:
        subprocess.run([*walls, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or str(error).encode()
        print0("warning: generated programs run with limits of time and memory, but may use the network and change "
               f"this user's files; bubblewrap would prevent it: {why.decode(errors='replace').strip()}")
        return []
    return walls


def run_python(code: str, timeout: float = 5.0) -> str | None:
    """
    What a program prints, if it ends on its own within `timeout` seconds, with exit code 0; else None. From any thread,
    many at a time.
    """
    limits = {"AS": MEMORY_BYTES, "FSIZE": MAX_FILE_BYTES, "NOFILE": 256, "CORE": 0, "CPU": int(timeout) + 1}
    folder = tempfile.mkdtemp(prefix="nanochat-")
    walls = bubblewrap()
    if walls:
        walls = [*walls, "--bind", folder, folder]
        # Processes are counted from zero in a namespace only; outside, the limit would count the user's others.
        limits["NPROC"] = MAX_PROCESSES
    command = [*walls, sys.executable, "-I", "-S", "-X", "utf8", "-c", START.format(limits=limits)]
    try:
        # Files instead of pipes: what the program prints is limited like its other files, and nobody has to read it.
        with tempfile.TemporaryFile() as program, tempfile.TemporaryFile() as printed:
            program.write(code.encode("utf-8", "surrogatepass"))
            program.seek(0)
            exit_code = run(command, timeout, stdin=program, stdout=printed, stderr=subprocess.DEVNULL, cwd=folder)
            printed.seek(0)
            return printed.read().decode(errors="replace") if exit_code == 0 else None
    finally:
        # rm takes any depth; the program may have changed the modes.
        subprocess.run(["chmod", "-R", "u+rwX", folder], stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL)


def run(command: list[str], timeout: float, **options) -> int | None:
    """Run a command, and end it and its process group after the timeout: its exit code, None if it had to be ended."""
    with subprocess.Popen(command, env={}, start_new_session=True, **options) as process:
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Without bubblewrap its children would go on; those that left the group do.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
