"""How far the Hub lags behind a run, for the progress line and the metrics; and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from snapshot.disk.files import MANIFEST
from snapshot.errors import SnapshotError
from store.errors import HubError, HubRefused
from store.remote import Transfer


@dataclass(frozen=True)
class UploadFailure:
    """Why an upload failed."""

    text: str
    """The complete message, for a warning and for the metrics."""
    short: str
    """One or two words, for the progress line."""
    lasting: bool = False
    """Whether it persists until somebody changes something."""
    is_held: bool = False
    """Whether another attempt of the run owns the repo."""

    @classmethod
    def of(cls, error: BaseException) -> UploadFailure:
        """The failure that an error of any kind is."""
        if isinstance(error, HubError):
            return cls(str(error), error.short, isinstance(error, HubRefused))
        return cls(repr(error), type(error).__name__)


@dataclass(frozen=True)
class UploadStatus:
    """How far the Hub lags behind a run."""

    step: int | None
    """The newest step on the Hub; None if it has none, or if that is unknown."""
    age_seconds: float | None
    """Seconds since the snapshot of that step was queued."""
    failure: UploadFailure | None
    """Why the last upload failed; None if it succeeded."""
    off: bool
    """Whether uploads have ended for good."""
    repo_was_read: bool = True
    """Whether the repo has been read at least once."""
    sent: Transfer = field(default_factory=Transfer)
    """What the uploads of this attempt have sent."""
    offered: int | None = None
    """The newest step of this attempt; None if it has offered none."""

    @property
    def is_ahead(self) -> bool:
        """Whether another attempt owns the repo, with a later step than this one's, or the same."""
        is_held = self.failure is not None and self.failure.is_held
        return is_held and (self.step or 0) >= (self.offered or 0)

    @property
    def failure_text(self) -> str | None:
        """The message of `failure`."""
        return None if self.failure is None else self.failure.text

    def as_words(self) -> str:
        """For the progress line: 'hub at step 40, 1:30 old, last error: HTTP 503'."""
        words = "hub has none yet" if self.repo_was_read else "hub not reached yet"
        if self.step is not None:
            words = f"hub at step {self.step}"
        if self.off:
            return f"{words}, uploads off"
        if self.age_seconds is not None:
            seconds = int(self.age_seconds)
            words += f", {seconds // 60}:{seconds % 60:02d} old"
        return words if self.failure is None else f"{words}, last error: {self.failure.short}"


def is_about_snapshot(error: Exception, folder: Path) -> bool:
    """Whether an error is about this snapshot alone, so that the next one may pass.

    The network raises HubError. Other errors of the disk, such as a full temporary folder, or too
    many open files, may pass as well.
    """
    if isinstance(error, SnapshotError) and not isinstance(error.__cause__, OSError):
        return True
    return not (folder / MANIFEST).is_file()
