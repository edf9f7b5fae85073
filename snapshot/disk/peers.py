"""The processes that write one snapshot at once, and the files by which they follow each other.

They write in threads while training's collectives run, so they cannot call any themselves. Each
process has a file in the snapshot's temporary folder instead, with the stage that it has reached.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from snapshot.disk.files import TEMPORARY_PREFIX
from snapshot.errors import NumberFault, SnapshotError

PROGRESS = "ranks"
"""The folder with a file for each process."""
BEGUN, WRITTEN, HASHED, FAILED = STAGES = ("begun", "written", "hashed", "failed")
RESERVED_BYTES = 512
"""For each stage and each tensor file: a process must be able to report that the disk is full."""
LONGEST_ERROR = 300
POLL_SECONDS = (0.002, 0.2)
"""The first and the longest time between two looks at the files."""
INCOHERENT = ("nfs", "cifs", "smb", "9p", "fuse.sshfs")
"""File systems that may write back the bytes around those of a process: how their names begin."""


class Peer(NamedTuple):
    """A process that writes."""

    rank: int
    machine: int
    pid: int


@dataclass
class Peers:
    """The processes that write their shards of each snapshot. Every process of the run has one."""

    rank: int
    machine: int
    gather: Callable[[list[int]], list[list[int]]]
    """The numbers of all processes, by rank. Every process must call this."""
    tell: Callable[[str], str]
    """The main process's text. Every process must call this."""
    timeout: float
    """Seconds without progress of any process after which one is considered lost."""
    writing: list[Peer] = field(default_factory=list)
    """Those that write. If there are none, the main process gathers all shards and writes."""

    @property
    def one_machine(self) -> bool:
        """Whether those that write are on one machine."""
        return len({peer.machine for peer in self.writing}) == 1

    @property
    def writes(self) -> bool:
        """Whether this process is one of those that write."""
        return any(peer.rank == self.rank for peer in self.writing)

    def find(self, root: Path, has_shards: bool) -> bool:
        """Find out whether all processes whose shards are written can write to `root`.

        If not, none of them writes. Returns whether they do. Every process must call this.
        """
        is_main, shared = self.rank == 0, None
        if is_main:
            with suppress(OSError):
                shared = root / f"{TEMPORARY_PREFIX}shared-{os.getpid()}-{time.time_ns()}"
                shared.mkdir(parents=True)
        named = self.tell(shared.name if shared is not None and shared.is_dir() else "")
        can_write = False
        if named:
            with suppress(OSError):
                (root / named / str(self.rank)).touch()
                can_write = True
        mine = [is_main or has_shards, can_write, is_coherent(root), self.machine, os.getpid()]
        rows = enumerate(self.gather([int(number) for number in mine]))
        writing = {rank: row for rank, row in rows if row[0]}
        can_share = all(row[1] for row in writing.values())
        if len({row[3] for row in writing.values()}) > 1:
            can_share = can_share and all(row[2] for row in writing.values())
        if is_main and shared is not None:  # the main process must see what the others write
            can_share = can_share and all((shared / str(rank)).exists() for rank in writing)
            shutil.rmtree(shared, ignore_errors=True)
        if self.tell("shared" if can_share else ""):
            self.writing = [Peer(rank, row[3], row[4]) for rank, row in writing.items()]
        return bool(self.writing)


def is_coherent(folder: Path) -> bool:
    """Whether processes of several machines may write neighbouring bytes of one file here."""
    mounts = {Path(one.mountpoint): one.fstype for one in psutil.disk_partitions(all=True)}
    at = folder.resolve()  # a link may lead to another file system
    kind = next((mounts[place] for place in (at, *at.parents) if place in mounts), "")
    return not kind.startswith(INCOHERENT)


def files_by_rank(sizes: Mapping[str, int], peers: Sequence[Peer]) -> dict[int, list[str]]:
    """Divide files among peers: the largest first, to the one with the fewest bytes."""
    found: dict[int, list[str]] = {peer.rank: [] for peer in peers}
    loads = dict.fromkeys(found, 0)
    for file in sorted(sizes, key=lambda file: (-sizes[file], file)):
        rank = min(loads, key=lambda rank: (loads[rank], rank))
        found[rank].append(file)
        loads[rank] += sizes[file]
    return found


class Progress:
    """How far each of the peers has come with one snapshot, as one of them sees it."""

    def __init__(self, folder: Path, peers: Peers) -> None:
        """`folder`: the snapshot's temporary folder."""
        self._folder, self._peers = folder / PROGRESS, peers
        self._mine = self._folder / str(peers.rank)

    def create(self, files: int) -> None:
        """Create each peer's file. Raises OSError; only the main process calls this."""
        self._folder.mkdir()
        for peer in self._peers.writing:
            content = json.dumps({"stage": BEGUN}).ljust(RESERVED_BYTES * (files + 1))
            (self._folder / str(peer.rank)).write_text(content)

    def remove(self) -> None:
        """Remove all files; every peer has reached the last stage. Raises OSError."""
        shutil.rmtree(self._folder)

    def reach(self, stage: str, **content: Any) -> None:
        """Let the others know that this process has reached a stage. Raises OSError."""
        with open(self._mine, "r+b", buffering=0) as opened:
            size = os.fstat(opened.fileno()).st_size
            opened.write(json.dumps({"stage": stage, **content}).encode().ljust(size))

    def fail(self, error: BaseException) -> None:
        """Let the others know that this process gives up."""
        is_unsound = isinstance(error, SnapshotError)  # not the disk: what it holds is wrong
        try:
            self.reach(FAILED, error=str(error)[:LONGEST_ERROR], unsound=is_unsound)
        except OSError:  # a missing file tells of a failure, too, and removing it takes no room
            with suppress(OSError):
                self._mine.unlink()

    def wait_for(self, stage: str) -> list[dict[str, Any]]:
        """Wait until all peers have reached a stage; what they have told.

        Raises OSError or SnapshotError if one of them has failed or is gone.
        """
        before, since, pause = [""], time.monotonic(), POLL_SECONDS[0]
        while True:
            told = [self._told_by(peer) for peer in self._peers.writing]
            stages = [content["stage"] for content in told]
            if all(STAGES.index(at) >= STAGES.index(stage) for at in stages):
                return told
            if stages != before:
                before, since, pause = stages, time.monotonic(), POLL_SECONDS[0]
            if time.monotonic() - since > self._peers.timeout:
                raise OSError(f"a process has not written its part for {self._peers.timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS[1])

    def _told_by(self, peer: Peer) -> dict[str, Any]:
        """What a peer has told. Raises its error, and OSError if it is gone."""
        is_here = peer.machine == self._peers.machine
        is_gone = is_here and not _is_alive(peer.pid)  # first: its last act may be a stage
        content: dict[str, Any] = {"stage": BEGUN}
        try:
            with suppress(json.JSONDecodeError):  # it is being written
                content = json.loads((self._folder / str(peer.rank)).read_bytes())
        except FileNotFoundError:
            raise OSError(f"process {peer.rank} could not write its part") from None
        if content["stage"] == FAILED:
            raise (NumberFault if content["unsound"] else OSError)(content["error"])
        if is_gone and content["stage"] != HASHED:
            raise OSError(f"process {peer.rank} is gone")
        return content


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
