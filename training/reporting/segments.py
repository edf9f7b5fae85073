"""metrics.jsonl as the repo of a run holds it: cut into segments, and merged when fetched."""

from __future__ import annotations

import heapq
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from common.printable import printable
from snapshot.errors import SnapshotError
from store.records import SEGMENT_STEPS, segment_path
from training.reporting.metrics import (
    KINDS,
    Record,
    as_line,
    figures_at,
    is_content,
    is_finite,
    place_after,
)

MOST_SEGMENTS = 16
"""Most segments of one upload. A long run that begins to upload late needs several uploads."""
LONGEST_LINE, LONGEST_SAMPLE_LINE = 8_192, 65_536
NAME = re.compile(r"[a-z_][a-z_0-9]{0,39}")
Line = tuple[int, int, int, bytes]
"""Step, the place of its kind in `KINDS`, 0 for this disk or 1 for fetched, and the line itself."""


def segments(path: Path, after: int, step: int) -> tuple[dict[str, bytes], int]:
    """The segments with lines after step `after` up to `step`, by their path in a repo.

    Also returns the last step of these segments, because all may be too many for one upload. The
    lines of `after` itself are included, because its evaluation may be newer. Raises OSError, and
    ConfigError if the file is no metrics file.
    """
    if not path.exists() or step < 1:
        return {}, after
    numbers = list(range(max(0, after - 1) // SEGMENT_STEPS, (step - 1) // SEGMENT_STEPS + 1))
    reached = step
    if len(numbers) > MOST_SEGMENTS:
        reached = numbers[MOST_SEGMENTS - 1] * SEGMENT_STEPS
        numbers = [*numbers[: MOST_SEGMENTS - 1], numbers[-1]]
    found = {}
    with open(path, "rb") as opened:
        for number in numbers:
            begin = place_after(opened, number * SEGMENT_STEPS)
            end = place_after(opened, min((number + 1) * SEGMENT_STEPS, step), begin)
            opened.seek(begin)
            if end > begin:
                found[segment_path(number * SEGMENT_STEPS + 1)] = opened.read(end - begin)
    return found, reached


def merge_metrics(path: Path, fetched: Iterable[Path], step: int) -> None:
    """Add the lines of fetched segments that a metrics file lacks, up to `step`.

    Every step gets its lines once, preferably those of this disk. Holds only a few lines in memory.
    Raises SnapshotError if the segments are not metrics; the file then stays as it is.
    """
    partial = path.with_name(f"{path.name}.new")
    newest, seen = 0, set[int]()
    try:
        with open(partial, "wb") as merged:
            for at, kind, _, line in heapq.merge(_own(path, step), _checked(fetched, step)):
                newest, seen = (newest, seen) if at == newest else (at, set())
                if kind not in seen:
                    merged.write(line)
                seen.add(kind)
            merged.flush()
            os.fsync(merged.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _own(path: Path, step: int) -> Iterator[Line]:
    if not path.exists():
        return
    with open(path, "rb") as opened:
        end = place_after(opened, step)
        opened.seek(0)
        at = 0
        while at < end:
            line = opened.readline()
            figures = figures_at(opened, at, line)
            at += len(line)
            yield figures["step"], KINDS.index(figures["event"]), 0, line


def _checked(fetched: Iterable[Path], step: int) -> Iterator[Line]:
    """The lines of fetched segments up to a step, rewritten from their checked values."""
    newest, seen = 0, set[int]()
    for path in fetched:
        with open(path, "rb") as opened:
            while line := opened.readline(LONGEST_SAMPLE_LINE):
                record = _record_in(line)
                if record is None or not line.endswith(b"\n"):
                    raise SnapshotError(f"{path.name} holds a line that is not one of metrics")
                if record["step"] > step:
                    return
                at, kind = record["step"], KINDS.index(record["event"])
                newest, seen = (newest, seen) if at == newest else (at, set())
                if at < newest or kind in seen:
                    raise SnapshotError(f"{path.name} has step {at} twice")
                seen.add(kind)
                yield at, kind, 1, as_line(record)


def _record_in(line: bytes) -> Record | None:
    """The record of a line; None if it is no line of metrics."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    if not is_content(record) or (record["event"] != "sample" and len(line) > LONGEST_LINE):
        return None
    if any(NAME.fullmatch(name) is None or not _is_value(v) for name, v in record.items()):
        return None
    return {
        name: printable(v, multiline=name == "text") if isinstance(v, str) else v
        for name, v in record.items()
    }


def _is_value(value: Any) -> bool:
    return value is None or isinstance(value, bool | str) or is_finite(value)
