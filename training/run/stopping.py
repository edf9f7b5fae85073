"""The end of an attempt before its last step: what causes it, and how all processes agree on it.

A cause is a signal, the death of another process, or a limit. A thread notices it and counts the
grace time; after each step all processes agree whether the attempt ends there, in the message in
which they also agree whether a snapshot is due by the clock.
"""

from __future__ import annotations

import enum
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from training.exits import EXIT_AGAIN, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED

if TYPE_CHECKING:  # a process takes signals before torch is imported
    from accelerate import Accelerator

    from config.schema import Config
    from training.distributed.launcher import Launcher

LAUNCHER_GONE, WORKER_GONE, TIME_IS_OVER = 101, 102, 103
"""Causes that are not signals. No signal has these numbers."""


class Cause(NamedTuple):
    """What ends an attempt before its last step."""

    name: str
    exit_code: int


CAUSES: dict[int, Cause] = {
    signal.SIGINT: Cause("Ctrl-C", EXIT_INTERRUPTED),
    signal.SIGTERM: Cause("SIGTERM", EXIT_TERMINATED),
    signal.SIGHUP: Cause("SIGHUP", EXIT_TERMINATED),
    signal.SIGUSR1: Cause("SIGUSR1", EXIT_AGAIN),
    TIME_IS_OVER: Cause("run.max_minutes", EXIT_AGAIN),
    LAUNCHER_GONE: Cause("the death of its launcher", EXIT_AGAIN),
    WORKER_GONE: Cause("the death of another process", EXIT_FAILED),
}
SIGNALS = tuple(number for number in CAUSES if number in signal.valid_signals())
LOOK_SECONDS = 1.0
"""How often to check that the launcher is alive, and how much of the grace time is left."""
LAST_WORDS_SECONDS = 2.0
"""The part of the grace time that is reserved for the last messages of a run."""
AGREE_SECONDS = 1.0
"""How often the processes compare: soon enough for a signal, too seldom to slow the steps."""


class Phase(enum.Enum):
    """What the first signal does."""

    NOTHING_BEGUN = "leave at once: there is nothing to lose"
    TRAINING = "finish the step and write a snapshot, within the grace time"
    UPLOADING = "the run is over: leave the upload, at once on Ctrl-C or within the grace time"
    FAILED = "leave at once and silently: the error decides"


