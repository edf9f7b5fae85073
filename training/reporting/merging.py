"""metrics.jsonl as it travels with its run: cut at a snapshot's step, and merged when fetched."""

from __future__ import annotations

import heapq
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.printable import printable
from config.schema import ConfigError
from snapshot.errors import SnapshotError
from store.records import LARGEST_BYTES, METRICS
from training.reporting.metrics import (
    KINDS,
    Record,
    as_line,
    figures_at,
    is_content,
    is_finite,
    place_after,
)

LONGEST_LINE, LONGEST_SAMPLE_LINE = 8_192, 65_536
NAME = re.compile(r"[a-z_][a-z_0-9]{0,39}")
Line = tuple[int, int, int, bytes]
"""Step, the place of its kind in `KINDS`, 0 for this disk or 1 for fetched, and the line itself."""


def metrics_up_to(path: Path, step: int) -> bytes:
    """The lines of the steps up to one, for an upload.

    Raises OSError, and ConfigError if the file is no metrics file or too long to be uploaded.
    """
    if not path.exists():
        return b""
    with open(path, "rb") as opened:
        end = place_after(opened, step)
        if end > LARGEST_BYTES[METRICS]:
            raise ConfigError(f"{path} has {end:,} bytes, over the limit of an upload")
        opened.seek(0)
        return opened.read(end)


def merge_metrics(path: Path, fetched: Path, step: int) -> None:
    """Add the lines of a fetched file that a metrics file lacks, up to `step`.

    Every step gets its lines once, preferably those of this disk. Holds only a few lines in memory.
    Raises SnapshotError if that holds no metrics; the file then stays as it is.
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


def _checked(fetched: Path, step: int) -> Iterator[Line]:
    """The lines of a fetched file up to a step, rewritten from their checked values."""
    newest, seen = 0, set[int]()
    with open(fetched, "rb") as opened:
        while line := opened.readline(LONGEST_SAMPLE_LINE):
            record = _record_in(line)
            if record is None or not line.endswith(b"\n"):
                raise SnapshotError(f"{fetched.name} holds a line that is not one of metrics")
            if record["step"] > step:
                return
            at, kind = record["step"], KINDS.index(record["event"])
            newest, seen = (newest, seen) if at == newest else (at, set())
            if at < newest or kind in seen:
                raise SnapshotError(f"{fetched.name} has step {at} twice")
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
