"""What a run costs: memory, seconds, and how often saving loses least."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from config.schema import Config
from proving.lines import GREEN, Line, unchecked, within
from proving.task import Outcome

MEMORY = 0.02
"""Bound of the relative difference of counted and planned memory."""
FIRST = 2
"""Steps before which a process has not reached its speed."""
DAY = 86_400.0


def memory(counted: Outcome) -> Line:
    """The peak of a step, as it is planned and counted."""
    peak, planned = counted.facts.get("peak"), counted.facts.get("predicted_peak")
    if not peak or not planned:
        return unchecked("memory as planned", counted.last_words())
    said = f"{peak / 1e6:,.1f} MB of tensors at the peak, plan.py: {planned / 1e6:,.1f} MB"
    return within("memory as planned", abs(peak / planned - 1), MEMORY, said)


def seconds_a_step(whole: Outcome) -> float:
    """The median, of steps after the first ones."""
    steps = whole.facts["step_seconds"]
    later = [seconds for step, seconds in steps.items() if int(step) > FIRST]
    return median(later or steps.values())


def speed(whole: Outcome, config: Config, price: float | None, per_day: float) -> Iterator[Line]:
    """Seconds a step, waits, MFU, the time of the run, and how often to save."""
    step, facts = seconds_a_step(whole), whole.facts
    tokens = config.train.global_batch_size * config.data.block_size
    said = f"{step:,.3f} s a step, {tokens / step:,.0f} tokens/s"
    if facts["flops_per_token"] and facts["peak_flops"]:
        used = tokens / step * facts["flops_per_token"] / facts["peak_flops"]
        said += f", MFU {used:.1%}"
    training = sum(facts["clock"][phase] for phase in ("data", "forward and backward", "update"))
    waits = facts["clock"]["data"] / training
    yield Line("speed", GREEN, f"{said}; {waits:.1%} of it waiting for data")
    stall = median(facts["stalls"])
    yield Line(
        "saving",
        GREEN,
        f"a snapshot stalls training for {stall:,.3f} s and is on disk after "
        f"{median(facts['durable']):,.2f} s",
    )
    seconds = config.train.max_steps * step
    seconds += config.train.max_steps / config.snapshot.every * stall
    said = f"{config.train.max_steps:,} steps: {in_words(seconds)} without evaluations"
    if price is not None:
        said += f", {seconds / 3600 * price:,.2f} at {price:g} per hour"
    yield Line("whole run", GREEN, said)
    every = best_interval(max(stall, 1e-3), DAY / per_day) / step
    steps = max(1, min(config.train.max_steps, round(every)))
    yield Line(
        "snapshot.every",
        GREEN,
        f"{steps:,} loses least with {per_day:g} interruption{'s' * (per_day != 1)} a day; it is "
        f"{config.snapshot.every:,}",
    )


def best_interval(save_seconds: float, seconds_between: float) -> float:
    """Seconds between snapshots that lose the least time: Young (1974), refined by Daly (2006).

    `save_seconds` is what one costs, `seconds_between` the mean time between interruptions.
    """
    if save_seconds >= 2 * seconds_between:
        return seconds_between
    ratio = save_seconds / (2 * seconds_between)
    root = math.sqrt(2 * save_seconds * seconds_between)
    return root * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def in_words(seconds: float) -> str:
    """'3.2 minutes', '5.0 hours', '2.1 days'."""
    for size, unit in ((DAY, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.0f} seconds"
