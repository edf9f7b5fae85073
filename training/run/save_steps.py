"""At which steps a run saves. All processes save at the same step.

With `snapshot.every_minutes` the main process reads the clock, and says that a snapshot is due in
the message in which the processes agree to stop or to continue (`training.run.stop`). Which steps
are saved changes nothing that is learned.
"""

from __future__ import annotations

import time

from config.schema import Config


class SaveSteps:
    """Reads the clock on the main process, and has the same answers on all processes."""

    def __init__(self, config: Config, step: int, is_main: bool) -> None:
        """Begin an attempt after `step`."""
        self._config, self._is_main = config, is_main
        self._minutes = config.snapshot.every_minutes
        self._saved, self._saved_at = step, time.monotonic()
        self._is_agreed = False
        """Whether all processes know that the minutes are over."""

    def is_due(self, step: int) -> bool:
        """Whether a snapshot of `step` is due, on all processes alike."""
        hub, train, saving = self._config.hub, self._config.train, self._config.snapshot
        if self._minutes is None:
            return step % saving.every == 0
        is_milestone = hub.milestone_every is not None and step % hub.milestone_every == 0
        may_be_best = saving.keep_best and step % train.eval_every == 0
        return self._is_agreed or is_milestone or may_be_best

    def saved(self, step: int) -> None:
        """A snapshot of `step` begins. Every process must call this."""
        self._saved, self._saved_at, self._is_agreed = step, time.monotonic(), False

    def is_time(self) -> bool:
        """Whether the minutes since the last snapshot are over, on the main process."""
        if self._minutes is None or not self._is_main:
            return False
        return time.monotonic() - self._saved_at >= 60 * self._minutes

    def agree(self, step: int, is_time: bool) -> None:
        """Take the main process's answer at `step`. Every process must call this.

        On a GPU the answer may have been computed before the last snapshot: then it is void.
        """
        if is_time and step > self._saved:
            self._is_agreed = True
