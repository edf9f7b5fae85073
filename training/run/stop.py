"""The end of a run before its last step, by a signal or a limit. All processes agree on it.

In the same message the main process says when a snapshot is due (`training.run.save_steps`).
"""

from __future__ import annotations

import time

import torch
from accelerate import Accelerator
from torch import Tensor

from config.schema import RunConfig
from training.distributed.environment import seconds_since_launch
from training.exits import EXIT_DONE
from training.run.save_steps import SaveSteps
from training.run.signals import (
    TIME_IS_OVER,
    Signals,
    exit_code_of,
    name_of,
)

AGREE_SECONDS = 1.0
"""How often the processes compare: soon enough for a signal, too seldom to slow the steps."""


class Stop:
    """Whether the run ends after a step: all processes get the same answer at the same step.

    A process that stopped alone would write a snapshot without the others, or wait for them
    forever. Comparing after each step would add one more wait, so the processes compare about once
    a second. On a GPU they read the result at the next comparison, when it is long computed.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        run: RunConfig,
        signals: Signals,
        saves: SaveSteps,
    ) -> None:
        self.accelerator = accelerator
        self.signals = signals
        self._saves = saves
        self.reason = ""
        """Why the run ends; empty while it continues."""
        self._limit = f"run.max_minutes={run.max_minutes or 0:g}"
        self._reserve = run.grace_seconds  # of the budget, for the last step and its snapshot
        self._ends = float("inf")
        if run.max_minutes is not None:
            self._ends = time.monotonic() + 60 * run.max_minutes - seconds_since_launch()
        self._every = 1  # steps between two comparisons
        self._steps = 0  # since the last one
        self._compared_at = time.monotonic()
        self._result: tuple[int, Tensor] | None = None
        self._computed: torch.Event | None = None

    def agreed(self, step: int) -> bool:
        """Whether this attempt ends with this step. Every process must call this, each step."""
        self._steps += 1
        if self._steps < self._every:
            return False
        now = time.monotonic()
        pace = (now - self._compared_at) / self._steps
        number = self.signals.cause or 0
        soon = now + 2 * pace * self._every + self._reserve
        if not number and soon > self._ends:
            number = TIME_IS_OVER
        is_time = self._saves.is_time()
        if self.accelerator.num_processes > 1:
            step, number, pace, is_time = self._largest_of_all(step, number, pace, is_time)
        self._saves.agree(step, is_time)
        self._compared_at, self._steps = now, 0
        every = max(1, int(AGREE_SECONDS / max(pace, 1e-4)))
        self._every = min(every, 2 * self._every)  # a GPU's first steps are only queued
        if self.accelerator.num_processes == 1:
            self._every = 1
        if not number:
            return False
        self.reason = self._limit if number == TIME_IS_OVER else name_of(number)
        self.signals.stop(number)
        return True

    @property
    def exit_code(self) -> int:
        """The exit code of the process, once the run has ended."""
        return exit_code_of(self.signals.cause) if self.reason else EXIT_DONE

    def _largest_of_all(
        self, step: int, number: int, pace: float, is_time: bool
    ) -> tuple[int, int, float, bool]:
        """The largest cause, pace and answer of all processes, and the step that they are of.

        On a GPU they are those of the last comparison.
        """
        device = self.accelerator.device
        mine = torch.tensor([[float(number), pace, float(is_time)]], device=device)
        gathered = self.accelerator.gather(mine)  # (processes, 3)
        if device.type != "cpu":
            before, computed = self._result, self._computed
            self._result = step, gathered.to("cpu", non_blocking=True)
            self._computed = torch.accelerator.current_stream().record_event()
            if before is None or computed is None:
                # The same everywhere, unlike this process's own pace.
                return step, 0, AGREE_SECONDS, False
            computed.synchronize()
            step, gathered = before
        number, pace, is_time = gathered.max(dim=0).values.tolist()
        return step, int(number), pace, bool(is_time)
