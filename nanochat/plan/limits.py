"""How much memory a process on a CPU may still take, and what sets the limit."""
import os
import resource
import sys
from pathlib import Path

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Files of a control group: limit, usage, and in memory.stat the cached files that are given up first.
VERSION_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
VERSION_2 = "memory.max", "memory.current", "inactive_file"


def memory_limits() -> dict[str, float]:
    """Bytes that are left under every limit in force, by name."""
    limits = {"memory available": available_memory()}
    for line in read(OWN_CGROUP).splitlines():  # of version 2: "0::/path"
        _number, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, files = (CGROUPS / "memory", VERSION_1) if controllers else (CGROUPS, VERSION_2)
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):  # control groups around a process's own count as well
            if folder.is_relative_to(root) and (left := left_of(folder, *files)) is not None:
                limits[f"cgroup {folder}"] = left
    soft, _hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY and sys.platform == "linux":  # elsewhere nothing holds a process to it
        limits["RLIMIT_DATA"] = soft
    return limits


def available_memory() -> float:
    """Bytes that processes can still get without swapping; all that the machine has where it does not say."""
    for line in read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def left_of(folder: Path, limit: str, usage: str, cached: str) -> float | None:
    """Bytes left under a control group's limit, if it has one."""
    most = read(folder / limit).strip()
    if not most.isdecimal() or int(most) >= 2**60:  # "max", version 1's huge number, or no such file
        return None
    stat = dict(line.split() for line in read(folder / "memory.stat").splitlines())
    return int(most) - max(int(read(folder / usage)) - int(stat.get(cached, 0)), 0)


def read(path: Path) -> str:
    """What a file of the kernel says; "" where there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
