"""How many threads a CPU computes with: fewer where other programs or a limit leave fewer cores.

Threads wait for each other after each operation. Where another program has one of the cores, they
wait for the operating system to give them their turn, some thousand times a step: two threads then
take several times as long as one. So one process on a CPU measures, at the start and when steps
take longer than they should, and uses one thread where that is faster. The last bits of sums depend
on the number of threads, so a change is always printed, and `run.adapt_threads=false` excludes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from model.cpu.cores import cores

LARGEST_PASS_FLOP = 5e10
"""If a forward and backward pass has more, nothing is measured: it would take seconds, and threads
that compute for so long rarely wait for each other. Its time would not tell: on a busy machine a
small pass may take seconds as well."""
TURNS = 3
TURN_SECONDS = 0.2
"""Of a measurement that a slow interval causes: a limit on CPU time acts in periods of 0.1 s."""
SLOWER = 1.1
"""Several threads are given up for one if they take so many times as long."""
CLEARLY_FASTER = 1.25
"""If several are so many times as fast at once, the cores are free, and one turn is enough."""
FALLEN = 1.5
"""It is measured again when a step takes so many times as long as in the fastest interval."""


def limit_threads(processes: int = 1) -> None:
    """Use at most one thread for each core of a process's share, where `processes` share them."""
    share = max(1, cores() // processes)
    if torch.get_num_threads() > share:
        torch.set_num_threads(share)


class Threads:
    """The number of threads of an attempt: at most one for each core, or one in all."""

    def __init__(
        self, passes: int, adapt: bool, launched: int, warn: Callable[[str], None]
    ) -> None:
        """`passes` are those of an update, `launched` is the launcher's number of threads.

        Without `adapt` nothing is measured. `warn` prints a sentence about a change.
        """
        self._most, self._warn = torch.get_num_threads(), warn
        if self._most < launched:
            warn(
                f"{self._most} of {launched} threads: CPU affinity or a control group leaves each "
                "process no more cores, and threads that share a core wait for each other. The "
                "last bits of sums depend on the number of threads; run.adapt_threads=false keeps "
                f"{launched}."
            )
        self._passes = passes
        self._watches = adapt and self._most > 1
        self._fastest = float("inf")
        """Seconds of the passes of a step, in the fastest interval since they were measured."""

    def watch(self, one_pass: Callable[[], object], flop_of_step: float) -> None:
        """Measure now, and when the pace falls. `one_pass` must change nothing of the training.

        `flop_of_step` is that of all passes of an update.
        """
        self._one_pass = one_pass
        self._watches = self._watches and flop_of_step / self._passes <= LARGEST_PASS_FLOP
        self._measure(0.0)

    def report_pace(self, seconds: float) -> None:
        """Report how long the passes of a step took on average since the last call.

        No step is under way. An update is not counted: how long it takes depends on the optimizer.
        """
        if seconds > FALLEN * self._fastest:
            self._measure(TURN_SECONDS)
            self._fastest = seconds  # it was something else, such as a slow disk
        self._fastest = min(self._fastest, seconds)

    def _measure(self, turn_seconds: float) -> None:
        """Choose by the time of passes, forward and backward, in turns of so many seconds."""
        if not self._watches:
            return
        torch.set_num_threads(1)
        self._one_pass()  # the first pass prepares kernels and memory
        seconds: dict[int, list[float]] = {1: [], self._most: []}
        for _ in range(TURNS):
            for number, found in seconds.items():
                torch.set_num_threads(number)
                found.append(_mean_seconds_of(self._one_pass, turn_seconds))
            if CLEARLY_FASTER * seconds[self._most][0] < seconds[1][0]:
                break
        single, several = (median(found) for found in seconds.values())
        if several <= SLOWER * single:
            self._fastest = several * self._passes
            torch.set_num_threads(self._most)
            return
        self._watches = False
        torch.set_num_threads(1)
        self._warn(
            "other programs use this machine's cores: a forward and backward pass takes "
            f"{several:.2g} s with {self._most} threads and {single:.2g} s with one. One "
            "is used from now on. The last bits of sums differ from those of several; "
            "run.adapt_threads=false keeps the number."
        )


def _mean_seconds_of(work: Callable[[], object], at_least: float) -> float:
    """Of one call, where calls are repeated for so many seconds."""
    begun, calls = time.perf_counter(), 0
    while not calls or time.perf_counter() - begun < at_least:
        work()
        calls += 1
    return (time.perf_counter() - begun) / calls
