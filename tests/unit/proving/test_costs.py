"""How often to save: Young's and Daly's optimum, against a simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from proving.costs import best_interval, in_words


def lost_share(interval: float, stall: float, between: float) -> float:
    """The share of time that is lost with exponential interruptions (Daly, equation 20)."""
    wall = between * (math.exp((interval + stall) / between) - 1)
    return 1 - interval / wall


@pytest.mark.parametrize(("stall", "between"), [(0.02, 86_400), (5, 86_400), (60, 3_600)])
def test_no_other_interval_loses_less(stall, between):
    best = best_interval(stall, between)
    others = best * np.geomspace(0.2, 5, 41)
    least = min(lost_share(one, stall, between) for one in others)
    assert lost_share(best, stall, between) == pytest.approx(least, rel=1e-2)


def test_with_interruptions_during_each_snapshot_there_is_no_optimum():
    assert best_interval(10, 4) == 4


@pytest.mark.parametrize(
    ("seconds", "words"), [(80, "80 seconds"), (5_400, "1.5 hours"), (400_000, "4.6 days")]
)
def test_durations_are_in_words(seconds, words):
    assert in_words(seconds) == words
