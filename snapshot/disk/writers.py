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
"""Bytes of a text's length, and of a text that one collective exchanges; a longer one takes two."""
PROBE = f"{TEMPORARY_PREFIX}shared-"
"""How the folder begins in which all who write a snapshot must meet."""
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
        """Run `work()` on each process that writes; all results by rank, or the first error.

        Results are what JSON can hold. Each must call this in the same thread, in the same order.
        An error is raised on all of them. Raises OSError if a process is gone or silent.
        """
        if self.group is None:
            return [work()]
        result, error = None, None
        try:
            result = work()
        except Exception as failed:
            error = failed
        told = [result, None if error is None else _in_words(error, self.rank)]
        rows = [json.loads(row) for row in self._gather(json.dumps(told))]
        if error is not None and not isinstance(error, OSError | SnapshotError):
            raise error
        rank = next((rank for rank, (_, failure) in enumerate(rows) if failure), None)
        if rank is not None:
            raise error if error is not None and rank == self.rank else _error_in(rows[rank][1])
        return [result for result, _ in rows]

    def _gather(self, text: str) -> list[str]:
        """The texts of all, by rank. As bytes in tensors: torch would pickle objects."""
        content = text.encode()
        try:
            heads = self._exchange(len(content).to_bytes(HEAD, "big") + content[:ROOM], HEAD + ROOM)
            sizes = [int.from_bytes(head[:HEAD], "big") for head in heads]
            rows = [head[HEAD:] for head in heads]
            if max(sizes) > ROOM:
                rows = self._exchange(content, max(sizes))
        except RuntimeError as error:  # gloo's, of a broken connection or the timeout
            raise OSError("another process that writes a part of it is gone or silent") from error
        return [row[:size].decode() for row, size in zip(rows, sizes, strict=True)]

    def _exchange(self, content: bytes, size: int) -> list[bytes]:
        from torch.distributed import all_gather

        own = torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in range(self.count)]
        all_gather(rows, own, group=self.group)
        return [bytes(row.numpy()) for row in rows]

    def end(self) -> None:
        """End the group: it must not outlive the one of training, or the process may abort."""
        if self.group is not None:
            from torch.distributed import destroy_process_group

            destroy_process_group(self.group)


def _in_words(error: Exception, rank: int) -> tuple[str, str]:
    """The kind and the message of an error, for the other processes."""
    if isinstance(error, SnapshotError):
        return type(error).__name__, str(error)
    is_known = isinstance(error, OSError)
    return OSError.__name__, str(error) if is_known else f"{error!r} in rank {rank}"


def _error_in(words: tuple[str, str]) -> Exception:
    kind, message = words
    kinds = {of.__name__: of for of in (NumberFault, SnapshotError)}
    return kinds.get(kind, OSError)(message)


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

    def try_to_write() -> tuple[bool, list[str], str, bool, int]:
        probes = []
        for probe in root.glob(f"{PROBE}*"):
            with suppress(OSError):
                (probe / str(rank)).touch()
                probes.append(probe.name)
        return is_main or has_parts, probes, name if is_main else "", is_coherent(root), machine

    told = writers.on_all(try_to_write)
    shared = next(row[2] for row in told if row[2])
    rows = [row for row in told if row[0]]
    several = len({row[4] for row in rows}) > 1
    can_share = all(shared in row[1] and (row[3] or not several) for row in rows)
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
