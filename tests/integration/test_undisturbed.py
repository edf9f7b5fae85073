"""benchmarks/undisturbed.py puts a step together from the medians of its operations."""

from __future__ import annotations

import sys

import pytest
import torch

import runs

sys.path.append(str(runs.ROOT / "benchmarks"))

from undisturbed import MARK, PYTHON, Recording, undisturbed


def recorded(*pauses: tuple[float, float]) -> list[tuple[int, int, str]]:
    """Steps of Python, an outer operation, an inner one of 30 ns, and what is left of the outer.

    Each step is paused for so many ns before and within the inner operation.
    """
    now, events = 0, []

    def mark() -> None:
        nonlocal now
        events.append((now, now + 1, MARK))
        now += 1

    mark()
    for before, within in pauses:
        begin = now + 10
        inner = begin + 5 + before
        end = inner + 30 + within
        events += [(begin, end + 2, "outer"), (inner, end, "inner")]
        now = end + 6
        mark()
    return events


def test_pauses_of_the_host_are_left_out_of_the_sum():
    pauses = [(0, 500), (900, 0), (0, 0), (0, 0), (0, 0)]
    found = undisturbed(recorded(*pauses))
    expected = {PYTHON: 10 + 4, "outer": 5 + 2, "inner": 30}
    assert {name: round(1e9 * seconds) for name, seconds in found.items()} == expected


def test_a_step_with_other_operations_does_not_count():
    events = recorded((0, 0), (0, 0), (0, 0))
    extra = (events[-2][0] + 3, events[-2][0] + 4, "of the last step alone")
    assert set(undisturbed([*events, extra])) == {PYTHON, "outer", "inner"}
    with pytest.raises(ValueError, match="1 steps were recorded"):
        undisturbed(recorded((0, 0)))


def test_a_loop_is_recorded():
    a = torch.ones(8, 8)
    recording = Recording()
    for _ in range(3):
        (a @ a).relu()
        recording.mark()
    found = recording.end()
    assert {"aten::mm", "aten::relu", PYTHON} <= set(found)
    assert all(0 <= seconds < 1 for seconds in found.values())
