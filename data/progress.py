"""Progress lines for the preparation of a text, if it takes longer than a second."""

from __future__ import annotations

import threading
from collections.abc import Callable

FIRST_SECONDS, EVERY_SECONDS = 1.0, 10.0


class Progress:
    """Within its context, reports the current activity after a second, then every ten seconds.

    A thread reports it, so that waits for a network, a disk or another process are reported too.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self.say = say or (lambda line: None)
        self.what, self.unit, self.done = "", "MB", 0
        self.total: int | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report, daemon=True) if say else None

    def doing(self, what: str, total: int | None = None, unit: str = "MB") -> None:
        """Set the current activity. `total`, if known, is the final value of `done`.

        `unit` is the name of a million counts.
        """
        self.done, self.total, self.unit, self.what = 0, total, unit, what

    def line(self) -> str:
        """The current activity and its progress."""
        if self.total:
            return f"text      {self.what}: {min(self.done / self.total, 1):.0%}"
        amount = f": {self.done / 1e6:,.0f} {self.unit}" if self.done else ""
        return f"text      {self.what}{amount}"

    def _report(self) -> None:
        seconds = FIRST_SECONDS
        while not self._ended.wait(seconds):
            if self.what:
                self.say(self.line())
            seconds = EVERY_SECONDS

    def __enter__(self) -> Progress:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
