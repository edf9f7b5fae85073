"""How much memory this process may take."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from model.cpu.cores import control_groups
from training.distributed.environment import processes_here

MEMORY_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Files of a control group, versions 2 and 1: its limit and its use."""
FILE_CACHE = ("active_file", "inactive_file")
"""The part of the use that the system can reclaim; version 1 has it as total_... too."""


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
