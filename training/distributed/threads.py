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

LONGEST_PASS_SECONDS = 0.5
"""If one thread takes longer for a forward and backward pass, nothing is measured: it would take
seconds, and threads that compute for so long rarely wait for each other."""
PASSES = 3
SLOWER = 1.25
"""Several threads are given up for one if they take so many times as long."""
FALLEN = 2.0
"""It is measured again when a step takes so many times as long as in the fastest interval."""


class Threads:
    """The number of threads of an attempt: the launcher's, or one."""

    def __init__(self, accelerator: Accelerator, adapt: bool, warn: Callable[[str], None]) -> None:
        """`warn` prints a sentence about the change."""
        self._most, self._warn = torch.get_num_threads(), warn
        compiled = accelerator.state.dynamo_plugin.backend != DynamoBackend.NO
        on_cpu = accelerator.device.type == "cpu" and accelerator.num_processes == 1
        self._watches = adapt and on_cpu and self._most > 1 and not compiled
        self._fastest = float("inf")
        """Seconds of a step, in the fastest interval since it was measured."""

    def watch(self, one_pass: Callable[[], object]) -> None:
        """Measure now, and when the pace falls. `one_pass` must change nothing of the training."""
        self._one_pass = one_pass
        self._measure()

    def report_pace(self, seconds: float) -> None:
        """Report how long a step took on average since the last call; no step is under way."""
        if seconds > FALLEN * self._fastest:
            self._measure()
            self._fastest = seconds  # it was something else, such as a slow disk
        self._fastest = min(self._fastest, seconds)

    def _measure(self) -> None:
        """Choose by the time of a few passes, forward and backward, in turns."""
        if not self._watches:
            return
        torch.set_num_threads(1)
        seconds: dict[int, list[float]] = {1: [], self._most: []}
        if _seconds_of(self._one_pass) <= LONGEST_PASS_SECONDS:
            for _ in range(PASSES):
                for number, found in seconds.items():
                    torch.set_num_threads(number)
                    found.append(_seconds_of(self._one_pass))
            single, several = (median(found) for found in seconds.values())
            if several > SLOWER * single:
                self._watches = False
                torch.set_num_threads(1)
                self._warn(
                    "other programs use this machine's cores: a forward and backward pass takes "
                    f"{several:.2g} s with {self._most} threads and {single:.2g} s with one. One "
                    "is used from now on. The last bits of sums differ from those of several; "
                    "run.adapt_threads=false keeps the number."
                )
                return
        torch.set_num_threads(self._most)


def _seconds_of(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
