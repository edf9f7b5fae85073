"""Where the time of a run went: sums over attempts and machines, worked out by hand."""

from __future__ import annotations

import json

import pytest

from store.events import parse_events
from store.goodput import (
    DATA,
    END,
    EVALUATING,
    LOST,
    PASSES,
    PHASES,
    SAVING,
    SNAPSHOT,
    START,
    STARTING,
    UPDATE,
    USEFUL,
    WAITING,
    Reading,
    goodput_of,
    readings_in,
)

BEGUN = 1_764_000_000.0


def reading(name: str, first: int, step: int, at: float, **changes: object) -> Reading:
    """An attempt on one machine, launched `at` seconds after the run began."""
    phases = dict.fromkeys(PHASES, 0.0) | dict(changes.pop("phases", {START: 10.0}))
    values = {"machines": 1, "launched": BEGUN + at, "waited": 0.0, "read_at": step, **changes}
    return Reading(name * 8, first, step, seconds=phases, **values)


def event(kind: str, attempt: str, step: int, text: str = "") -> dict[str, object]:
    return {"time": "2025-11-24T16:00:00Z", "attempt": attempt * 8, "event": kind, "step": step} | {
        "text": text
    }


def events(*readings: Reading, ended: str = "") -> list[dict[str, object]]:
    found = [event("clock", one.attempt[0], one.step, one.as_text()) for one in readings]
    return found + [event("stop", name, 0) for name in ended]


STEPS = {START: 10.0, DATA: 5.0, PASSES: 80.0, UPDATE: 20.0, SNAPSHOT: 3.0, END: 2.0}
"""120 seconds, of which 100 in steps."""


def test_a_run_without_interruptions():
    found = goodput_of(events(reading("a", 0, 100, 0, phases=STEPS), ended="a"))
    assert found.seconds == {
        **{USEFUL: 100, LOST: 0, WAITING: 5, SAVING: 3, EVALUATING: 0},
        STARTING: 12,
    }
    assert (found.total, found.interruptions, found.steps_lost) == (120, 0, 0)
    assert found.share == pytest.approx(100 / 120)


def test_steps_after_the_one_that_is_resumed_from_are_lost():
    # 100 steps in 100 s, of which 40 are in the snapshot that the second attempt resumes.
    killed = reading("a", 0, 100, 0, phases=STEPS)
    found = goodput_of(events(killed, reading("b", 40, 140, 1_000, phases=STEPS)))
    assert found.seconds[USEFUL] == pytest.approx(40 + 100)
    assert found.seconds[LOST] == pytest.approx(60)
    assert (found.total, found.interruptions, found.steps_lost) == (240, 1, 60)


def test_what_came_after_the_last_reading_is_lost():
    # The clock was read at step 50, and the file of metrics shows 30 more seconds and 20 steps.
    killed = reading("a", 0, 70, 0, phases=STEPS, read_at=50, silent=30.0)
    found = goodput_of(events(killed, reading("b", 50, 60, 1_000, phases=STEPS)))
    assert found.seconds[LOST] == pytest.approx(30)
    assert (found.total, found.steps_lost) == (270, 20)
    # Killed before the first snapshot.
    killed = reading("a", 0, 70, 0, silent=35.0, read_at=0)
    found = goodput_of(events(killed, reading("b", 0, 60, 1_000, phases=STEPS)))
    assert (found.seconds[LOST], found.steps_lost) == (35, 70)


def test_a_later_attempt_may_lose_what_two_before_it_have_trained():
    found = goodput_of(
        events(
            reading("a", 0, 100, 0, phases=STEPS),
            reading("b", 100, 200, 1_000, phases=STEPS),
            reading("c", 60, 160, 2_000, phases=STEPS),  # whose snapshots were damaged
        )
    )
    assert found.seconds[USEFUL] == pytest.approx(60 + 0 + 100)
    assert found.steps_lost == 40 + 100


def test_a_launcher_holds_its_machine_between_its_attempts():
    first = reading("a", 0, 100, 0, phases=STEPS, waited=4.0)  # seen until 124
    again = reading("b", 100, 200, 0, phases=STEPS, waited=150.0)  # of the same launcher
    found = goodput_of(events(first, again))
    assert found.seconds[STARTING] == pytest.approx(2 * 12 + 4 + 26)
    assert found.total == pytest.approx(270)
    elsewhere = reading("b", 100, 200, 150, phases=STEPS)
    assert goodput_of(events(first, elsewhere)).total == pytest.approx(244)


def test_every_machine_counts():
    alone = reading("a", 0, 100, 0, phases=STEPS)
    four = reading("b", 100, 200, 1_000, phases=STEPS, machines=4)
    found = goodput_of(events(alone, four))
    assert found.total == pytest.approx(120 + 480)
    assert found.share == pytest.approx(100 / 120)


def test_the_sum_of_all_kinds_of_time_is_the_time_that_machines_were_held():
    attempts = [
        reading("a", 0, 90, 0, phases=STEPS, waited=3.0, silent=7.0, read_at=80, machines=2),
        reading("b", 70, 170, 0, phases=STEPS, waited=140.0, machines=3),
        reading("c", 170, 180, 500, phases=STEPS),
    ]
    found = goodput_of(events(*attempts, ended="b"))
    assert found.total == pytest.approx(2 * 130 + 3 * 130 + 120)


def test_a_reading_is_read_as_it_was_written():
    one = reading("a", 3, 90, 0, phases=STEPS, read_at=80, silent=7.5, machines=2)
    assert readings_in(events(one)) == [one]
    assert len(one.as_text()) < 400
    longest = reading("a", 10**12, 10**12, 0, silent=1e9, phases=dict.fromkeys(PHASES, 1e9))
    assert len(longest.as_text()) <= 400
    assert readings_in(events(longest)) == [longest]


def test_the_last_reading_of_an_attempt_counts():
    early, late = reading("a", 0, 10, 0), reading("a", 0, 100, 0, phases=STEPS)
    assert readings_in(events(early, late)) == readings_in(events(late, early)) == [late]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "steps 0 to 10 on 1 machine",
        "steps 0 to 10 on 1 machine, launched at nan, begun 0 s later: start 1.0",
        "steps 0 to 10 on 1 machine, launched at 1.0, begun 0 s later: start -1.0",
        f"steps 0 to 10 on 1 machine, launched at 1.0, begun 0 s later: start {'9' * 400}",
    ],
)
def test_what_is_no_reading_is_ignored(text):
    assert goodput_of([event("clock", "a", 5, text)]) is None


def test_events_of_the_store_are_untrusted_input():
    line = event("clock", "a", 5, reading("a", 0, 5, 0).as_text())
    assert parse_events(json.dumps(line).encode()) == [line]
    assert parse_events(json.dumps({**line, "attempt": "x"}).encode()) == []


def test_a_goodput_in_words():
    killed = reading("a", 0, 100, 0, phases=STEPS)
    found = goodput_of(events(killed, reading("b", 40, 140, 1_000, phases=STEPS)))
    assert found.in_words() == (
        "58.3% of 0.07 machine-hours in 2 attempts; 1 interruption, 60 steps done again"
    )
    assert found.table()[0] == "steps in the model         140.0 s   58.3%"
    assert found.table()[-1] == "all                        240.0 s  100.0%"
