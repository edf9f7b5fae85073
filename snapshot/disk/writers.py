"""The processes that write a snapshot: the main process alone, or each what it holds.

They write in threads while training's collectives run. So they agree in a process group of their
own, of gloo, which nothing but these threads uses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor

from snapshot.errors import NumberFault, SnapshotError

INCOHERENT = ("nfs", "cifs", "smb", "9p", "fuse.sshfs")
"""File systems that may write back the bytes around those of a process: how their names begin."""
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
        An error of one is raised on all; an OSError keeps its errno. Raises OSError if a process is
        gone or silent.
        """
        if self.group is None:
            return [work()]
        result, error, failure = None, None, None
        try:
            result = work()
        except Exception as raised:
            error, text = raised, str(raised)
            kind = next((name for name in KINDS if isinstance(error, KINDS[name])), None)
            text = text if kind else f"{error!r} in rank {self.rank}"
            failure = [kind or OSError.__name__, text, getattr(error, "errno", None)]
        rows = self._gather([result, failure])
        if error is not None:
            raise error
        for _, failure in rows:
            if failure is not None:
                kind, text, number = failure
                raised_elsewhere = KINDS[kind](text)
                if isinstance(raised_elsewhere, OSError):
                    raised_elsewhere.errno = number  # a full disk has its own remedy
                raise raised_elsewhere
        return [result for result, _ in rows]

    def _gather(self, value: Any) -> list[Any]:
        """The values of all, by rank. They travel as JSON: torch would pickle objects."""
        text = json.dumps(value).encode()
        try:
            sizes = self._exchange(torch.tensor([len(text)]))
            padded = bytearray(text.ljust(max(int(size) for size in sizes)))
            texts = self._exchange(torch.frombuffer(padded, dtype=torch.uint8))
        except RuntimeError as error:  # gloo's, of a broken connection or the timeout
            raise OSError("another process that writes a part of it is gone or silent") from error
        return [json.loads(bytes(one.tolist())) for one in texts]

    def _exchange(self, own: Tensor) -> list[Tensor]:
        """The tensors of all, by rank, which have one size."""
        of_all = [torch.empty_like(own) for _ in range(self.count)]
        torch.distributed.all_gather(of_all, own, group=self.group)
        return of_all

    def end(self) -> None:
        """End the group: it must not outlive the one of training, or the process may abort."""
        if self.group is not None:
            torch.distributed.destroy_process_group(self.group)


def is_coherent(folder: Path) -> bool:
    """Whether processes of several machines may write neighbouring bytes of one file here."""
    mounts = {Path(one.mountpoint): one.fstype for one in psutil.disk_partitions(all=True)}
    at = folder.resolve()  # a link may lead to another file system
    kind = next((mounts[place] for place in (at, *at.parents) if place in mounts), "")
    return not kind.startswith(INCOHERENT)
