"""The pure parts of benchmarks/goodput.py: interruptions, and what is in a model."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import pairwise

import runs

sys.path.append(str(runs.ROOT / "benchmarks"))  # last: its data.py is not the room of that name
from goodput_schedule import Interruptions, events
from goodput_score import Computed, read_logs, work_of


def test_interruptions_are_a_function_of_the_seed():
    how = Interruptions(mean_seconds=30)
    found = events(1, 4, how, 10_000)
    assert found == events(1, 4, how, 10_000) == sorted(found)
    assert found != events(2, 4, how, 10_000)
    for machine in range(4):
        kinds = [event.kind for event in found if event.machine == machine]
        assert kinds[0] in ("notice", "gone")
        for before, after in pairwise(kinds):
            assert (before == "notice") <= (after == "gone")
            assert (before == "gone") <= (after in ("back", "back empty"))
    assert {found[-1].kind} <= {"back", "back empty", "gone", "notice"}
    stays = [m for m in range(4) if [e.kind for e in found if e.machine == m][-1] != "gone"]
    assert stays  # the last machine always comes back


def step(number, begin, *rows, loss=1.0):
    return Computed(number, begin, begin + 1.0, rows, loss)


def test_the_last_execution_of_a_step_is_in_the_model():
    calm = work_of([step(1, 0, "a"), step(2, 1, "b"), step(3, 2, "c", loss=0.5)])
    assert (calm.useful_seconds, calm.steps_lost, calm.last_loss) == (3.0, 0, 0.5)
    # Two machines; step 2 is lost and computed again by one, which skips b and takes d twice.
    again = [step(1, 0, "a"), step(1, 0.2), step(2, 1, "b"), step(2, 10, "d"), step(3, 11, "d")]
    found = work_of(again)
    assert (found.useful_seconds, found.steps_lost) == (4.0, 1)
    assert found.rows - calm.rows == Counter("dd")
    assert calm.rows - found.rows == Counter("bc")


def test_a_line_that_a_kill_cut_short_is_no_step(tmp_path):
    whole = '{"step": 1, "begin": 0, "end": 1, "rows": ["a"], "loss": 2}\n'
    (tmp_path / "0.jsonl").write_text(whole + whole[:30])
    assert read_logs(tmp_path) == [Computed(1, 0, 1, ("a",), 2)]
