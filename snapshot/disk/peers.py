"""The processes that write one snapshot at once, and the files by which they agree on its end.

Their threads write while training's collectives run, so they must not call any themselves. Each
process has a marker in the snapshot's temporary folder: the stage that it has reached, and what the
others need to know.
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
from snapshot.errors import SnapshotError

MARKERS = "ranks"
"""The folder of the markers."""
BEGUN, WRITTEN, HASHED, FAILED = STAGES = ("begun", "written", "hashed", "failed")
RESERVED_BYTES = 512
"""In each marker, and for each file: a process must be able to report that the disk is full."""
LONGEST_ERROR = 300
POLL_SECONDS = (0.002, 0.2)
"""The first and the longest time between two looks at the markers."""
INCOHERENT = ("nfs", "cifs", "smb", "9p", "fuse.sshfs")
"""How the names of file systems begin that may write back the bytes around those of a process."""


class Member(NamedTuple):
    """A process that writes."""

    rank: int
    machine: int
    pid: int


@dataclass
class Ranks:
    """The processes of a run, for those that write shards. Every process has one."""

    rank: int
    machine: int
    gather: Callable[[list[int]], list[list[int]]]
    """The numbers of all processes, by rank. Every process must call this."""
    tell: Callable[[str], str]
    """The main process's text. Every process must call this."""
    timeout: float
    """Seconds without any progress after which a process is taken for lost."""
    members: list[Member] = field(default_factory=list)
    """Those that write at once; none where the main process gathers all shards and writes."""

    @property
    def one_machine(self) -> bool:
        """Whether all members are on one machine."""
        return len({member.machine for member in self.members}) == 1

    @property
    def writes(self) -> bool:
        """Whether this process is a member."""
        return any(member.rank == self.rank for member in self.members)

    def find_members(self, root: Path, has_shards: bool) -> bool:
        """Find out whether all processes whose shards are written can write to `root`.

        Otherwise there are no members. Returns whether there are. Every process must call this.
        """
        is_main, place = self.rank == 0, None
        if is_main:
            with suppress(OSError):
                place = root / f"{TEMPORARY_PREFIX}shared-{os.getpid()}-{time.time_ns()}"
                place.mkdir(parents=True)
        named = self.tell(place.name if place is not None and place.is_dir() else "")
        takes_part = is_main or has_shards
        can_write = False
        if named:
            with suppress(OSError):
                (root / named / str(self.rank)).touch()
                can_write = True
        mine = [takes_part, can_write, is_coherent(root), self.machine, os.getpid()]
        rows = self.gather([int(number) for number in mine])
        taking = {rank: row for rank, row in enumerate(rows) if row[0]}
        shared = all(row[1] for row in taking.values())
        if len({row[3] for row in taking.values()}) > 1:
            shared = shared and all(row[2] for row in taking.values())
        if is_main and place is not None:  # the main process must see what the others write
            shared = shared and all((place / str(rank)).exists() for rank in taking)
            shutil.rmtree(place, ignore_errors=True)
        if bool(self.tell("shared" if shared else "")):
            self.members = [Member(rank, row[3], row[4]) for rank, row in taking.items()]
        return bool(self.members)


def is_coherent(folder: Path) -> bool:
    """Whether processes of several machines may write neighbouring bytes of one file here."""
    mounts = {Path(one.mountpoint): one.fstype for one in psutil.disk_partitions(all=True)}
    at = folder.resolve()  # a link may lead to another file system
    kind = next((mounts[place] for place in (at, *at.parents) if place in mounts), "")
    return not kind.startswith(INCOHERENT)


def shares(sizes: Mapping[str, int], members: Sequence[Member]) -> dict[int, list[str]]:
    """Divide files among members, by rank: the largest first, to the one with the fewest bytes."""
    found: dict[int, list[str]] = {member.rank: [] for member in members}
    loads = dict.fromkeys(found, 0)
    for file in sorted(sizes, key=lambda file: (-sizes[file], file)):
        rank = min(loads, key=lambda rank: (loads[rank], rank))
        found[rank].append(file)
        loads[rank] += sizes[file]
    return found


class Markers:
    """The markers of one snapshot, as one member sees them."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        """`folder`: the snapshot's temporary folder."""
        self._place, self._ranks = folder / MARKERS, ranks
        self._mine = self._place / str(ranks.rank)

    def create(self, files: int) -> None:
        """Create the marker of each member. Raises OSError; only the main process calls this."""
        self._place.mkdir()
        for member in self._ranks.members:
            content = json.dumps({"stage": BEGUN}).ljust(RESERVED_BYTES * (files + 1))
            (self._place / str(member.rank)).write_text(content)

    def remove(self) -> None:
        """Remove all; every member has reached the last stage. Raises OSError."""
        shutil.rmtree(self._place)

    def reach(self, stage: str, **content: Any) -> None:
        """Let the others know that this process has reached a stage. Raises OSError."""
        with open(self._mine, "r+b", buffering=0) as opened:
            size = os.fstat(opened.fileno()).st_size
            opened.write(json.dumps({"stage": stage, **content}).encode().ljust(size))

    def fail(self, error: BaseException) -> None:
        """Let the others know that this process gives up."""
        is_numbers = isinstance(error, SnapshotError)
        try:
            self.reach(FAILED, error=str(error)[:LONGEST_ERROR], numbers=is_numbers)
        except OSError:  # removing takes no room
            with suppress(OSError):
                self._mine.unlink()

    def wait_for(self, stage: str) -> list[dict[str, Any]]:
        """Wait until all members have reached a stage; what they have left.

        Raises OSError, or SnapshotError, where one of them has failed or is gone.
        """
        before, since, pause = [""], time.monotonic(), POLL_SECONDS[0]
        while True:
            left = [self._look_at(member) for member in self._ranks.members]
            stages = [content["stage"] for content in left]
            if all(STAGES.index(at) >= STAGES.index(stage) for at in stages):
                return left
            if stages != before:
                before, since, pause = stages, time.monotonic(), POLL_SECONDS[0]
            if time.monotonic() - since > self._ranks.timeout:
                raise OSError(f"a process has not written its part for {self._ranks.timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS[1])

    def _look_at(self, member: Member) -> dict[str, Any]:
        """What a member has left. Raises the error that it has left, OSError if it is gone."""
        is_here = member.machine == self._ranks.machine
        is_gone = is_here and not _is_alive(member.pid)  # first: its last act may be a stage
        content: dict[str, Any] = {"stage": BEGUN}
        try:
            with suppress(json.JSONDecodeError):  # it is being written
                content = json.loads((self._place / str(member.rank)).read_bytes())
        except FileNotFoundError:
            raise OSError(f"process {member.rank} could not write its part") from None
        if content["stage"] == FAILED:
            raise (SnapshotError if content["numbers"] else OSError)(content["error"])
        if is_gone and content["stage"] != HASHED:
            raise OSError(f"process {member.rank} is gone")
        return content


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
