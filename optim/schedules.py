"""The learning-rate schedules by name: how the rate falls after the warm-up.

A new one is a function here and its name in `SCHEDULES`, from which the configuration takes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """A pure function of the step, so there is no scheduler to save."""

    fall: Callable[[float], float]
    """How much is left of the way from the full rate down to `optim.min_learning_rate`, from 1 to
    0, by the share of the falling steps that are done."""
    is_stable_first: bool = False
    """Whether the rate falls in the last `optim.decay_fraction` of the steps alone, and not from
    the end of the warm-up."""


def cosine(progress: float) -> float:
    """Half a cosine (SGDR, Loshchilov & Hutter, 2017)."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def one_minus_root(progress: float) -> float:
    """The decay of Hägele et al., 2024."""
    return 1.0 - math.sqrt(progress)


SCHEDULES = {
    "cosine": Schedule(cosine),
    "wsd": Schedule(one_minus_root, is_stable_first=True),  # MiniCPM, Hu et al., 2024
}
"""Schedules by `optim.schedule`."""
