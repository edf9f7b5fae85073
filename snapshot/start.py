"""Where an attempt starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from snapshot.disk.files import TEMPORARY_PREFIX
from snapshot.disk.state import RunState
from store.fetch import RepoContents
from store.latest import Latest

StateCheck = Callable[[RunState], object]
"""Raises SnapshotError for the state of a snapshot that an attempt must not resume from."""


def any_state(state: RunState) -> None:
    """The `StateCheck` that accepts every state."""


@dataclass(frozen=True)
class RemoteSnapshot:
    """A snapshot on the Hub, at a commit, so that it cannot change."""

    repo_id: str
    commit: str
    folder: str
    timeout: float = 60.0
    """`hub.timeout_seconds`: how long a request waits for a response."""
    is_bucket: bool = False


@dataclass(frozen=True)
class Start:
    """The snapshot that an attempt resumes from, if any."""

    folder: Path | None
    """The verified snapshot; None if the run starts from scratch."""
    state: RunState | None
    reason: str
    """Which snapshot and why, for the header."""
    warnings: tuple[str, ...] = ()
    """Problems with newer snapshots that were skipped, and with the Hub."""
    fetched: bool = False
    """Whether the snapshot was downloaded from the run's own repo."""
    remote: RemoteSnapshot | None = None
    """The same snapshot on the Hub, for machines that do not have it."""
    repo: RepoContents | None = None
    """The run's own repo as it was at the start; None if it could not be read."""
    ended_attempts: frozenset[str] = frozenset()
    """Attempts of this run that used this disk and are over."""

    @property
    def known_latest(self) -> Latest | None:
        """`latest.json` of the run's own repo; None if there is none, or it could not be read."""
        return None if self.repo is None else self.repo.latest

    @property
    def permanent_folder(self) -> Path | None:
        """`folder`, unless it is a temporary download that another run starts from."""
        temporary = self.folder is not None and self.folder.parent.name.startswith(TEMPORARY_PREFIX)
        return None if temporary else self.folder
