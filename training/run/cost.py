"""The first reading of the clock of an attempt."""

from __future__ import annotations

import time

import psutil

from snapshot.disk.state import RunState
from store.goodput import PHASES, START, Reading
from training.distributed.environment import (
    machines,
    seconds_since_launch,
    seconds_since_start,
)


def begin_reading(state: RunState) -> Reading:
    """The first reading of the clock of an attempt at `state`: its start is all of its time."""
    lived, launched = seconds_since_start(psutil.Process()), seconds_since_launch()
    return Reading(
        state.attempt_id[:8],
        first=state.step,
        step=state.step,
        read_at=state.step,
        machines=machines(),
        launched=time.time() - launched,
        waited=max(0.0, launched - lived),
        seconds={**dict.fromkeys(PHASES, 0.0), START: lived},
    )
