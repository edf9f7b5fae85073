"""Which of several attempts may upload to a repo. docs/hub.md states the rule.

The attempt whose `latest.json` is at the head owns the repo. While it lives it commits at least as
often as it announces there. Another attempt of the same run takes over when the owner has ended or
been silent for longer, as measured by its own clock: the clocks of machines may differ.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection

from store.latest import LONGEST_SILENCE_SECONDS, Latest

SHORTEST_SILENCE_SECONDS = 600
"""Shorter outages of the Hub do not cost an attempt its repo."""
USUAL_SILENCE_SECONDS = 3600
"""An attempt with rarer snapshots commits signs of life in between."""
LOOK_SECONDS = 120.0
"""How often an attempt that waits looks at the repo."""
RETRY_SECONDS = 60.0
"""Until the next try of a sign of life that failed."""

Clock = Callable[[], float]


class Fenced(Exception):
    """The repo is another run's, or holds other files. The message is a sentence."""


class Held(Exception):
    """Another attempt of this run owns the repo. The message is a sentence."""

    def __init__(self, message: str, step: int, seconds: float) -> None:
        super().__init__(message)
        self.step = step
        """The newest step in the repo."""
        self.seconds = seconds
        """Until this attempt may take over, unless the other one commits; infinite for a snapshot
        of an earlier step than the repo has."""


class Fence:
    """Whether an attempt may replace the `latest.json` that it finds. Not thread-safe."""

    def __init__(
        self,
        repo_id: str,
        run_id: str,
        ours: Collection[str],
        known: Latest | None,
        may_take_over: bool,
        notify: Callable[[str], None],
        clock: Clock = time.monotonic,
    ) -> None:
        """`ours` are this attempt and those of this run that are known to be over."""
        self._repo_id, self._run_id, self._ours = repo_id, run_id, frozenset(ours)
        self.known = known
        """What another attempt wrote and this one may replace: first what it found at its start."""
        self.may_take_over = may_take_over
        """Whether to replace anything, as `hub.takeover` asks: until the first upload."""
        self._notify, self._clock = notify, clock
        self._seen: tuple[Latest, float] | None = None
        """The newest `latest.json` of a living owner, and when it was first seen."""

    def check(self, found: Latest | None, step: int) -> bool:
        """Whether this attempt takes over from another one, with a snapshot of that step.

        Raises Fenced or Held if it may not replace `found`.
        """
        if found is None or found.attempt_id in self._ours or found == self.known:
            return False
        if not self.may_take_over:
            if found.run_id != self._run_id:
                raise Fenced(
                    f"another run has uploaded step {found.step} to {self._repo_id}; this one "
                    "stops uploading. Training continues with local snapshots. To take the repo "
                    "back, start again with hub.takeover=true; to keep both, give one of them "
                    "another hub.repo_id."
                )
            self._wait_for(found, step)
            self._notify(
                f"another attempt of this run has {_end_of(found)} after its upload of step "
                f"{found.step} to {self._repo_id}; this one continues there."
            )
        self.known = found
        return True

    def _wait_for(self, found: Latest, step: int) -> None:
        """Raise Held unless the owner is over and the repo has no later step."""
        if self._seen is None or self._seen[0] != found:
            self._seen = found, self._clock()
        left = self._seen[1] + found.silence_seconds - self._clock()
        uploaded = f"another attempt of this run has uploaded step {found.step} to {self._repo_id}"
        if left > 0:
            raise Held(
                f"{uploaded}. This one takes over when that one has been silent for "
                f"{found.silence_seconds / 60:.0f} minutes",
                found.step,
                left,
            )
        if found.step > step:
            raise Held(
                f"{uploaded} and has {_end_of(found)}. This one uploads from that step on",
                found.step,
                math.inf,
            )


def _end_of(found: Latest) -> str:
    if found.silence_seconds == 0:
        return "ended"
    return f"been silent for {found.silence_seconds / 60:.0f} minutes"


class Pulse:
    """What an attempt announces: within how many seconds it commits again. Not thread-safe."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._due = math.inf
        self._longest_gap = self._longest_upload = 0.0

    def silence_seconds(self) -> int:
        """The longest silence to announce in a commit that is made now.

        Nothing is committed while an upload's contents are sent, so it covers these.
        """
        gap = max(self._longest_gap, self._clock() - self._last)
        usual = min(max(2 * gap, SHORTEST_SILENCE_SECONDS), USUAL_SILENCE_SECONDS)
        return math.ceil(min(max(usual, 3 * self._longest_upload), LONGEST_SILENCE_SECONDS))

    def committed(self, silence_seconds: int, began: float) -> None:
        """Note a commit that announced a silence, after an upload that began at a time."""
        now = self._clock()
        self._longest_gap = max(self._longest_gap, now - self._last)
        self._longest_upload = max(self._longest_upload, now - began)
        self._last, self._due = now, now + 0.75 * silence_seconds
        if silence_seconds == 0:
            self.stop()
        elif 3 * self._longest_upload > silence_seconds:  # announce more before the next upload
            self._due = now

    def seconds_left(self) -> float:
        """Until the next sign of life is due; infinite while this attempt owns nothing."""
        return self._due - self._clock()

    def stop(self) -> None:
        """Note that this attempt does not own the repo, or has ended."""
        self._due = math.inf

    def retry(self) -> None:
        """Note that a sign of life failed."""
        self._due = self._clock() + RETRY_SECONDS
