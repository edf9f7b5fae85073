"""The axes of pictures."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from training.reporting.pictures import round_ticks


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.0, 0.0), (1.9, 4.6), (3.0, 3.0), (549, 24_000), (-2, 1e-9), (0, 132.8), (0, 1200)],
)
def test_axes_hold_what_they_show_in_round_numbers(low, high):
    ticks = round_ticks(float(low), float(high))
    assert ticks[0] <= low <= high <= ticks[-1]
    assert 2 <= len(ticks) <= 8
    (step,) = {round(after - before, 9) for before, after in pairwise(ticks)}
    assert round(step / 10 ** math.floor(math.log10(step)), 6) in (1, 2, 2.5, 5)
    assert all(tick / step == pytest.approx(round(tick / step), abs=1e-6) for tick in ticks)


def test_axes_read_as_a_person_would_label_them():
    assert round_ticks(0, 1200, whole=True) == [0, 200, 400, 600, 800, 1000, 1200]
    assert round_ticks(0, 132.8)[:6] == [0, 25, 50, 75, 100, 125]
    assert round_ticks(0, 3, whole=True) == [0, 1, 2, 3]
