"""How much main memory there is, here and now, by what the machine and a container's limit say; psutil is not asked."""

import os
from pathlib import Path

ROOT = Path("/")
"""Where ``proc`` and ``sys`` lie."""

NO_LIMIT = 2**60
"""A cgroup's limit from here on is none: the first version writes nearly 2^63 where nothing is set."""


def total_bytes() -> int:
    """Main memory this process may ever use: the machine's with its swap, or a container's limit if that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") + _meminfo().get("SwapTotal", 0)
    return min(machine, *(limit for limit, _ in _cgroups()), NO_LIMIT)


def free_bytes() -> int:
    """Main memory that could be had now without taking any from another process; ``total_bytes`` where that is not told."""
    told = _meminfo()
    free = [told["MemAvailable"] + told.get("SwapFree", 0)] if "MemAvailable" in told else []
    return max(0, min(total_bytes(), *free, *(limit - used for limit, used in _cgroups()), NO_LIMIT))


def _meminfo() -> dict[str, int]:
    """Linux's account of the machine, in bytes; {} elsewhere."""
    file = ROOT / "proc/meminfo"
    if not file.is_file():
        return {}
    pairs = (line.split(":") for line in file.read_text().splitlines() if ":" in line)
    return {name: 1024 * int(value.split()[0]) for name, value in pairs}


def _cgroups() -> list[tuple[int, int]]:
    """Limits that containers set, either version's, and what counts against each without files that can be read again."""
    found = []
    for folder, limit, used in (
        ("sys/fs/cgroup", "memory.max", "memory.current"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        place = ROOT / folder
        if not (place / limit).is_file():
            continue
        text = (place / limit).read_text().strip()
        if text == "max" or int(text) >= NO_LIMIT:
            continue
        statistics = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
        kept = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
        found.append((int(text), int((place / used).read_text()) - kept))
    return found
