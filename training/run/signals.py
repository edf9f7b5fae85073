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
from collections.abc import Callable, Collection
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
LAUNCHER_GONE, WORKER_GONE, TIME_IS_OVER, PREEMPTED = 101, 102, 103, 104
OTHER_OWNER = 105
"""Causes of an end that are not signals. No signal has these numbers."""
NAMES = {
    signal.SIGINT: "Ctrl-C",
    LAUNCHER_GONE: "the death of its launcher",
    WORKER_GONE: "the death of another process",
    TIME_IS_OVER: "run.max_minutes",
    PREEMPTED: "a preemption notice",
    OTHER_OWNER: "another attempt, which owns the run now",
}
EXIT_CODES = {
    signal.SIGUSR1: EXIT_AGAIN,
    signal.SIGINT: EXIT_INTERRUPTED,
    signal.SIGTERM: EXIT_TERMINATED,
    signal.SIGHUP: EXIT_TERMINATED,
    TIME_IS_OVER: EXIT_AGAIN,
    PREEMPTED: EXIT_AGAIN,
    OTHER_OWNER: EXIT_AGAIN,
    LAUNCHER_GONE: EXIT_AGAIN,
    WORKER_GONE: EXIT_FAILED,
}
MACHINE_NOTICES = (signal.SIGUSR1, PREEMPTED)
NOTICES = (*MACHINE_NOTICES, signal.SIGTERM)
"""Causes that precede the end of the machine by `run.notice_seconds`."""
DECIDES = (signal.SIGINT, WORKER_GONE)
"""Causes that also decide the exit code of a run that trains on after a notice."""
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
        trains_on_seconds: float = 0.0,
        notices: Collection[int] = NOTICES,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        """Handle SIGTERM, SIGUSR1, SIGINT and, unless nohup has it ignored, SIGHUP.

        After one of `notices`, the user is told (`say`), and the run trains on for
        `trains_on_seconds`, or until another signal comes or the launcher has ended.

        `leave(cause, why)` ends the process. Another thread calls it when a signal requires that or
        the grace time is over. The death of a launcher that does not forward SIGTERM counts as a
        SIGTERM, because the launcher may have received one. Otherwise nobody has stopped the run,
        and it must be started again. A launcher's SIGTERM after the death of another worker is a
        failure and not a request to stop.
        """
        self.phase = Phase.NOTHING_BEGUN
        self._grace, self._leave, self._launcher = grace_seconds, leave, launcher
        self._trains_on, self._notices, self._say = trains_on_seconds, notices, say
        self._notice: tuple[int, float] | None = None
        """A cause that stops this run soon, and when."""
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

    def notice(self, number: int) -> None:
        """Stop the run in time for the end of this machine. Any thread may call this."""
        if self.phase is not Phase.TRAINING or self._trains_on <= 0:
            self.stop(number)
        elif self._notice is not None:
            if number != self._notice[0]:
                self.stop(self._notice[0])
        else:
            self._notice = number, time.monotonic() + self._trains_on
            os.write(self._writing, bytes([0]))
            self._say(
                f"{name_of(number)}: the run trains on for {self._trains_on:g} s, as "
                "run.notice_seconds allows. SIGHUP or Ctrl-C stops it now."
            )

    def _watch(self) -> None:
        while True:
            try:
                self._look()
            except Exception:  # without this thread, nobody would handle later signals
                time.sleep(PARENT_SECONDS)

    def _look(self) -> None:
        """Wait for a signal, the end of the launcher or of the grace time, and act on it."""
        times = [self.seconds_left()] if self.cause is not None else []
        if self._notice is not None and self.cause is None:
            times.append(self._notice[1] - time.monotonic())
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
                self._take(number, sent=False)
        if self._notice is not None and self._notice[1] <= time.monotonic():
            self.stop(self._notice[0])
        if self.cause is not None and self.seconds_left() <= 0:
            self._leave(self.cause, f"{name_of(self.cause)}, and its grace time is over")

    def _take(self, number: int, sent: bool = True) -> None:
        """Act on a signal, `sent` to this process or taken from the death of its launcher."""
        if number == signal.SIGTERM and self.cause is None and self._launcher is not None:
            number = WORKER_GONE if self._launcher.lost_a_worker() else number
        if self.phase is Phase.NOTHING_BEGUN:
            # A launcher that sends SIGTERM reports why; mostly another process has failed.
            silent = number in (signal.SIGTERM, WORKER_GONE) and self._watched
            self._leave(number, "" if silent else f"{name_of(number)} before the first step")
        elif self.phase is Phase.FAILED:
            self._leave(number, "")
        elif self.cause is None and self._notice is not None and number not in DECIDES:
            if number != self._notice[0] or not sent:  # a launcher repeats what it also gets
                self.stop(self._notice[0])
        elif self.cause is None and sent and number in self._notices and self._trains_on > 0:
            self.notice(number)
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
