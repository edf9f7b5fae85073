"""How many threads a CPU computes with: one instead of several where other programs use its cores.

Threads wait for each other after each operation. Where another program has one of the cores, they
wait for the operating system to give them their turn, some thousand times a step: two threads then
take several times as long as one. So one process on a CPU measures, at the start and when the pace
falls, and uses one thread where that is faster. The last bits of sums depend on the number of
threads, so a change is always printed, and `run.adapt_threads=false` excludes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend

LONGEST_PASS_SECONDS = 0.15
"""A longer forward and backward pass is not measured: the start would take seconds longer."""
PASSES = 3
SLOWER = 1.25
"""Several threads are given up for one if they take so many times as long."""
FALLEN = 2.0
"""One thread is tried when a step takes so many times as long as in the fastest interval."""


class Threads:
    """The number of threads of an attempt: the launcher's, or one."""

    def __init__(self, accelerator: Accelerator, adapt: bool, warn: Callable[[str], None]) -> None:
        """`warn` prints a sentence about each change."""
        self._most, self._warn = torch.get_num_threads(), warn
        compiled = accelerator.state.dynamo_plugin.backend != DynamoBackend.NO
        on_cpu = accelerator.device.type == "cpu" and accelerator.num_processes == 1
        self._watches = adapt and on_cpu and self._most > 1 and not compiled
        self._fastest = float("inf")
        self._slow: float | None = None
        """Seconds of a step with all threads before one was tried; None where none is tried."""
        self._single: float | None = None
        """Seconds of a step with one thread; None until it has been tried."""

    def measure(self, one_pass: Callable[[], object]) -> None:
        """Choose by the time of a few passes, forward and backward, in turns."""
        if not self._watches or _seconds_of(one_pass) > LONGEST_PASS_SECONDS:
            return
        seconds: dict[int, list[float]] = {self._most: [], 1: []}
        for _ in range(PASSES):
            for number, found in seconds.items():
                torch.set_num_threads(number)
                found.append(_seconds_of(one_pass))
        several, single = (median(found) for found in seconds.values())
        if several > SLOWER * single:
            self._settle("a forward and backward pass", several, single)
        else:
            torch.set_num_threads(self._most)

    def report_pace(self, seconds: float, step: int) -> None:
        """Say how long a step took on average since the last call, up to `step`.

        If steps have become slow, one thread is tried until the next call, and all threads again
        until the one after that: then the faster number is kept.
        """
        if not self._watches:
            return
        if self._slow is None:
            self._fastest = min(self._fastest, seconds)
            if seconds > FALLEN * self._fastest:
                self._slow = seconds
                torch.set_num_threads(1)
        elif self._single is None:
            self._single = seconds
            torch.set_num_threads(self._most)
        elif seconds > SLOWER * self._single:
            self._settle("a step", seconds, self._single)
        else:
            self._slow = self._single = None
            self._warn(
                f"a step took {FALLEN:g} times as long as usual, so one thread was tried, shortly "
                f"before step {step}. {self._most} are faster again; the last bits may differ."
            )

    def _settle(self, what: str, several: float, single: float) -> None:
        """Use one thread from now on."""
        self._watches = False
        torch.set_num_threads(1)
        self._warn(
            f"other programs use this machine's cores: {what} takes {several:.2g} s with "
            f"{self._most} threads and {single:.2g} s with one. One is used from now on. The last "
            "bits of sums differ from those of several; run.adapt_threads=false keeps the number."
        )


def _seconds_of(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
