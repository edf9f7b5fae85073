"""The lines of a proof: what was compared, and how it came out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from proving.task import Outcome
from training.exits import EXIT_DONE

GREEN, RED, GREY = "green", "red", "grey"
"""It holds; it does not; it could not be checked here."""


@dataclass(frozen=True)
class Line:
    """One check."""

    name: str
    status: str
    said: str
    """What was compared, or why it could not be."""
    difference: float | None = None
    """The largest one."""
    bound: float | None = None


def passed(name: str, holds: bool, said: str) -> Line:
    """A check without a figure."""
    return Line(name, GREEN if holds else RED, said)


def within(name: str, difference: float, bound: float, said: str) -> Line:
    """A check of a difference; one that is not a number is red."""
    return Line(name, GREEN if difference <= bound else RED, said, difference, bound)


def unchecked(name: str, why: str) -> Line:
    """A check that is not possible here."""
    return Line(name, GREY, why)


def failed(name: str, found: Outcome, code: int = EXIT_DONE) -> Line:
    """An attempt that ended otherwise than it should."""
    wanted = f", not {code}" if code != EXIT_DONE else ""
    said = f"exit code {found.code}{wanted}: {found.last_words()} ({found.log})"
    return passed(name, False, said)


def largest_difference(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """The largest relative one, over the steps of both; infinite if they have none in common."""
    steps = one.keys() & other.keys()
    if not steps or any(one[step] is None or other[step] is None for step in steps):
        return float("inf")
    return max(abs(one[step] - other[step]) / abs(one[step]) for step in steps)
