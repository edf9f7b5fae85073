"""Memory of this machine: what is freed stays the process's own, and how much more there is."""

from __future__ import annotations

import ctypes
from pathlib import Path

import psutil

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Of glibc's malloc.h."""
MEMORY_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Of a control group, versions 2 and 1: its limit and its use."""
FILE_CACHE = ("active_file", "inactive_file")
"""What of the use is given back when it is needed; in version 1 with its parts', as total_..."""


def keep_freed_memory() -> None:
    """Have malloc keep what is freed, for the next step, instead of giving it back to the system.

    Every step takes the same megabytes again. Taken from the system they are new pages, each of
    which it clears first: 5 to 8 percent of a step in bf16. What the process holds at its peak is
    much the same. Only glibc gives pages back like that; with another C library nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)  # else each large tensor is a mapping of its own
        mallopt(M_TRIM_THRESHOLD, -1)  # never


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process could still take: of the machine, and of what it may use of it.

    A container or a Slurm job is ended by the system when it takes more than its control group may
    have, however much the machine has left; psutil knows the machine alone.
    """
    left = [_left_in(group, *names) for group in _control_groups(root) for names in MEMORY_FILES]
    return min([psutil.virtual_memory().available, *(each for each in left if each is not None)])


def _control_groups(root: Path) -> list[Path]:
    """Folders of the control groups around this process that may limit its memory."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return []
    groups = []
    for _, controllers, name in (line.split(":", 2) for line in lines):
        if controllers not in ("", "memory"):
            continue
        mounted = root / "sys/fs/cgroup" / controllers
        inner = mounted / name.lstrip("/")
        groups += [inner, *(outer for outer in inner.parents if outer.is_relative_to(mounted))]
    return groups


def _left_in(group: Path, limit: str, use: str) -> int | None:
    """Bytes that a control group may still take; None where it has no such limit."""
    try:
        most, used = (int((group / name).read_text()) for name in (limit, use))
        facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # of the other version, or "max"
        return None
    cache = (facts.get(f"total_{name}", facts.get(name, "0")) for name in FILE_CACHE)
    return most - used + sum(map(int, cache))
