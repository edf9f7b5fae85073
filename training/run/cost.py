"""What a run has cost so far, over all of its attempts, and what it may still cost."""

from __future__ import annotations

import math
import time
from pathlib import Path

import psutil

from config.schema import Config, ConfigError
from snapshot.disk.state import RunState
from store.events import read_events
from store.goodput import PHASES, START, Reading, cost_of
from store.records import EVENTS
from training.distributed.environment import (
    machines,
    seconds_since_launch,
    seconds_since_start,
)


def begin_reading(config: Config, state: RunState) -> Reading:
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
        price=config.run.price_per_hour,
    )


def cost_so_far(config: Config) -> float:
    """What all attempts have cost that this disk knows of; 0 without a price."""
    price = config.run.price_per_hour
    return 0.0 if price is None else cost_of(read_events(Path(config.run.dir) / EVENTS), price)


def refuse_spent(config: Config, step: int) -> None:
    """Raise ConfigError if `run.max_cost` is spent, and the run has steps after `step`."""
    most, spent = config.run.max_cost, cost_so_far(config)
    if most is None or step >= config.train.max_steps:
        return
    if seconds_to_spend(config) > config.run.grace_seconds:  # what the last snapshot may take
        return
    raise ConfigError(
        f"run.max_cost={most:g} is spent: this run has cost {spent:,.2f} so far, at "
        f"run.price_per_hour={config.run.price_per_hour:g} a machine. Nothing was changed. A "
        f"larger run.max_cost, such as {2 * most:g}, resumes it."
    )


def seconds_to_spend(config: Config) -> float:
    """For how many seconds the machines can still be paid; infinite without `run.max_cost`."""
    run = config.run
    if run.max_cost is None or run.price_per_hour is None:
        return math.inf
    return (run.max_cost - cost_so_far(config)) * 3600 / (run.price_per_hour * machines())
