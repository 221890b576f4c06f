"""How much memory a process on a CPU may still take, and what sets the limit."""
import os
import resource
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def memory_limits() -> dict[str, float]:
    """Bytes that are left under every limit in force, by name."""
    limits = {"memory available": available_memory()}
    for line in read(OWN_CGROUP).splitlines():
        if line.startswith("0::/"):  # control groups of version 2
            own = CGROUPS / line.removeprefix("0::/")
            for folder in (own, *own.parents):  # the groups around a process's own count as well
                limit = read(folder / "memory.max").strip()
                if limit.isdecimal():  # not "max", and the file exists
                    limits[f"cgroup {folder}"] = int(limit) - used_in_group(folder)
    soft, _hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        limits["RLIMIT_DATA"] = soft
    return limits


def available_memory() -> float:
    """Bytes that processes can still get without swapping; all that the machine has if it does not say."""
    for line in read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def used_in_group(folder: Path) -> int:
    """Bytes that a control group uses. Cached files do not count: they are given up first."""
    stat = dict(line.split() for line in read(folder / "memory.stat").splitlines())
    return max(int(read(folder / "memory.current")) - int(stat.get("inactive_file", 0)), 0)


def read(path: Path) -> str:
    """The text of a kernel file; "" if there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
