"""How much memory and disk this process may use here, and what sets the limit."""
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import NamedTuple


class Limit(NamedTuple):
    name: str
    counts: str   # "device" memory, or "resident", "data" or "address" bytes of a process (see nanochat.plan.memory)
    bytes: float


def memory_limits() -> list[Limit]:
    """Every limit on a CPU process's memory that is in force."""
    limits = [Limit("memory available", "resident", available_memory()), *cgroup_limits()]
    for name, counts in (("RLIMIT_DATA", "data"), ("RLIMIT_AS", "address")):
        soft, _hard = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY and sys.platform == "linux":  # elsewhere nothing holds a process to them
            limits.append(Limit(name, counts, soft))
    return limits


def available_memory() -> float:
    """Bytes that processes can still get without swapping; all that the machine has where it does not say."""
    for line in read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cgroup_limits() -> list[Limit]:
    """What is left under each limit of this process's control groups, versions 1 and 2, and of their parents."""
    limits = []
    for line in read(Path("/proc/self/cgroup")).splitlines():
        _number, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = root / path.lstrip("/")
        for part in (folder, *folder.parents):
            if part.is_relative_to(root) and (left := left_of(part, *names)) is not None:
                limits.append(Limit(f"cgroup {part}", "resident", left))
    return limits


def left_of(folder: Path, limit: str, usage: str) -> float | None:
    """Bytes left under a control group's limit, if it has one. Cached files count as used, but are given up first."""
    most, used = read(folder / limit).strip(), read(folder / usage).strip() or "0"
    if not most.isdecimal() or int(most) >= 2**60:  # "max", or version 1's large number
        return None
    files = dict(line.split() for line in read(folder / "memory.stat").splitlines())
    return int(most) - max(int(used) - int(files.get("total_inactive_file", files.get("inactive_file", 0))), 0)


def read(path: Path) -> str:
    """What a file of the kernel says; "" where there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""


def free_disk(folder: Path) -> tuple[float, bool]:
    """(bytes free where a folder is or would be made, whether it can be written to)."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free, os.access(there, os.W_OK | os.X_OK)
