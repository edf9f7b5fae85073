"""What of a run's work is in its final model, from what each process logged of each step.

A log has a line for each step that a process computed: `step`, `begin` and `end` (seconds), `rows`
(an id for each sequence) and `loss`. Machines, restarts and lost disks do not touch it.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Computed:
    """A step as one process computed it."""

    step: int
    begin: float
    end: float
    rows: tuple[str, ...]
    loss: float


@dataclass(frozen=True)
class Work:
    """What became of a run's work."""

    useful_seconds: float
    """Of the steps in the final model, those of all processes together."""
    steps_lost: int
    """Steps that were computed once more, each time counted."""
    rows: Counter[str]
    """How often each row is in the final model."""
    last_loss: float
    """The training loss of the last step, the mean of its processes."""


def read_logs(folder: Path) -> list[Computed]:
    """All steps of all processes. A line that a kill cut short is none."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                content = json.loads(line)
                found.append(Computed(**{**content, "rows": tuple(content["rows"])}))
    return found


def executions(computed: Iterable[Computed]) -> dict[int, list[list[Computed]]]:
    """By step, its executions in their order, each with what its processes computed.

    Processes that compute a step together overlap in time.
    """
    found: defaultdict[int, list[list[Computed]]] = defaultdict(list)
    ends: dict[int, float] = {}
    for one in sorted(computed, key=lambda one: one.begin):
        if one.begin >= ends.get(one.step, float("-inf")):
            found[one.step].append([])
        found[one.step][-1].append(one)
        ends[one.step] = max(one.end, ends.get(one.step, one.end))
    return found


def work_of(computed: Iterable[Computed]) -> Work:
    """The work of a run that came to its end.

    A run that goes on from a snapshot computes the steps after it again: the last execution of a
    step is the one in the final model.
    """
    found = executions(computed)
    kept = [one for of_step in found.values() for one in of_step[-1]]
    last = [one.loss for one in found[max(found)][-1]]
    return Work(
        useful_seconds=sum(one.end - one.begin for one in kept),
        steps_lost=sum(len(of_step) - 1 for of_step in found.values()),
        rows=Counter(row for one in kept for row in one.rows),
        last_loss=sum(last) / len(last),
    )