class Signals:
    """Handles the signals of this process until it ends. The main thread must create it.

    A thread handles them. Python runs its own handlers in the main thread alone, and not while that
    waits inside torch for another process, which may be the very one that has died.
    """

    def __init__(
        self,
        grace_seconds: float,
        leave: Callable[[int, str], object],
        launcher: Launcher | None = None,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        """Handle SIGTERM, SIGUSR1, SIGINT and, unless nohup has it ignored, SIGHUP.

        `leave(cause, why)` ends the process. Another thread calls it when a signal requires that or
        the grace time is over. `say` tells the user at once what Ctrl-C does.
        """
        self.phase = Phase.NOTHING_BEGUN
        self.cause: int | None = None
        """The key in CAUSES of what stops this run; None while nothing does."""
        self._grace, self._leave, self._launcher, self._say = grace_seconds, leave, launcher, say
        self._until = math.inf
        self._reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                # The thread reads the signal from the pipe; the default would end the process.
                signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def seconds_left(self) -> float:
        """What is left of the grace time; infinite while nothing stops the run."""
        return self._until - time.monotonic()

    def stop(self, cause: int) -> None:
        """Stop the run for a signal that another process received, or for another cause."""
        if self.cause is None:
            self.cause, self._until = cause, time.monotonic() + self._grace

    def _watch(self) -> None:
        while True:
            with suppress(Exception):  # without this thread, nobody would handle later signals
                self._look()

    def _look(self) -> None:
        """Wait for a signal, the end of the launcher or of the grace time, and act on it."""
        timeout = max(0.0, min(self.seconds_left(), LOOK_SECONDS))
        ready, _, _ = select.select([self._reading], [], [], timeout)
        for number in os.read(self._reading, 64) if ready else b"":
            if number in SIGNALS:
                self._take(number)
        if self._launcher is not None and not self._launcher.is_alive():
            # A launcher that forwards no SIGTERM may have received one. Otherwise nobody has
            # stopped the run, and it must be started again.
            cause = LAUNCHER_GONE if self._launcher.forwards_sigterm else signal.SIGTERM
            self._launcher = None
            if self.cause is None:  # the same Ctrl-C may end the launcher
                self._take(cause)
        if self.cause is not None and self.seconds_left() <= 0:
            self._leave(self.cause, f"{CAUSES[self.cause].name}, and its grace time is over")

    def _take(self, cause: int) -> None:
        """Act on a signal, or on the death of the launcher."""
        if cause == signal.SIGTERM and self.cause is None and self._launcher is not None:
            # A launcher whose worker has died sends SIGTERM to the others.
            cause = WORKER_GONE if self._launcher.lost_a_worker() else cause
        if self.phase is Phase.NOTHING_BEGUN:
            # A launcher that sends SIGTERM reports why; mostly another process has failed.
            silent = cause in (signal.SIGTERM, WORKER_GONE) and self._launcher is not None
            self._leave(cause, "" if silent else f"{CAUSES[cause].name} before the first step")
        elif self.phase is Phase.FAILED:
            self._leave(cause, "")
        elif self.cause is None:
            hurry = self.phase is Phase.UPLOADING and cause == signal.SIGINT
            self._until = time.monotonic() + (LAST_WORDS_SECONDS if hurry else self._grace)
            self.cause = cause
            if cause == signal.SIGINT and self.phase is Phase.TRAINING:  # a person waits
                self._say(
                    "Ctrl-C: the run finishes this step and writes a snapshot, within "
                    f"{self._grace:g} s. Ctrl-C again ends it at once, without a snapshot."
                )
        elif self.cause == signal.SIGINT and cause in (signal.SIGINT, signal.SIGTERM):
            # torch elastic forwards a second Ctrl-C as SIGTERM
            self._leave(signal.SIGINT, "Ctrl-C again")


class Due(NamedTuple):
    """What follows a step, in this order; the same on all processes."""

    save: bool = False
    evaluate: bool = False
    sample: bool = False
    end: bool = False


class Agreement:
    """What all processes do after a step, which has to be the same on all.

    Only whether the attempt ends early, and whether a snapshot is due by the clock, is not known
    to all. Comparing that after each step would add one more wait, so the processes compare about
    once a second.
    """

    def __init__(
        self, accelerator: Accelerator, config: Config, signals: Signals, age: float
    ) -> None:
        """Begin an attempt whose process started `age` seconds ago."""
        run, now = config.run, time.monotonic()
        self.reason = ""
        """Why the attempt ends before the last step; empty while it continues."""
        self._accelerator, self._config, self._signals = accelerator, config, signals
        # The grace time is reserved for the last step and its snapshot.
        limit = math.inf if run.max_minutes is None else 60 * run.max_minutes - run.grace_seconds
        self._ends = now + limit - age
        self._saved_at = now
        self._minutes_are_over = False
        """Whether all processes know that the minutes since the last snapshot are over."""
        self._every, self._steps, self._compared_at = 1, 0, now
        """Steps between two comparisons, steps since the last one, and its time."""

    @property
    def exit_code(self) -> int:
        """The exit code of the process, once the attempt has ended."""
        cause = self._signals.cause
        return CAUSES[cause].exit_code if self.reason and cause is not None else EXIT_DONE

    def after(self, step: int) -> Due:
        """What is due after `step`. Every process must call this, each step."""
        hub, train, snapshot = self._config.hub, self._config.train, self._config.snapshot
        self._steps += 1
        if self._steps >= self._every:
            self._compare()
        last = step == train.max_steps
        end, evaluate = last or bool(self.reason), last or step % train.eval_every == 0
        if snapshot.every_minutes is None:
            save = step % snapshot.every == 0
        else:
            is_milestone = hub.milestone_every is not None and step % hub.milestone_every == 0
            save = self._minutes_are_over or is_milestone or (snapshot.keep_best and evaluate)
        if save or end:
            self._saved_at, self._minutes_are_over = time.monotonic(), False
        sample = train.sample_every > 0 and (last or step % train.sample_every == 0)
        return Due(save or end, evaluate, sample, end)

    def _compare(self) -> None:
        """Learn whether any process is to stop, and whether the minutes are over. All call this."""
        now, minutes = time.monotonic(), self._config.snapshot.every_minutes
        pace = (now - self._compared_at) / self._steps
        cause = self._signals.cause or 0
        if not cause and now + 2 * pace * self._every > self._ends:
            cause = TIME_IS_OVER
        is_time = minutes is not None and now - self._saved_at >= 60 * minutes
        is_time = is_time and self._accelerator.is_main_process  # by one clock
        if self._accelerator.num_processes > 1:
            import torch

            mine = torch.tensor([[float(cause), pace, is_time]], device=self._accelerator.device)
            largest: list[float] = self._accelerator.gather(mine).amax(dim=0).tolist()
            cause, pace, is_time = int(largest[0]), largest[1], bool(largest[2])
        # Twice as many at most, because the first steps may be faster than later ones.
        self._every = min(max(1, int(AGREE_SECONDS / max(pace, 1e-4))), 2 * self._every)
        self._minutes_are_over = self._minutes_are_over or is_time
        self._compared_at, self._steps = now, 0
        if cause:
            limit = f"={self._config.run.max_minutes:g}" if cause == TIME_IS_OVER else ""
            self.reason = f"{CAUSES[cause].name}{limit}"
            self._signals.stop(cause)
