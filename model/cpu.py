"""The CPU cores that this process may use: fewer than the machine has in a container or a job."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch


def limit_threads(processes: int = 1) -> None:
    """Use at most one thread for each core of a process's share, where `processes` share them."""
    share = max(1, cores() // processes)
    if torch.get_num_threads() > share:
        torch.set_num_threads(share)


def cores() -> int:
    """The CPU cores that this process may use, at least 1."""
    most = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on every system
        most = len(os.sched_getaffinity(0))
    return max(1, math.floor(min(most, cores_of_control_groups()) + 0.5))


def cores_of_control_groups(root: Path = Path("/")) -> float:
    """The CPU time that its control groups allow this process, in cores; infinite without a limit.

    `docker run --cpus`, Kubernetes and systemd limit it like that. torch does not know: it takes a
    thread for each core of the machine, and the system then stops all of them most of the time.
    """
    found = [math.inf]
    for group in control_groups("cpu", root):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            try:
                quota, period = " ".join((group / name).read_text() for name in names).split()
                if int(quota) > 0:  # -1 is no limit in version 1
                    found.append(int(quota) / int(period))
            except (OSError, ValueError):  # the other version, or "max"
                continue
    return min(found)


def control_groups(controller: str, root: Path = Path("/")) -> list[Path]:
    """Folders of the control groups, of version 1 and 2, that may limit this process.

    `controller` is "cpu" or "memory": version 1 has a hierarchy for each, or a link to one for
    several.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return []
    groups = []
    for _, controllers, name in (line.split(":", 2) for line in lines):
        if not controllers or controller in controllers.split(","):
            mounted = root / "sys/fs/cgroup" / (controller if controllers else "")
            inner = mounted / name.lstrip("/")
            groups += [inner, *(outer for outer in inner.parents if outer.is_relative_to(mounted))]
    return groups
