"""The processes that write a snapshot: the main process alone, or each what it holds.

They write in threads while training's collectives run. So they agree in a process group of their
own, of gloo, which nothing but these threads uses.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from snapshot.disk.folder import TEMPORARY_PREFIX
from snapshot.errors import NumberFault, SnapshotError

INCOHERENT = ("nfs", "cifs", "smb", "9p", "fuse.sshfs")
"""File systems that may write back the bytes around those of a process: how their names begin."""
HEAD, ROOM = 8, 1 << 12
"""Bytes of a text's length, and of what one collective exchanges; a longer text takes two."""
PROBE = f"{TEMPORARY_PREFIX}shared-"
"""How the folder begins in which all who write a snapshot must meet."""
KINDS = {kind.__name__: kind for kind in (NumberFault, SnapshotError, OSError)}
"""Errors of one process that all raise; the first kind that fits. Any other becomes OSError."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Writers:
    """Who writes, as one process sees it."""

    is_main: bool = True
    rank: int = 0
    group: Any = None
    """The group of all processes, each of which writes what it holds; None: the main process
    gathers and writes everything."""

    @property
    def count(self) -> int:
        """How many processes write."""
        return 1 if self.group is None else self.group.size()

    def on_all(self, work: Callable[[], Result]) -> list[Result]:
        """Run `work()` on each process that writes; all results by rank.

        Results are what JSON can hold. Each must call this in the same thread, in the same order.
        An error of one is raised on all. Raises OSError if a process is gone or silent.
        """
        if self.group is None:
            return [work()]
        result, error, failure = None, None, None
        try:
            result = work()
        except Exception as raised:
            error, text = raised, str(raised)
            kind = next((name for name in KINDS if isinstance(error, KINDS[name])), None)
            failure = [kind or OSError.__name__, text if kind else f"{error!r} in rank {self.rank}"]
        rows = self._gather([result, failure])
        if error is not None:
            raise error
        for _, failure in rows:
            if failure is not None:
                raise KINDS[failure[0]](failure[1])
        return [result for result, _ in rows]

    def _gather(self, value: Any) -> list[Any]:
        """The values of all, by rank. They travel as JSON: torch would pickle objects."""
        text = json.dumps(value).encode()
        content = len(text).to_bytes(HEAD, "big") + text
        try:
            rows = self._exchange(content, ROOM)
            longest = HEAD + max(int.from_bytes(row[:HEAD], "big") for row in rows)
            if longest > ROOM:
                rows = self._exchange(content, longest)
        except RuntimeError as error:  # gloo's, of a broken connection or the timeout
            raise OSError("another process that writes a part of it is gone or silent") from error
        return [json.loads(row[HEAD:]) for row in rows]

    def _exchange(self, content: bytes, size: int) -> list[bytes]:
        """The first `size` bytes of all, by rank; JSON ignores the spaces that fill up a text."""
        own = torch.frombuffer(bytearray(content[:size].ljust(size)), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in range(self.count)]
        torch.distributed.all_gather(rows, own, group=self.group)
        return [bytes(row) for row in rows]

    def end(self) -> None:
        """End the group: it must not outlive the one of training, or the process may abort."""
        if self.group is not None:
            torch.distributed.destroy_process_group(self.group)


def find_writers(
    make_group: Callable[[], Any],
    is_main: bool,
    rank: int,
    root: Path,
    machine: int,
    has_parts: bool,
) -> Writers:
    """The writers of a sharded model's snapshots in `root`. Every process must call this.

    Each process writes what it holds if all of those that hold something can write to one folder,
    and neighbouring bytes of one file. Otherwise the main process writes alone, and the group ends.
    """
    name = f"{PROBE}{os.getpid()}-{time.time_ns()}"
    if is_main:  # before the group: gloo connects all processes while it is made
        with suppress(OSError):
            (root / name).mkdir(parents=True)
    writers = Writers(is_main, rank, make_group())

    def try_to_write() -> dict[str, Any]:
        reached = []
        for probe in root.glob(f"{PROBE}*"):  # the main process's, and those of killed runs
            with suppress(OSError):
                (probe / str(rank)).touch()
                reached.append(probe.name)
        return {
            "reached": reached,
            "probe": name if is_main else None,
            "writes": is_main or has_parts,
            "coherent": is_coherent(root),
            "machine": machine,
        }

    rows = writers.on_all(try_to_write)
    (shared,) = (row["probe"] for row in rows if row["probe"])
    rows = [row for row in rows if row["writes"]]
    several = len({row["machine"] for row in rows}) > 1
    can_share = all(shared in row["reached"] and (row["coherent"] or not several) for row in rows)
    if is_main:
        shutil.rmtree(root / name, ignore_errors=True)
    if can_share:
        return writers
    writers.end()
    return Writers(is_main, rank)


def is_coherent(folder: Path) -> bool:
    """Whether processes of several machines may write neighbouring bytes of one file here."""
    mounts = {Path(one.mountpoint): one.fstype for one in psutil.disk_partitions(all=True)}
    at = folder.resolve()  # a link may lead to another file system
    kind = next((mounts[place] for place in (at, *at.parents) if place in mounts), "")
    return not kind.startswith(INCOHERENT)
