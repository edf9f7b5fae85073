"""When machines go and come back: a pure function of a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, order=True)
class Event:
    """Something that happens to a machine, so many seconds after the start."""

    at: float
    machine: int
    kind: Literal["notice", "gone", "back", "back empty"]
    """`notice`: it will go, and its launcher gets SIGTERM; `back empty`: without its disk."""


@dataclass(frozen=True)
class Interruptions:
    """How machines are interrupted."""

    mean_seconds: float
    """Mean time between two of a run, whatever its machines; the times are exponential."""
    notice: float = 0.5
    """The share of those with a notice."""
    notice_seconds: float = 8.0
    away_seconds: float = 6.0
    """Mean time until a machine is back."""
    returns: float = 0.8
    """The share of machines that come back at all, but for the last one, which always does."""
    empty: float = 0.5
    """The share of those that come back with an empty disk."""


def events(seed: int, machines: int, how: Interruptions, seconds: float) -> list[Event]:
    """What happens within so many seconds, in order."""
    draw = random.Random(seed)
    rate = 1 / (how.mean_seconds * machines)
    found = []
    left: set[int] = set()
    for machine in range(machines):
        at = draw.expovariate(rate)
        while at < seconds:
            notice, returns = draw.random() < how.notice, draw.random() < how.returns
            empty = draw.random() < how.empty
            away = draw.expovariate(1 / how.away_seconds)
            if notice:
                found.append(Event(at, machine, "notice"))
                at += how.notice_seconds
            found.append(Event(at, machine, "gone"))
            if not returns and len(left) < machines - 1:
                left.add(machine)
                break
            at += away
            found.append(Event(at, machine, "back empty" if empty else "back"))
            at += draw.expovariate(rate)
    return sorted(found)
