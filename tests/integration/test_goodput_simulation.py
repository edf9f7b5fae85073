"""benchmarks/goodput_simulation.py, beside what can be worked out by hand."""

from __future__ import annotations

import sys

import pytest

import runs

sys.path.append(str(runs.ROOT / "benchmarks"))  # last: its data.py is not the room of that name
import goodput_simulation as simulation
from goodput_simulation import BACKGROUND, ELASTIC, SYNCHRONOUS, Costs, interval, simulate

MONTH = 30 * simulation.DAY


def test_the_simulated_goodput_is_what_can_be_worked_out():
    costs = Costs(restart_seconds=60, detect_seconds=5, replace_seconds=35)
    # One machine that is lost once a day, with a state of no size: 100 s each time.
    found = simulate(BACKGROUND, 1, 1, costs, 100 * MONTH, 1)
    assert found == pytest.approx(86_400 / 86_500, rel=1e-4)
    stall = costs.stored(70e9, 1)
    every = interval(stall, 86_400)
    assert every == pytest.approx((2 * 840 * 86_400) ** 0.5)
    # To first order: half an interval and the stalls.
    expected = 1 - stall / every - every / 2 / 86_400 - (100 + stall) / 86_400
    found = simulate(SYNCHRONOUS, 70e9, 1, costs, 100 * MONTH, 1)
    assert found == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("machines", [4, 64, 1024])
@pytest.mark.parametrize("billions", [1, 13])
def test_going_on_loses_less_than_waiting_and_waiting_less_than_stalling(machines, billions):
    found = [
        simulate(way, billions * 1e9, machines, Costs(), MONTH, 1)
        for way in (SYNCHRONOUS, BACKGROUND, ELASTIC)
    ]
    assert 0 < found[0] <= found[1] + 0.005
    assert found[1] <= found[2] + 0.005 < 1.005
