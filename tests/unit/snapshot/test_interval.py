"""How often to save: Young's and Daly's optimum, against a simulation, and what is said of it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from snapshot.interval import (
    NEAR,
    Costs,
    best_interval,
    choose_interval,
    in_words,
    interruptions_per_day,
    is_near,
    lost_share,
)

DAY = 86_400


def daly(interval: float, stall: float, between: float) -> float:
    """The share of time that is lost with exponential interruptions (Daly, equation 20)."""
    wall = between * (math.exp((interval + stall) / between) - 1)
    return 1 - interval / wall


@pytest.mark.parametrize(("stall", "between"), [(0.02, 86_400), (5, 86_400), (60, 3_600)])
def test_no_other_interval_loses_less(stall, between):
    best = best_interval(stall, between)
    others = best * np.geomspace(0.2, 5, 41)
    least = min(daly(one, stall, between) for one in others)
    assert daly(best, stall, between) == pytest.approx(least, rel=1e-2)
    assert lost_share(best, stall, between) == pytest.approx(daly(best, stall, between))


def test_with_interruptions_during_each_snapshot_there_is_no_optimum():
    assert best_interval(10, 4) == 4
    assert lost_share(1e9, 10, 4) == pytest.approx(1)


def test_a_simulated_run_loses_what_is_predicted():
    draws, work, stall, between = np.random.default_rng(0), 200_000.0, 4.0, 600.0
    interval = best_interval(stall, between)
    wall, done = 0.0, 0.0
    while done < work:
        alive = draws.exponential(between)
        saved = math.floor(alive / (interval + stall))
        done += saved * interval
        wall += alive
    assert 1 - done / wall == pytest.approx(lost_share(interval, stall, between), rel=0.1)


def test_an_interval_is_no_shorter_than_writing_and_uploading_take():
    quick = choose_interval(Costs(0.1, 0.01, 0.5), 1, "as stated", 10**6)
    slow_disk = choose_interval(Costs(0.1, 0.01, 300), 1, "as stated", 10**6)
    slow_store = choose_interval(Costs(0.1, 0.01, 0.5, 600), 1, "as stated", 10**6)
    assert quick.steps * 0.1 == pytest.approx(best_interval(0.01, DAY), rel=0.05)
    assert (slow_disk.steps, slow_store.steps) == (3_000, 6_000)


@pytest.mark.parametrize(
    ("costs", "per_day", "most", "steps"),
    [
        (Costs(1, 0, 0), 1, 10**6, 13),  # a snapshot always costs something
        (Costs(1e-3, 1, 1), 1, 500, 500),  # no run saves after its end
        (Costs(3_600, 1, 1), 1, 500, 1),  # and none more often than each step
        (Costs(0.01, 2, 2), 24, 10**6, 12_000),  # two digits
    ],
)
def test_an_interval_is_a_number_of_steps(costs, per_day, most, steps):
    choice = choose_interval(costs, per_day, "as stated", most)
    assert choice.steps == steps
    assert choice.reason.startswith(f"every {steps:,} step")


def test_the_reason_has_what_decided():
    reason = choose_interval(Costs(0.5, 2, 30, 90), 4, "run.interruptions_per_day", 10**6).reason
    assert reason == (
        "every 590 steps, 4.9 minutes: a snapshot costs 2.000 s and is on disk after 30.00 s, "
        "uploaded every 1.5 minutes at most; 4 interruptions a day (run.interruptions_per_day); "
        "this loses 1.35% of the time"
    )


def test_a_rate_is_the_usual_one_at_first_and_the_observed_one_later():
    assert interruptions_per_day(0, 0) == 1
    assert interruptions_per_day(0, DAY) == 0.5
    assert interruptions_per_day(200, 2 * DAY) == pytest.approx(67, abs=1)
    assert interruptions_per_day(3_000, 30 * DAY) == pytest.approx(100, rel=0.05)


def test_a_little_more_or_less_is_no_reason_to_change():
    for stall, between in ((0.02, DAY), (10, 3_600)):
        best = best_interval(stall, between)
        for other in (best * NEAR, best / NEAR):
            loss = lost_share(other, stall, between) / lost_share(best, stall, between)
            assert loss < 1.1
    assert is_near(100, 149)
    assert not is_near(100, 151)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.25, "0.25 seconds"), (80, "80 seconds"), (5_400, "1.5 hours"), (400_000, "4.6 days")],
)
def test_durations_are_in_words(seconds, words):
    assert in_words(seconds) == words
