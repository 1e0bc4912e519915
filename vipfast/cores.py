"""CPU cores that this process may use, and how many of them nobody else keeps busy."""

import math
import os
from pathlib import Path

from vipfast.distributed import join


def cores_allowed() -> float:
    """Cores this process may use, by its affinity and its container's quota."""
    # macOS has no affinity.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores, _cpu_quota())


def free_threads(starter: bool) -> tuple[int, str]:
    """CPU threads to use, and why: the cores this process may use that nobody else keeps busy, at least one.

    Two threads on a machine with one free core run several times slower than one, because each waits for the other.
    """
    allowed, load, cores = cores_allowed(), os.getloadavg()[0], os.cpu_count()
    ranks = join().size
    free = max(1, math.floor(min(allowed, cores - load + 0.25) / ranks))
    why = f"{counted(allowed, 'core')} allowed, load {load:.1f} of {cores}"
    why += f", {ranks} processes" if ranks > 1 else ""
    # The starter's matrices are too small to share among many cores.
    return (min(free, 4), f"{why}, at most 4 for the starter") if starter and free > 4 else (free, why)


def counted(num: float, noun: str) -> str:
    """A number with its noun: 1 core, 2 cores, 1.5 cores. A whole number shows all its digits."""
    shown = f"{num:g}" if isinstance(num, float) else f"{num}"
    return f"{shown} {noun}" if num == 1 else f"{shown} {noun}s"


def _cpu_quota() -> float:
    """Cores a container's cgroup grants; infinite without a limit."""
    limit = Path("/sys/fs/cgroup/cpu.max")
    if not limit.is_file():
        return math.inf
    quota, period = limit.read_text().split()
    return math.inf if quota == "max" else max(1.0, int(quota) / int(period))
