"""Where the time of an attempt goes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
START, DATA, PASSES, UPDATE = "start", "data", "forward and backward", "update"
SNAPSHOT, EVALUATION, UPLOAD, END = "snapshot", "evaluation and sample", "upload", "end"
PHASES = (START, DATA, PASSES, UPDATE, SNAPSHOT, EVALUATION, UPLOAD, END)
"""The phase of the upload is the wait for the last one; others run in the background."""


class PhaseClock:
    """Divides the wall time of this process among the phases; their sum is all of it.

    A GPU computes behind the host. Its time counts for the phase in which the host waits for it.
    """

    def __init__(self, seconds_before: float) -> None:
        """Begin in the phase of the start, which has lasted so long already."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._phase, self._since = START, time.perf_counter() - seconds_before

    def enter(self, phase: str) -> None:
        """Begin a phase, one of `PHASES`; the one before it ends."""
        now = time.perf_counter()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Enter a phase, and return to the one before it afterwards."""
        before = self._phase
        self.enter(phase)
        yield
        self.enter(before)

    def timed(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Yield the batches; the wait for each counts as the phase of the data."""
        iterator = iter(batches)
        while True:
            self.enter(DATA)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.enter(PASSES)
            yield batch

    def table(self) -> list[str]:
        """A line for each phase: seconds and share."""
        self.enter(self._phase)
        total = sum(self.seconds.values())
        rows = [*self.seconds.items(), ("all", total)]
        return [f"{name:<22} {took:>9,.1f} s {took / total:>7.1%}" for name, took in rows]
