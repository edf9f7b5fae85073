"""The end of a run before its last step, by a signal or a limit. All processes agree on it.

In the same message the main process announces the next snapshot (`training.run.save_steps`).
"""

from __future__ import annotations

import time

import torch
from accelerate import Accelerator
from torch import Tensor

from config.schema import RunConfig
from training.distributed.environment import is_elastic, seconds_since_launch
from training.exits import EXIT_DONE
from training.run.save_steps import SaveSteps
from training.run.signals import (
    MEMBERSHIP,
    MONEY_IS_SPENT,
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
        spent_at: float = float("inf"),
    ) -> None:
        """`spent_at`: when `run.max_cost` is spent, on the monotonic clock."""
        self.accelerator = accelerator
        self.signals = signals
        self._saves, self._spent_at = saves, spent_at
        self.reason = ""
        """Why the run ends; empty while it continues."""
        self._elastic = is_elastic()
        self._limits = {
            TIME_IS_OVER: f"run.max_minutes={run.max_minutes or 0:g}",
            MONEY_IS_SPENT: f"run.max_cost={run.max_cost or 0:g}",
        }
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
        if not number and soon > min(self._ends, self._spent_at):
            number = TIME_IS_OVER if self._ends <= self._spent_at else MONEY_IS_SPENT
        # Zero where another machine's limit or signal ends the attempt.
        mine = number or self.signals.own_cause
        ahead = self._saves.ahead(step)
        if self.accelerator.num_processes > 1:
            step, number, pace, ahead = self._largest_of_all(step, number, pace, ahead)
        self._saves.agree(step, ahead)
        self._compared_at, self._steps = now, 0
        every = max(1, int(AGREE_SECONDS / max(pace, 1e-4)))
        self._every = min(every, 2 * self._every)  # a GPU's first steps are only queued
        if self.accelerator.num_processes == 1:
            self._every = 1
        if not number:
            return False
        if self._elastic and number != MONEY_IS_SPENT:
            number = mine or MEMBERSHIP  # what ends another machine does not end this one
        self.reason = self._limits.get(number) or name_of(number)
        self.signals.stop(number)
        return True

    @property
    def needed_change(self) -> str:
        """What a command needs to resume; empty if it may stay as it is."""
        return " with a larger run.max_cost" * (self.signals.cause == MONEY_IS_SPENT)

    @property
    def exit_code(self) -> int:
        """The exit code of the process, once the run has ended."""
        return exit_code_of(self.signals.cause) if self.reason else EXIT_DONE

    def _largest_of_all(
        self, step: int, number: int, pace: float, ahead: float
    ) -> tuple[int, int, float, float]:
        """The largest cause, pace and answer of all processes, and the step that they are of.

        On a GPU they are those of the last comparison.
        """
        device = self.accelerator.device
        mine = torch.tensor([[float(number), pace, ahead]], device=device)
        gathered = self.accelerator.gather(mine)  # (processes, 3)
        if device.type != "cpu":
            before, computed = self._result, self._computed
            self._result = step, gathered.to("cpu", non_blocking=True)
            self._computed = torch.accelerator.current_stream().record_event()
            if before is None or computed is None:
                # The same everywhere, unlike this process's own pace.
                return step, 0, AGREE_SECONDS, 0.0
            computed.synchronize()
            step, gathered = before
        number, pace, ahead = gathered.max(dim=0).values.tolist()
        return step, int(number), pace, ahead
