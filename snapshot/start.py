"""What an attempt goes on from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from snapshot.disk.files import TEMPORARY_PREFIX
from snapshot.disk.state import RunState
from snapshot.hub.latest import Latest


@dataclass(frozen=True)
class Place:
    """A snapshot on the Hub, by a commit that cannot change."""

    repo_id: str
    commit: str
    folder: str
    timeout: float = 60.0
    """Seconds after which a silent request is given up, as `hub.timeout_seconds` says."""


@dataclass(frozen=True)
class Start:
    """What a run goes on from."""

    folder: Path | None
    """The verified snapshot; None for a run from the beginning."""
    state: RunState | None
    reason: str
    """Which snapshot and why, for the header."""
    warnings: tuple[str, ...] = ()
    """What is wrong with newer snapshots that were passed over, and with the Hub."""
    place: Place | None = None
    """Where on the Hub the same snapshot lies, for machines that do not have it."""
    seen: Latest | None = None
    """`latest.json` of the run's own repo; None where there is none, or it could not be asked."""
    hub_is_known: bool = False
    """Whether the run's own repo could be asked."""
    ended: frozenset[str] = frozenset()
    """Attempts of this run that ran on this disk, and are over."""

    @property
    def kept(self) -> Path | None:
        """The snapshot, unless it was fetched to begin another run from, and goes again."""
        fetched = self.folder is not None and self.folder.parent.name.startswith(TEMPORARY_PREFIX)
        return None if fetched else self.folder
