"""Where the time of an attempt went: every second of it, in one phase each."""

from __future__ import annotations

import re
import time

import pytest

import runs
from training.reporting.speed import (
    DATA,
    EVALUATION,
    PASSES,
    PHASES,
    SNAPSHOT,
    START,
    UPDATE,
    PhaseClock,
)


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
