"""Memory: how much this process may take, and what it keeps of what it frees."""

from __future__ import annotations

import ctypes
from pathlib import Path

import psutil
import torch

from model.cores import control_groups
from training.distributed.environment import processes_here

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Of glibc's malloc.h."""
LARGEST_KEPT, LARGEST_KEPT_OF_SHARDS = 32 << 20, 1 << 20
"""Bytes of an allocation. glibc accepts no more than the first."""
MEMORY_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Files of a control group, versions 2 and 1: its limit and its use."""
FILE_CACHE = ("active_file", "inactive_file")
"""The part of the use that the system can reclaim; version 1 has it as total_... too."""


def use_one_heap() -> None:
    """Make malloc use one heap for all threads: each that uploads would keep what it has freed."""
    _call_glibc("mallopt", M_ARENA_MAX, 1)


def keep_freed_memory(sharded: bool) -> None:
    """Return what is free to the system; from now on malloc keeps what a step frees for the next.

    Every step allocates the same megabytes. The system would clear each returned page again, which
    takes 5 to 8 percent of a step in bf16. Only glibc returns pages like that; with another C
    library nothing happens. Under FSDP (`sharded`), which is there to save memory, only small
    allocations are kept.

    Call it only where steps are computed on the CPU, and when what the start needed is freed: a
    copy of the weights that has left for the device or was sharded would stay for ever.
    """
    _call_glibc("malloc_trim", 0)
    # Larger tensors are mappings of their own. In the heap they would leave holes that nothing else
    # fits: a process that trains 135 M parameters under FSDP took 3.9 GB of memory for 2.2.
    _call_glibc("mallopt", M_MMAP_THRESHOLD, LARGEST_KEPT_OF_SHARDS if sharded else LARGEST_KEPT)
    _call_glibc("mallopt", M_TRIM_THRESHOLD, -1)  # never


def _call_glibc(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)


def memory_left(device: torch.device, with_swap: bool = False) -> int:
    """Bytes that this process may still take: on a CUDA device, or else of this machine.

    On CUDA it is what is free there, or cached by torch without use. Of the machine it is an equal
    share for each process that the launcher started on it; `with_swap` for what may be slow.
    """
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + idle)
    return available_memory(with_swap) // processes_here()


def available_memory(with_swap: bool = False, root: Path = Path("/")) -> int:
    """Bytes that the processes of this machine can still allocate, within their control groups.

    The system kills a container or a Slurm job that exceeds its control group's limit, even when
    the machine has memory left. psutil only knows the machine.
    """
    machine = psutil.virtual_memory().available
    if with_swap:
        machine += psutil.swap_memory().free
    left = [
        _left_in(group, *names)
        for group in control_groups("memory", root)
        for names in MEMORY_FILES
    ]
    return min([machine, *(each for each in left if each is not None)])


def _left_in(group: Path, limit: str, use: str) -> int | None:
    """Bytes that a control group can still allocate; None where it has no limit."""
    try:
        most, used = (int((group / name).read_text()) for name in (limit, use))
        facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # the other version, or "max"
        return None
    cache = (facts.get(f"total_{name}", facts.get(name, "0")) for name in FILE_CACHE)
    return most - used + sum(map(int, cache))
