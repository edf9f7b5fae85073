"""Where the time of an attempt goes, and warnings of what goes wrong slowly, in time to act."""

from __future__ import annotations

import math
import os
import shutil
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from config.schema import Config
from snapshot.disk.files import TEMPORARY_PREFIX, snapshot_folders, snapshots_in, step_of
from snapshot.errors import SnapshotError
from store.goodput import DATA, PASSES, PHASES, START
from training.reporting.console import Console

Item = TypeVar("Item")
LOOK_SECONDS = 1.0
REMEMBERED = 50
"""How many steps the usual value is the median of."""
SLOW_TIMES, SLOW_SECONDS = 10, 5.0
"""A step is slow when it takes this many times the usual time, and at least this long."""
STEEP_TIMES = 100
"""A gradient is steep when its norm is this many times the usual one."""
JUMP_SECONDS = 5.0
"""Least difference between the system's clock and the monotonic one; corrections are smaller."""


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

    def so_far(self) -> dict[str, float]:
        """The seconds of each phase until now. Any thread may call this."""
        phase, seconds = self._phase, dict(self.seconds)
        seconds[phase] += max(0.0, time.perf_counter() - self._since)
        return seconds

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


class Watchdog:
    """Watches steps, gradient, disk and system clock on the main process. It never ends a run."""

    def __init__(self, console: Console, config: Config, estimate: int, processes: int) -> None:
        """`estimate`: about how many bytes a snapshot has, until there is one."""
        self._console, self._config = console, config
        self._alone = processes == 1
        self._root = snapshots_in(Path(config.run.dir))
        self._estimate = estimate
        self._times: deque[float] = deque(maxlen=REMEMBERED)
        self._norms: deque[float] = deque(maxlen=REMEMBERED)
        self._step, self._since = console.step, math.inf
        self._queued_at, self._queued = math.inf, 0
        self._warned_slow = self._warned_full = False
        self._offset = time.time() - time.monotonic()
        if console.shown:
            threading.Thread(target=self._look, name="watch", daemon=True).start()

    def rest(self) -> None:
        """No step is under way: what follows may take any time."""
        self._since = self._queued_at = math.inf

    def wait_for(self, work: Callable[[], object]) -> None:
        """Run work inside a step that is not part of it and may take any time."""
        since, queued_at, begun = self._since, self._queued_at, time.monotonic()
        self.rest()
        work()
        waited = time.monotonic() - begun
        self._since, self._queued_at = since + waited, queued_at + waited

    def resume(self) -> None:
        """The next step begins."""
        self._since = self._queued_at = time.monotonic()

    def queued(self) -> None:
        """A step is queued on the device; on a CPU, it is done.

        The second one of an attempt is the first that compiles nothing. Where it takes longer than
        a stop may, it is said how to save the run. A GPU holds a limited queue, so a step of many
        seconds is not queued long before the GPU computes it.
        """
        now = time.monotonic()
        seconds, self._queued_at, self._queued = now - self._queued_at, now, self._queued + 1
        grace = self._config.run.grace_seconds
        if self._queued == 2 and seconds > grace:
            self._console.say(
                f"hint      a step takes {seconds:.0f} s, longer than run.grace_seconds={grace:g}: "
                "a run that is told to stop ends before its step does, without a snapshot. Raise "
                "run.grace_seconds, and with it the time from the scheduler's signal to its kill "
                "and TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or lower snapshot.every to lose less."
            )

    def done(self, step: int) -> None:
        """A step is done, on the device as well, and the next one begins."""
        now = time.monotonic()
        if math.isfinite(self._since):
            if self._warned_slow:
                self._console.warn(f"step {step} has finished after {now - self._since:.0f} s.")
            self._times.append(now - self._since)
        self._step, self._since, self._warned_slow = step, now, False

    def gradient(self, step: int, norm: float) -> None:
        """Check the gradient norm of a step, before clipping.

        A norm that is not finite is no warning: fp16's loss scaler skips that update, and without a
        scaler the run ends.
        """
        if not math.isfinite(norm):
            return
        usual = statistics.median(self._norms) if len(self._norms) == REMEMBERED else math.inf
        if norm > STEEP_TIMES * usual > 0:
            most = self._config.optim.max_grad_norm
            done = "It was scaled down to" if norm > most else "That is within"
            self._console.warn(
                f"the gradient norm is {norm:.3g} at step {step}, {norm / usual:.0f} times the "
                f"usual {usual:.2g}. {done} optim.max_grad_norm={most:g}; if the loss does not "
                f"recover, lower optim.learning_rate."
            )
        self._norms.append(norm)

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            self._look_at_step()
            self._look_at_clock()
            self._look_at_disk()

    def _look_at_step(self) -> None:
        since, usual = self._since, statistics.median(self._times) if self._times else math.inf
        taken = time.monotonic() - since
        if self._warned_slow or taken < max(SLOW_TIMES * usual, SLOW_SECONDS):
            return
        self._warned_slow = True
        why = "this machine is busy or hangs."
        if not self._alone:
            seconds = self._config.run.collective_timeout_seconds
            why = (
                "a process is busy, hangs or cannot be reached. The run stops if it does not "
                f"answer within run.collective_timeout_seconds={seconds}."
            )
        self._console.warn(
            f"no step has finished since step {self._step}, {taken:.0f} s ago, over {SLOW_TIMES} "
            f"times the usual {usual:.2g} s: {why}"
        )

    def _look_at_clock(self) -> None:
        offset = time.time() - time.monotonic()
        jump = offset - self._offset
        if abs(jump) < JUMP_SECONDS:
            return
        self._offset = offset
        self._console.warn(
            f"the system's clock has jumped by {jump:+.0f} s, or the machine has slept. Only times "
            "of day in files and logs are affected."
        )

    def _look_at_disk(self) -> None:
        try:
            if any(self._root.glob(f"{TEMPORARY_PREFIX}step-*")):
                return  # a snapshot is being written, and then the oldest is removed
            free = shutil.disk_usage(self._root).free
            newest = next(iter(snapshot_folders(self._root)), None)
        except (OSError, SnapshotError):  # perhaps not readable for now
            return
        every, last = self._config.snapshot.every, self._config.train.max_steps
        if newest is not None and step_of(newest) >= last:
            return  # this was the last one
        needed = _bytes_of(newest) or self._estimate
        if free >= needed:
            self._warned_full = False
        elif not self._warned_full:
            self._warned_full = True
            at = ""
            if isinstance(every, int) and self._config.snapshot.every_minutes is None:
                at = f", at step {min((self._step // every + 1) * every, last)},"
            self._console.warn(
                f"the disk of {self._root} has {free / 1e6:,.1f} MB left and the next "
                f"snapshot{at} takes {needed / 1e6:,.1f} MB. Free some space for it."
            )


def _bytes_of(folder: Path | None) -> int:
    try:
        return sum(entry.stat().st_size for entry in os.scandir(folder)) if folder else 0
    except OSError:  # just removed
        return 0
