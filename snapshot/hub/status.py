"""How far the Hub is behind a run, for its progress line and its metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """Why a try failed."""

    sentence: str
    """All of it, for a warning and for the metrics."""
    short: str
    """In a word or two, for the progress line."""
    lasting: bool = False
    """Whether it stays until somebody changes something."""


@dataclass(frozen=True)
class UploadStatus:
    """How far the Hub is behind."""

    step: int | None
    """The newest step on the Hub; None when there is none, or it is not known."""
    seconds: float | None
    """Since the snapshot of that step was handed over."""
    failure: Fault | None
    """Why the last try failed; None when it did not."""
    off: bool
    """Nothing will be uploaded any more."""
    known: bool = True
    """Whether the Hub has said what it holds."""

    @property
    def fault(self) -> str | None:
        """The sentence of `failure`."""
        return None if self.failure is None else self.failure.sentence

    def as_words(self) -> str:
        """For the progress line: 'hub at step 40, 1:30 old, last error: HTTP 503'."""
        words = "hub has none yet" if self.known else "hub not reached yet"
        if self.step is not None:
            words = f"hub at step {self.step}"
        if self.off:
            return f"{words}, uploads off"
        if self.seconds is not None:
            words += f", {int(self.seconds) // 60}:{int(self.seconds) % 60:02d} old"
        return words if self.failure is None else f"{words}, last error: {self.failure.short}"
