"""How far the Hub is behind a run, for its progress line and its metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Uploaded:
    """How far the Hub is behind."""

    step: int | None
    """The newest step on the Hub; None when there is none, or it is not known."""
    seconds: float | None
    """Since the snapshot of that step was handed over."""
    fault: str | None
    """Why the last try failed; None when it did not."""
    off: bool
    """Nothing will be uploaded any more."""

    def as_words(self) -> str:
        """For the progress line: 'hub at step 40, 1:30 old, last error: ...'."""
        words = "hub has none yet" if self.step is None else f"hub at step {self.step}"
        if self.off:
            return f"{words}, uploads off"
        if self.seconds is not None:
            words += f", {int(self.seconds) // 60}:{int(self.seconds) % 60:02d} old"
        return words if self.fault is None else f"{words}, last error: {self.fault}"
