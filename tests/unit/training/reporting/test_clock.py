"""Where the time of a run went: every second of it, in one phase each."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace

import pytest

import runs
from store.events import read_events
from store.goodput import (
    DATA,
    EVALUATION,
    PASSES,
    PHASES,
    SNAPSHOT,
    START,
    UPDATE,
    Reading,
    readings_in,
)
from training.reporting.console import Console
from training.reporting.events import Events
from training.reporting.summary import print_times
from training.reporting.timing import PhaseClock
from training.run.records import note_last_sign


@pytest.fixture
def clock(monkeypatch) -> PhaseClock:
    """A clock of which every reading is a second later."""
    seconds = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))
    return PhaseClock(5.0)


def test_every_second_is_in_one_phase(clock):
    for batch in clock.timed(["a", "b"]):
        assert batch in "ab"
        clock.enter(UPDATE)
        with clock.within(SNAPSHOT):
            pass
        clock.enter(EVALUATION)
    lines = clock.table()
    found = clock.seconds
    assert (found[START], found[DATA], found[PASSES]) == (6.0, 3.0, 2.0)
    assert (found[UPDATE], found[SNAPSHOT], found[EVALUATION]) == (4.0, 2.0, 2.0)
    assert [line.split("  ")[0] for line in lines] == [*PHASES, "all"]
    assert lines[-1].endswith("100.0%")


def test_the_table_of_a_run_is_its_wall_time(small, tmp_path):
    begun = time.monotonic()
    result = runs.train(*small, f"run.dir={tmp_path / 'run'}")
    seconds = time.monotonic() - begun
    assert result.returncode == 0, result.stderr
    rows = dict(
        re.findall(r"^(?:time)? +([a-z][a-z, ]+?) +([\d.]+) s +[\d.]+%$", result.stdout, re.M)
    )
    assert list(rows) == [*PHASES, "all"]
    total = float(rows.pop("all"))
    assert sum(map(float, rows.values())) == pytest.approx(total, abs=0.05 * len(PHASES))
    assert total - 0.05 <= seconds  # it is printed with one digit
    assert float(rows[PASSES]) > 0


def test_the_end_shows_the_time_of_this_attempt_and_of_all(tmp_path, capsys):
    console = Console(shown=True, max_steps=10, step=0)
    clock = PhaseClock(5.0)
    print_times(console, clock)
    assert "goodput" not in capsys.readouterr().out
    console.events = Events(tmp_path / "events.jsonl", "b" * 32)
    readings = [
        Reading(name * 8, first, 10, 10, 1, 1.7e9 + at, 0.0, {START: 5.0, PASSES: 95.0})
        for name, first, at in (("a", 0, 0), ("b", 9, 500))
    ]
    console.read_clock(readings[0])
    print_times(console, clock)
    said = capsys.readouterr().out
    assert "goodput   95.0% of 0.03 machine-hours in 1 attempt; 0 interruptions, 0 steps" in said
    assert "steps in the model" not in said, "the same as the table above"
    console.read_clock(readings[1])
    print_times(console, clock)
    said = capsys.readouterr().out
    assert "goodput   90.2% of 0.06 machine-hours in 2 attempts; 1 interruption, 1 step" in said
    assert "run       steps in the model" in said


def test_a_reading_replaces_the_one_before_and_nothing_else(tmp_path):
    events = Events(tmp_path / "events.jsonl", "a" * 32)
    events.add("start", 0)
    reading = Reading("a" * 8, 0, 0, 0, 1, 1.7e9, 0.0, {START: 5.0})
    other = replace(reading, attempt="b" * 8)
    for one in (other, reading, replace(reading, step=7, read_at=7)):
        events.read_clock(one)
    found = read_events(tmp_path / "events.jsonl")
    assert [(one["event"], one["attempt"][0], one["step"]) for one in found] == [
        ("start", "a", 0),
        ("clock", "b", 0),
        ("clock", "a", 7),
    ]
    earlier = tmp_path / "earlier.jsonl"
    Events(earlier, "a" * 32).read_clock(reading)
    events.merge(earlier.read_bytes())
    assert len(read_events(tmp_path / "events.jsonl")) == 3, "the newest reading stays"


def test_the_next_attempt_says_how_long_a_killed_one_lived_on(tmp_path):
    events = Events(tmp_path / "events.jsonl", "b" * 32)
    reading = Reading("a" * 8, 0, 10, 10, 1, 1.7e9, 0.0, {PASSES: 20.0})
    events.read_clock(reading)
    metrics = tmp_path / "metrics.jsonl"
    lines = [{"event": "train", "step": step, "loss": 1.0} for step in range(1, 18)]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.utime(metrics, (1.7e9 + 33, 1.7e9 + 33))
    for _ in range(2):  # a start that comes to nothing changes nothing
        note_last_sign(events, tmp_path)
        (found,) = readings_in(read_events(events.path))
        assert (found.step, found.read_at, found.silent) == (17, 10, 13.0)
    events.add("start", 10)
    events.read_clock(replace(reading, attempt="b" * 8, launched=1.7e9 + 100))
    events.add("stop", 10)
    os.utime(metrics, (1.7e9 + 200, 1.7e9 + 200))
    note_last_sign(events, tmp_path)
    assert readings_in(read_events(events.path))[1].silent == 0, "it has ended"
