"""At which steps a run saves. The main process decides, and all processes save at the same step.

Where snapshots are not every so many steps, the main process announces the next one in the message
in which the processes agree to stop or to continue (`training.run.stop`). Which steps are saved
changes nothing that is learned.
"""

from __future__ import annotations

import math
import time
from statistics import median

from config.schema import AUTO_SAVING, Config
from snapshot.interval import Choice, Costs, choose_interval, interruptions_per_day, is_near
from store.goodput import DATA, PASSES, UPDATE
from training.reporting.report import Report

WARM_UP = 2
"""Steps before which a process has not reached its speed."""
TIMED_STEPS, TIMED_SECONDS = 10, 10.0
"""After so many steps or seconds, the time of a step is known."""
COPY_BYTES_A_SECOND = 4e9
"""Before the first snapshot: optimistic, so that it comes early and is measured."""


class SaveSteps:
    """Decides on the main process, and has the same answers on all others."""

    def __init__(
        self,
        config: Config,
        report: Report,
        is_main: bool,
        snapshot_bytes: int,
        interruptions: tuple[int, float] = (0, 0.0),
        disk_stays: bool = False,
    ) -> None:
        """Begin an attempt. `interruptions`: how many the run has seen, in so many seconds.

        `disk_stays`: the run's disk has outlived an interruption.
        """
        self._config, self._report, self._is_main = config, report, is_main
        self._bytes, self._interruptions = snapshot_bytes, interruptions
        self._disk_stays = disk_stays
        self._every = config.snapshot.every
        self._minutes = config.snapshot.every_minutes
        self._is_fixed = self._minutes is None and self._every != AUTO_SAVING
        self._saved, self._saved_at = report.console.step, time.monotonic()
        self._at = math.inf
        """The step of the next snapshot, as the main process has announced it."""
        self._begun_at = self._saved_at
        self._timed_from: tuple[int, float] | None = None
        """A step, and the seconds of steps until then."""
        self._chosen: Choice | None = None
        self._measured = -1
        """How many snapshots were on disk at the last choice."""

    def is_due(self, step: int) -> bool:
        """Whether a snapshot of `step` is due, on all processes alike."""
        if self._is_fixed:
            assert isinstance(self._every, int)
            return step % self._every == 0
        hub, train = self._config.hub, self._config.train
        is_milestone = hub.milestone_every is not None and step % hub.milestone_every == 0
        may_be_best = self._config.snapshot.keep_best and step % train.eval_every == 0
        return step >= self._at or is_milestone or may_be_best

    def saved(self, step: int) -> None:
        """A snapshot of `step` begins. Every process must call this."""
        self._saved, self._saved_at, self._at = step, time.monotonic(), math.inf

    def agree(self, step: int, ahead: float) -> None:
        """Take what the main process answered at `step`. Every process must call this."""
        if ahead > 0 and (at := step + round(ahead) - 1) > self._saved:
            self._at = at

    def ahead(self, step: int) -> float:
        """1 + the steps from `step` to the next snapshot; 0 if unknown, and on other processes."""
        if self._is_fixed or not self._is_main:
            return 0.0
        seconds_a_step = self._seconds_a_step(step)
        if self._minutes is not None:
            left = 60 * self._minutes - (time.monotonic() - self._saved_at)
            if left <= 0:
                return 1.0
            return 0.0 if seconds_a_step is None else 1.0 + math.ceil(left / seconds_a_step)
        if seconds_a_step is None:
            return 0.0
        if len(self._report.durable_seconds) > self._measured:
            self._choose(seconds_a_step, step)
        assert self._chosen is not None
        return 1.0 + max(0, self._saved + self._chosen.steps - step)

    def _seconds_a_step(self, step: int) -> float | None:
        """Seconds of a step in this attempt, after the first ones; None until it is known."""
        clock = self._report.clock.so_far()
        seconds = clock[DATA] + clock[PASSES] + clock[UPDATE]
        if self._timed_from is None:
            if step >= self._saved + WARM_UP:
                self._timed_from = step, seconds
            return None
        steps, seconds = step - self._timed_from[0], seconds - self._timed_from[1]
        known = steps >= TIMED_STEPS or (steps > 0 and seconds >= TIMED_SECONDS)
        return max(seconds / steps, 1e-6) if known else None

    def _choose(self, seconds_a_step: float, step: int) -> None:
        """Choose the interval once more, after each snapshot that was measured."""
        self._measured = len(self._report.durable_seconds)
        stated = self._config.run.interruptions_per_day
        if stated is None:
            seen, seconds = self._interruptions
            seconds += time.monotonic() - self._begun_at
            per_day = interruptions_per_day(seen, seconds)
            source = f"of one a day, and {seen:,} in {seconds / 3600:,.2f} hours of this run"
        else:
            per_day, source = stated, "run.interruptions_per_day"
        most = self._config.train.max_steps
        choice = choose_interval(self._costs(seconds_a_step), per_day, source, most)
        if self._chosen is None or not is_near(choice.steps, self._chosen.steps):
            guess = "" if self._measured else ", before the first snapshot is measured"
            self._report.console.say(f"saving    {choice.reason}{guess}")
            if self._measured:
                self._report.console.note("changed", step, f"snapshot.every=auto: {choice.reason}")
            self._chosen = choice

    def _costs(self, seconds_a_step: float) -> Costs:
        report = self._report
        if not report.durable_seconds:
            guess = self._bytes / COPY_BYTES_A_SECOND
            return Costs(seconds_a_step, guess, guess)
        upload = 0.0
        if report.uploads is not None and not self._disk_stays:
            seconds = report.uploads.status().upload_seconds
            upload = max(seconds, self._config.hub.min_interval_seconds) if seconds else 0.0
        return Costs(
            seconds_a_step,
            median(report.stall_seconds) + report.check_seconds,
            median(report.durable_seconds),
            upload,
        )
