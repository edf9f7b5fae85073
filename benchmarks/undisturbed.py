"""The time of a training step, put together from the medians of its parts.

The host of a shared virtual machine may stop it for tenths of a second, many times a second. Whole
steps are then disturbed nearly always, their operations seldom. So steps are recorded with
torch.profiler and cut at the begin and end of every operation; of each piece the median over
the steps is taken, and their sum is the time of a step that nothing disturbed. Pieces outside of
all operations are work of Python. Recording costs about a microsecond for each operation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import ExitStack
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

MARK = "end of a step"
PYTHON = "Python"


class Recording:
    """Records steps of a loop in this process, on the CPU."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.profile = self.stack.enter_context(profile(activities=[ProfilerActivity.CPU]))
        self.mark()

    def mark(self) -> None:
        """The end of a step."""
        with record_function(MARK):
            pass

    def end(self) -> dict[str, float]:
        """Undisturbed seconds a step, for each operation; {"Python": s, "aten::mm": s, ...}.

        Raises:
            ValueError: no two of the recorded steps have the same operations.
        """
        self.stack.close()
        results = self.profile.profiler.kineto_results
        events = [
            (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
            for event in results.events()
        ]
        return undisturbed(events)


def undisturbed(events: list[tuple[int, int, str]]) -> dict[str, float]:
    """Seconds a step by operation, of events (begin, end, name) in ns; see `Recording.end`."""
    steps = [pieces(step) for step in split(events)]
    operations = Counter(tuple(name for name, _ in step) for step in steps)
    names, count = operations.most_common(1)[0]
    if count < 2:
        raise ValueError(f"{len(steps)} steps were recorded, and no two have the same operations")
    alike = [step for step in steps if tuple(name for name, _ in step) == names]
    seconds: dict[str, float] = defaultdict(float)
    for index, name in enumerate(names):
        values = sorted(step[index][1] for step in alike)
        seconds[name] += values[len(values) // 2] / 1e9
    return dict(seconds)


def split(events: list[tuple[int, int, str]]) -> list[list[tuple[int, int, str]]]:
    """The events between each two marks; the marks' own time belongs to no step."""
    # Of two that begin together, the outer one comes first: the one that ends last.
    events = sorted(events, key=lambda event: (event[0], -event[1]))
    steps: list[list[tuple[int, int, str]]] = []
    for event in events:
        if event[2] == MARK:
            if steps:
                steps[-1].append((event[0], event[0], PYTHON))
            steps.append([(event[1], event[1], PYTHON)])
        elif steps:
            steps[-1].append(event)
    return steps[:-1]


def pieces(step: list[tuple[int, int, str]]) -> list[tuple[str, float]]:
    """(innermost operation, ns) for all times of a step, in order."""
    result: list[tuple[str, float]] = []
    running: list[tuple[int, str]] = []
    now = step[0][0]

    def go_to(when: int) -> None:
        nonlocal now
        result.append((running[-1][1] if running else PYTHON, max(0, when - now)))
        now = max(now, when)

    for begin, end, name in step:
        while running and running[-1][0] <= begin:
            go_to(running[-1][0])
            running.pop()
        go_to(begin)
        running.append((end, name))
    return result


def total(seconds: dict[str, float]) -> float:
    return sum(seconds.values())


def largest(seconds: dict[str, float], count: int = 12) -> list[dict[str, Any]]:
    """The operations that take most of a step: their names, seconds and shares."""
    ranked = sorted(seconds.items(), key=lambda item: -item[1])[:count]
    return [
        {"operation": name, "seconds": value, "share": value / total(seconds)}
        for name, value in ranked
    ]
