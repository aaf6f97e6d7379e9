"""The memory of this machine, or of the container that the process is in."""

import ctypes
from pathlib import Path


def memory() -> tuple[int, int]:
    """All memory of this machine, or of its container, and what is available of it, in bytes."""
    return _memory(Path("/proc/meminfo").read_text(), _container(Path("/sys/fs/cgroup")))


def trim() -> None:
    """Give the system back what this process has freed: glibc keeps it between pieces that are still in use."""
    if release := getattr(ctypes.CDLL(None), "malloc_trim", None):
        release(0)


def _memory(meminfo: str, container: tuple[int, int] | None) -> tuple[int, int]:
    """All memory, and what is available of it; those of a `container` count where they are less."""
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in meminfo.splitlines() if line.split()[1].isdigit()}
    total, free = kilobytes["MemTotal"] << 10, kilobytes["MemAvailable"] << 10
    if container is None:
        return total, free
    return min(total, container[0]), min(free, container[1])


def _container(group: Path) -> tuple[int, int] | None:
    """The memory limit of the control group in folder `group`, and what is left of it; None where there is no limit."""
    try:
        limit, used = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if not limit.isdigit():
        return None
    # Pages of files that nobody has used lately are given up when memory is asked for.
    return int(limit), max(0, int(limit) - int(used) + int(stat.get("inactive_file", 0)))
