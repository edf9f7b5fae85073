"""How often a run saves: the interval between snapshots that loses the least time."""

from __future__ import annotations

import math
from dataclasses import dataclass

DAY = 86_400.0
USUAL_PER_DAY = 1.0
"""Interruptions a day of a run that has seen none and states none."""
NEAR = 1.5
"""An interval that is off by less than this factor loses about a tenth more than the best one."""
LEAST_SECONDS = 1e-3
"""What a snapshot costs at least."""
MOST_EXPONENT = 700.0


@dataclass(frozen=True)
class Costs:
    """What saving takes, in seconds, as a run has measured it."""

    step: float
    """A step, without evaluations and snapshots."""
    snapshot: float
    """What one snapshot delays the steps by."""
    durable: float
    """From its step until it is on disk. The next snapshot waits for it."""
    upload: float = 0.0
    """Least time between two uploads, where a machine is lost with its disk; else 0."""


@dataclass(frozen=True)
class Choice:
    """An interval, and why."""

    steps: int
    reason: str


def best_interval(save_seconds: float, seconds_between: float) -> float:
    """Seconds between snapshots that lose the least time: Young (1974), refined by Daly (2006).

    `save_seconds` is what one costs, `seconds_between` the mean time between interruptions.
    """
    if save_seconds >= 2 * seconds_between:
        return seconds_between
    ratio = save_seconds / (2 * seconds_between)
    root = math.sqrt(2 * save_seconds * seconds_between)
    return root * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def lost_share(interval: float, save_seconds: float, seconds_between: float) -> float:
    """The share of time that saving and interruptions cost (Daly, equation 20), restarts aside."""
    exponent = (interval + save_seconds) / seconds_between
    return 1 - interval / (seconds_between * math.expm1(min(exponent, MOST_EXPONENT)))


def interruptions_per_day(seen: int, seconds: float) -> float:
    """The rate of a run that saw so many interruptions in so much time.

    As if it had also lasted the time to one usual interruption, and had it: a short run is near
    the usual rate, a long one near its own, and one without any stays above 0.
    """
    return (1 + seen) / (1 / USUAL_PER_DAY + seconds / DAY)


def choose_interval(costs: Costs, per_day: float, source: str, most: int) -> Choice:
    """The steps between snapshots that lose least, from 1 to `most`, with two digits.

    `source` says where `per_day`, the interruptions a day, comes from.
    """
    between, cost = DAY / per_day, max(costs.snapshot, LEAST_SECONDS)
    seconds = max(best_interval(cost, between), costs.durable, costs.upload)
    steps = max(1, min(most, _two_digits(seconds / costs.step)))
    taken = steps * costs.step
    uploaded = f", uploaded every {in_words(costs.upload)} at most" * (costs.upload > 0)
    reason = (
        f"every {steps:,} step{'s' * (steps != 1)}, {in_words(taken)}: a snapshot costs "
        f"{costs.snapshot:,.3f} s and is on disk after {costs.durable:,.2f} s{uploaded}; "
        f"{per_day:.3g} interruption{'s' * (per_day != 1)} a day ({source}); this loses "
        f"{lost_share(taken, cost, between):.2%} of the time"
    )
    return Choice(steps, reason)


def is_near(steps: int, other: int) -> bool:
    """Whether two intervals lose about the same."""
    return max(steps, other) <= NEAR * min(steps, other)


def _two_digits(number: float) -> int:
    if number < 100:
        return round(number)
    unit = 10 ** (math.floor(math.log10(number)) - 1)
    return int(round(number / unit) * unit)


def in_words(seconds: float) -> str:
    """'3.2 minutes', '5.0 hours', '2.1 days'."""
    for size, unit in ((DAY, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.3g} seconds"
