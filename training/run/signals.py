"""Signals: the first ends a run in order, within a bounded time; a second Ctrl-C at once.

A thread handles them. Python's own handlers run in the main thread alone, and not while that waits
inside torch for another process, which may be the very one whose death the signal is about.
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
from typing import Protocol

TAKEN = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
LAUNCHER_GONE, WORKER_GONE, TIME_IS_OVER = 101, 102, 103
"""Causes of an end that are no signals, beside the numbers of those."""
NAMES = {
    signal.SIGINT: "Ctrl-C",
    LAUNCHER_GONE: "the death of its launcher",
    WORKER_GONE: "the death of another process",
    TIME_IS_OVER: "run.max_minutes",
}
PARENT_SECONDS = 1.0
"""How often to look whether the launcher still lives."""
LAST_WORDS_SECONDS = 2.0
"""Kept of the grace time for what the end of a run has to say."""


class Phase(enum.Enum):
    """What a first signal means."""

    NOTHING_BEGUN = "leave at once: there is nothing to lose"
    TRAINING = "finish the step and write a snapshot, within the grace time"
    UPLOADING = "the run is over: leave the upload, at once on Ctrl-C or within the grace time"
    FAILED = "leave at once, without a word: the error is what counts"


class Launcher(Protocol):
    """What is asked about the process that started this one."""

    @property
    def hands_on(self) -> bool:
        """Whether it hands a SIGTERM on to its workers before it ends."""

    def lives(self) -> bool:
        """Whether it still waits for this process."""

    def lost_a_worker(self) -> bool:
        """Whether a process that it started beside this one has ended by itself."""


class Signals:
    """The signals of this process, from now until it ends. To be made by the main thread."""

    def __init__(
        self,
        grace_seconds: float,
        leave: Callable[[int, str], object],
        launcher: Launcher | None = None,
    ) -> None:
        """Take SIGTERM, SIGUSR1, SIGINT and, unless it is ignored as under nohup, SIGHUP.

        `leave(cause, why)` ends the process; it is called from another thread, when a signal means
        that or the time is over. The death of a launcher counts as a SIGTERM where it may have
        been told to end and cannot say so; else the run was not told to stop, and is to be started
        again. A launcher's SIGTERM because of another worker's death is no request to stop.
        """
        self.phase = Phase.NOTHING_BEGUN
        self._grace, self._leave, self._launcher = grace_seconds, leave, launcher
        self._watched = launcher is not None  # until it is seen to have ended
        self._asked: int | None = None
        self._until = math.inf
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for number in TAKEN:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, _nothing)  # or the default would end the process
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    @property
    def asked(self) -> int | None:
        """The signal, or other cause, that asks this run to end; None as long as none does."""
        return self._asked

    def seconds_left(self) -> float:
        """Of the grace time; infinite as long as nobody asks the run to end."""
        return self._until - time.monotonic()

    def ask(self, number: int) -> None:
        """The run is to end by this signal, which another process got, or by another cause."""
        if self._asked is None:
            self._asked, self._until = number, time.monotonic() + self._grace
            os.write(self._writing, bytes([0]))  # so that the thread counts the seconds

    def _watch(self) -> None:
        while True:
            try:
                self._look()
            except Exception:  # a thread that died would leave every later signal unanswered
                time.sleep(PARENT_SECONDS)

    def _look(self) -> None:
        """Wait for a signal, the launcher's end or that of the grace time, and act on it."""
        times = [self.seconds_left()] if self._asked is not None else []
        if self._watched:
            times.append(PARENT_SECONDS)
        ready, _, _ = select.select(
            [self._reading], [], [], max(0.0, min(times)) if times else None
        )
        for number in os.read(self._reading, 64) if ready else b"":
            if number in TAKEN:
                self._take(number)
        if self._launcher is not None and self._watched and not self._launcher.lives():
            self._watched = False
            if self._asked is None:  # a launcher may end by the same Ctrl-C
                self._take(LAUNCHER_GONE if self._launcher.hands_on else signal.SIGTERM)
        if self._asked is not None and self.seconds_left() <= 0:
            self._leave(self._asked, f"{name_of(self._asked)}, and its grace time is over")

    def _take(self, number: int) -> None:
        if number == signal.SIGTERM and self._asked is None and self._launcher is not None:
            number = WORKER_GONE if self._launcher.lost_a_worker() else number
        if self.phase is Phase.NOTHING_BEGUN:
            # A launcher that sends SIGTERM says why itself; mostly another process has failed.
            silent = number in (signal.SIGTERM, WORKER_GONE) and self._watched
            self._leave(number, "" if silent else f"{name_of(number)} before the first step")
        elif self.phase is Phase.FAILED:
            self._leave(number, "")
        elif self._asked is None:
            hurry = self.phase is Phase.UPLOADING and number == signal.SIGINT
            self._until = time.monotonic() + (LAST_WORDS_SECONDS if hurry else self._grace)
            self._asked = number
        elif self._asked == signal.SIGINT and number in (signal.SIGINT, signal.SIGTERM):
            # elastic hands a second Ctrl-C on as SIGTERM
            self._leave(signal.SIGINT, "Ctrl-C again")


def name_of(number: int) -> str:
    """As in 'SIGTERM'."""
    return NAMES.get(number) or signal.Signals(number).name


def _nothing(number: int, frame: object) -> None:
    """The thread has it."""
