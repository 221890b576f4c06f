"""How much memory and disk this process may use here, and who says so."""
import os
import resource
import shutil
from pathlib import Path
from typing import NamedTuple


class Limit(NamedTuple):
    name: str
    counts: str   # "resident", "data" or "address" bytes of a process (see nanochat.plan.memory)
    bytes: float


def memory_limits() -> list[Limit]:
    """Every limit on a CPU process's memory that is in force."""
    limits = [Limit("memory available", "resident", available) for available in [available_memory()] if available]
    limits += [Limit(name, "resident", free) for name, free in cgroup_limits()]
    for name, counts in (("RLIMIT_DATA", "data"), ("RLIMIT_AS", "address")):
        soft, _hard = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY:
            limits.append(Limit(name, counts, soft))
    return limits


def available_memory() -> float | None:
    """Bytes that processes can still get without swapping; None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def cgroup_limits() -> list[tuple[str, float]]:
    """(name, bytes left) of this process's control groups, versions 1 and 2, the parents' limits included."""
    found = []
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    for _number, controllers, path in groups:
        if controllers == "":
            root, limit, usage, version = "/sys/fs/cgroup", "memory.max", "memory.current", "v2"
        elif "memory" in controllers.split(","):
            root, limit, usage, version = "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "v1"
        else:
            continue
        folder = Path(root + path)
        folders = [part for part in (folder, *folder.parents) if part.is_relative_to(root)]
        found += [(f"cgroup {version}", left) for left in left_of(folders, limit, usage)]
    return found


def left_of(folders: list[Path], limit: str, usage: str) -> list[float]:
    """Bytes left under the limit of each of these control groups that has one. Cached files are used, but given up first."""
    numbers = [(number(folder / limit), number(folder / usage) or 0, cached(folder)) for folder in folders]
    return [most - max(used - files, 0) for most, used, files in numbers if most is not None and most < 2**60]  # v1's "none" is a large number


def number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def cached(folder: Path) -> int:
    """Bytes of a control group that are copies of files nobody has used lately."""
    try:
        lines = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(lines.get("total_inactive_file", lines.get("inactive_file", 0)))


def free_disk(folder: Path) -> tuple[float, bool]:
    """(bytes free where a folder is or would be made, whether it can be written to)."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free, os.access(there, os.W_OK | os.X_OK)
