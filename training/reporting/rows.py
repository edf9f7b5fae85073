"""A run as rows for a tracker, one a step: the figures of its metrics, its samples, its events."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any

from snapshot.start import METRICS
from store.records import EVENTS
from training.reporting.events import Event, read_events
from training.reporting.metrics import Record, read_after
from training.reporting.samples import read_samples

MOST_BYTES = 4 << 20
"""Of metrics.jsonl that are read at once."""
Row = tuple[int, dict[str, Any]]
"""A step, and its figures and texts by name."""


class Rows:
    """The rows of a run's directory, each once, as the run adds them."""

    def __init__(self, run_dir: Path, step: int, event: Event | None) -> None:
        """Begin after `step`, and after `event` of events.jsonl."""
        self.step, self.event = step, event
        self._run_dir = run_dir

    def next(self, complete: bool) -> Iterator[Row]:
        """The rows since the last one, but the newest unless the run is `complete`.

        The evaluation of a step comes after its other figures, so a step is known when the next one
        has begun. Raises OSError, and ConfigError where the file holds no metrics.
        """
        at_end = False
        while not at_end:
            records, at_end = read_after(self._run_dir / METRICS, self.step, MOST_BYTES)
            steps = [(step, list(of_it)) for step, of_it in groupby(records, itemgetter("step"))]
            known = steps if complete and at_end else steps[:-1]
            samples, events = read_samples(self._run_dir), read_events(self._run_dir / EVENTS)
            for step, found in known:
                row = figures_of(found)
                if step in samples:
                    row["sample"] = samples[step]
                self.step = step
                if new := self._events_up_to(step, events):
                    texts = [f"{one['time']} {one['event']} {one['text']}".rstrip() for one in new]
                    row["events"] = "\n".join(texts)
                    self.event = new[-1]
                yield step, row

    def _events_up_to(self, step: int, events: list[Event]) -> list[Event]:
        """The next events, in their order, before one of a later step."""
        begin = events.index(self.event) + 1 if self.event in events else 0
        return list(takewhile(lambda one: one["step"] <= step, events[begin:]))


def figures_of(records: list[Record]) -> dict[str, Any]:
    """The figures of the lines of one step: train/loss, eval/loss, ..."""
    return {
        f"{record['event']}/{name}": float(value) if isinstance(value, bool) else value
        for record in records
        for name, value in record.items()
        if name not in ("event", "step") and isinstance(value, int | float)
    }
