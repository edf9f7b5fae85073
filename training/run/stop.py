"""The end of a run before its last step, by a signal or by its own time, agreed by all."""

from __future__ import annotations

import time

import torch
from accelerate import Accelerator
from torch import Tensor

from config.schema import RunConfig
from training.distributed.launcher import seconds_since_launch
from training.exits import EXIT_DONE, exit_code_of
from training.run.signals import TIME_IS_OVER, Signals, name_of

AGREE_SECONDS = 1.0
"""How often the processes ask each other: often enough for a signal, too seldom to cost a step."""


class Stop:
    """Whether the run ends after a step; the same answer on all processes, at the same step.

    A process that alone knew of a signal would write a snapshot that the others are not part of, or
    wait for them for ever. Asking after each step would have all of them wait for each other once
    more, so they ask about once a second, and on a GPU read the answer at the next time, when it
    has long been computed.
    """

    def __init__(self, accelerator: Accelerator, run: RunConfig, signals: Signals) -> None:
        self.accelerator = accelerator
        self.signals = signals
        self.reason = ""
        """Why the run ends; empty as long as it goes on."""
        self._budget = run.max_minutes
        self._reserve = run.grace_seconds  # of the budget, for the last step and its snapshot
        self._ends = float("inf")
        if run.max_minutes is not None:
            self._ends = time.monotonic() + 60 * run.max_minutes - seconds_since_launch()
        self._every = 1  # steps between two questions
        self._steps = 0  # since the last one
        self._asked_at = time.monotonic()
        self._answer: Tensor | None = None
        self._computed: torch.Event | None = None

    def agreed(self) -> bool:
        """Whether this attempt ends with this step. Every process must call this, each step."""
        self._steps += 1
        if self._steps < self._every:
            return False
        now = time.monotonic()
        pace = (now - self._asked_at) / self._steps
        number, pace = self._of_all(self._wish(now, pace), pace)
        self._asked_at, self._steps = now, 0
        every = max(1, int(AGREE_SECONDS / max(pace, 1e-4)))
        self._every = min(every, 2 * self._every)  # a GPU's first paces are of queueing
        if self.accelerator.num_processes == 1:
            self._every = 1  # nobody to ask
        if not number:
            return False
        if number == TIME_IS_OVER:
            self.reason = f"run.max_minutes={self._budget:g}"
        else:
            self.reason = name_of(number)
        self.signals.ask(number)
        return True

    @property
    def exit_code(self) -> int:
        """Of the process, once the run has ended."""
        return exit_code_of(self.signals.asked) if self.reason else EXIT_DONE

    def _wish(self, now: float, pace: float) -> int:
        """This process's own: a signal's number, or another cause of an end; 0 to go on."""
        if self.signals.asked is not None:
            return self.signals.asked
        return TIME_IS_OVER if now + 2 * pace * self._every + self._reserve > self._ends else 0

    def _of_all(self, number: int, pace: float) -> tuple[int, float]:
        """The greatest number and pace of all processes, on a GPU those of the last time."""
        if self.accelerator.num_processes == 1:
            return number, pace
        device = self.accelerator.device
        mine = torch.tensor([[float(number), pace]], device=device)
        told = self.accelerator.gather(mine)  # (processes, 2)
        if device.type != "cpu":
            before, computed = self._answer, self._computed
            self._answer = told.to("cpu", non_blocking=True)
            self._computed = torch.accelerator.current_stream().record_event()
            if before is None or computed is None:
                return 0, AGREE_SECONDS  # the same everywhere, unlike this process's own pace
            computed.synchronize()
            told = before
        greatest = told.max(dim=0).values.tolist()
        return int(greatest[0]), greatest[1]
