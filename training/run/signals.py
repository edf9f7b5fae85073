"""Signals: the first ends a run in order, within a bounded time; a second Ctrl-C ends it at once.

A thread handles them. Python runs its own handlers in the main thread alone, and not while that
waits inside torch for another process, which may be the very one that has died.
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
from typing import TYPE_CHECKING

from training.exits import (
    EXIT_AGAIN,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
)

if TYPE_CHECKING:
    from training.distributed.environment import Launcher  # imports torch, which no signal needs

TAKEN = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
LAUNCHER_GONE, WORKER_GONE, TIME_IS_OVER = 101, 102, 103
"""Causes of an end that are not signals. No signal has these numbers."""
NAMES = {
    signal.SIGINT: "Ctrl-C",
    LAUNCHER_GONE: "the death of its launcher",
    WORKER_GONE: "the death of another process",
    TIME_IS_OVER: "run.max_minutes",
}
EXIT_CODES = {
    signal.SIGUSR1: EXIT_AGAIN,
    signal.SIGINT: EXIT_INTERRUPTED,
    signal.SIGTERM: EXIT_TERMINATED,
    signal.SIGHUP: EXIT_TERMINATED,
    TIME_IS_OVER: EXIT_AGAIN,
    LAUNCHER_GONE: EXIT_AGAIN,
    WORKER_GONE: EXIT_FAILED,
}
PARENT_SECONDS = 1.0
"""How often to check that the launcher is alive."""
LAST_WORDS_SECONDS = 2.0
"""The part of the grace time that is reserved for the last messages of a run."""


class Phase(enum.Enum):
    """What the first signal does."""

    NOTHING_BEGUN = "leave at once: there is nothing to lose"
    TRAINING = "finish the step and write a snapshot, within the grace time"
    UPLOADING = "the run is over: leave the upload, at once on Ctrl-C or within the grace time"
    FAILED = "leave at once and silently: the error decides"


class Signals:
    """Handles the signals of this process until it ends. The main thread must create it."""

    def __init__(
        self,
        grace_seconds: float,
        leave: Callable[[int, str], object],
        launcher: Launcher | None = None,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        """Handle SIGTERM, SIGUSR1, SIGINT and, unless nohup has it ignored, SIGHUP.

        `leave(cause, why)` ends the process. Another thread calls it when a signal requires that or
        the grace time is over. The death of a launcher that does not forward SIGTERM counts as a
        SIGTERM, because the launcher may have received one. Otherwise nobody has stopped the run,
        and it must be started again. A launcher's SIGTERM after the death of another worker is a
        failure and not a request to stop.
        """
        self.phase = Phase.NOTHING_BEGUN
        self._grace, self._leave, self._launcher = grace_seconds, leave, launcher
        self._say = say
        self._watched = launcher is not None  # until it is seen to have ended
        self.cause: int | None = None
        """The signal, or other cause, that stops this run; None while there is none."""
        self._until = math.inf
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for number in TAKEN:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, _nothing)  # or the default would end the process
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def seconds_left(self) -> float:
        """What is left of the grace time; infinite while nothing stops the run."""
        return self._until - time.monotonic()

    def stop(self, number: int) -> None:
        """Stop the run for a signal that another process received, or for another cause."""
        if self.cause is None:
            self.cause, self._until = number, time.monotonic() + self._grace
            os.write(self._writing, bytes([0]))  # the thread begins to count the seconds

    def _watch(self) -> None:
        while True:
            try:
                self._look()
            except Exception:  # without this thread, nobody would handle later signals
                time.sleep(PARENT_SECONDS)

    def _look(self) -> None:
        """Wait for a signal, the end of the launcher or of the grace time, and act on it."""
        times = [self.seconds_left()] if self.cause is not None else []
        if self._watched:
            times.append(PARENT_SECONDS)
        ready, _, _ = select.select(
            [self._reading], [], [], max(0.0, min(times)) if times else None
        )
        for number in os.read(self._reading, 64) if ready else b"":
            if number in TAKEN:
                self._take(number)
        if self._launcher is not None and self._watched and not self._launcher.is_alive():
            self._watched = False
            if self.cause is None:  # the same Ctrl-C may end the launcher
                number = LAUNCHER_GONE if self._launcher.forwards_sigterm else signal.SIGTERM
                self._take(number)
        if self.cause is not None and self.seconds_left() <= 0:
            self._leave(self.cause, f"{name_of(self.cause)}, and its grace time is over")

    def _take(self, number: int) -> None:
        """Act on a signal, or on the death of the launcher."""
        if number == signal.SIGTERM and self.cause is None and self._launcher is not None:
            number = WORKER_GONE if self._launcher.lost_a_worker() else number
        if self.phase is Phase.NOTHING_BEGUN:
            # A launcher that sends SIGTERM reports why; mostly another process has failed.
            silent = number in (signal.SIGTERM, WORKER_GONE) and self._watched
            self._leave(number, "" if silent else f"{name_of(number)} before the first step")
        elif self.phase is Phase.FAILED:
            self._leave(number, "")
        elif self.cause is None:
            hurry = self.phase is Phase.UPLOADING and number == signal.SIGINT
            self._until = time.monotonic() + (LAST_WORDS_SECONDS if hurry else self._grace)
            self.cause = number
            if number == signal.SIGINT and self.phase is Phase.TRAINING:  # a person waits
                self._say(
                    "Ctrl-C: the run finishes this step and writes a snapshot, within "
                    f"{self._grace:g} s. Ctrl-C again ends it at once, without a snapshot."
                )
        elif self.cause == signal.SIGINT and number in (signal.SIGINT, signal.SIGTERM):
            # torch elastic forwards a second Ctrl-C as SIGTERM
            self._leave(signal.SIGINT, "Ctrl-C again")


def name_of(number: int) -> str:
    """The name of a cause, for messages: 'SIGTERM', 'Ctrl-C'."""
    return NAMES.get(number) or signal.Signals(number).name


def exit_code_of(cause: int | None) -> int:
    """The exit code of a run that a signal, or another cause, has stopped."""
    return EXIT_CODES[cause] if cause is not None else EXIT_DONE


def _nothing(number: int, frame: object) -> None:
    """The thread reads the signal from the wakeup file descriptor."""
