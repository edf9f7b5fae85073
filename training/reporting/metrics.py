"""metrics.jsonl: one JSON object a line, every step once, over all restarts of a run.

Steps only rise in it, so a start looks for its step from the end of the file. Between the figures
of the steps are lines on what happened to the run. The file travels with the run's store: what is
fetched from there is untrusted input.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from common.printable import printable
from config.schema import ConfigError
from snapshot.errors import SnapshotError
from store.records import LARGEST_BYTES

Record = dict[str, Any]
FIGURES = ("train", "eval", "sample")
"""The `event` of lines with figures, in the order in which a step adds them."""
EVENTS = ("start", "machine", "changed", "warning", "stop", "end")
"""The `event` of lines on what happened: time (UTC), attempt, event, step and text."""
BLOCK_BYTES = 1 << 20
"""Bytes that are read at once, from the end of a file back."""
HOLE = b"\0"
"""After a power loss a file may hold this where its content had not reached the disk."""
LINE = re.compile(rb'\{"event": "(train|eval)", "step": (\d+), "loss": (\d[\d.e+-]*)[,}]')
"""The beginning of a line as this file writes it; matching takes a fifth of the time of JSON."""
EVENT_LINE = b'{"time": '
"""The beginning of a line on what happened."""
MOST_EVENTS = 4_000
LONGEST_TEXT = 400
LONGEST_LINE = 65_536
NAME = re.compile(r"[a-z_][a-z_0-9]{0,39}")


def read_metrics(path: Path, after: int = 0) -> list[Record]:
    """The figures of the steps after one, as `figures_after` yields them."""
    return [*figures_after(path, after)]


def figures_after(path: Path, after: int) -> Iterator[Record]:
    """Yield the figures of the steps after one, in their order.

    Raises ConfigError that names the line when the file holds something else.
    """
    if not path.exists():
        return
    with open(path, "rb") as opened:
        begin = place_after(opened, after) if after else 0
        for end, line in lines_from(opened, begin):
            record = _parsed(opened, end, line)
            if record["event"] in FIGURES:
                yield record


def read_events(path: Path) -> list[Record]:
    """The newest lines on what happened to the run; none where the file cannot be read."""
    with suppress(OSError), open(path, "rb") as opened:
        events = (line for line in opened if line.startswith(EVENT_LINE))
        records = [record_in(line) for line in deque(events, MOST_EVENTS)]
        return [
            record | {"text": printable(record["text"])[:LONGEST_TEXT]}
            for record in records
            if record is not None and record["event"] in EVENTS
        ]
    return []


def held_out_at(path: Path, step: int) -> float | None:
    """The held-out loss of a step, or None where the file has none. Raises ConfigError."""
    for record in figures_after(path, step - 1):
        if record["step"] > step:
            break
        if record["event"] == "eval":
            return float(record["loss"])
    return None


def newest_step(path: Path) -> int | None:
    """The newest step of a metrics file; None if it has none. Raises OSError and ConfigError."""
    with open(path, "rb") as opened:
        begin = max(0, os.fstat(opened.fileno()).st_size - BLOCK_BYTES)
        records = [figures_of(opened, end, line) for end, line in lines_from(opened, begin)]
    return max((r["step"] for r in records if r["event"] in FIGURES), default=None)


def metrics_up_to(path: Path, step: int) -> bytes:
    """The lines of the steps up to one, for an upload.

    Raises OSError, and ConfigError if the file is no metrics file or too long to be uploaded.
    """
    if not path.exists():
        return b""
    with open(path, "rb") as opened:
        end = place_after(opened, step)
        if end > LARGEST_BYTES:
            raise ConfigError(f"{path} has {end:,} bytes, over the limit of an upload")
        return b"".join(line for at, line in lines_from(opened, 0) if at <= end)


def add_fetched(path: Path, fetched: Path, step: int) -> None:
    """Put fetched lines up to `step` into a metrics file, in the place of its own of these steps.

    Raises SnapshotError if that holds no metrics; the file then stays as it is.
    """
    partial = path.with_name(f"{path.name}.new")
    records = _checked(fetched, step)
    first = next((record["step"] for record in records if record["event"] in FIGURES), 1)
    try:
        with open(partial, "wb") as merged:
            if first > 1:
                merged.write(metrics_up_to(path, first - 1))
            merged.writelines(map(as_line, records))
            merged.flush()
            os.fsync(merged.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def place_after(opened: BinaryIO, step: int) -> int:
    """The offset in an opened metrics file where the lines up to `step` end, and events after them.

    Raises ConfigError for a line that is not a line of metrics.
    """
    begin = os.fstat(opened.fileno()).st_size
    while begin:
        begin = max(0, begin - BLOCK_BYTES)
        records = (figures_of(opened, end, line) for end, line in lines_from(opened, begin))
        if next((r["step"] for r in records if r["event"] in FIGURES), step + 1) <= step:
            break
    place = begin
    for end, line in lines_from(opened, begin):
        record = figures_of(opened, end, line)
        if record["event"] in FIGURES and record["step"] > step:
            break
        place = end
    return place


def lines_from(opened: BinaryIO, offset: int) -> Iterator[tuple[int, bytes]]:
    """The whole lines that begin at an offset or later, each with the offset of its end.

    Half a line at the end is left out, and so is what a power loss has damaged.
    """
    opened.seek(max(0, offset - 1))
    if offset:
        offset += len(opened.readline()) - 1
    while (line := opened.readline()).endswith(b"\n"):
        offset += len(line)
        if HOLE not in line or not line.isascii():  # it may be a file of another kind
            yield offset, line


def figures_of(opened: BinaryIO, end: int, line: bytes) -> Record:
    """Event, step and loss of a line; of a sample or of what happened, its text."""
    if (ours := LINE.match(line)) is not None:
        with suppress(ValueError):  # such as 1.2.3
            if _is_finite(loss := float(ours[3])):
                return {"event": ours[1].decode(), "step": int(ours[2]), "loss": loss}
    return _parsed(opened, end, line)


def _parsed(opened: BinaryIO, end: int, line: bytes) -> Record:
    if (record := record_in(line)) is not None:
        return record
    opened.seek(0)
    number = opened.read(end).count(b"\n")
    raise ConfigError(
        f"line {number} of {opened.name} is not a line of metrics. Remove it, or move the file "
        "out of run.dir; the run itself does not need it."
    )


def record_in(line: bytes) -> Record | None:
    """The record of an untrusted line; None if it is no line of metrics."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    event = record.get("event")
    if event in ("train", "eval"):
        is_whole = _is_finite(record.get("loss"))
    elif event == "sample":
        is_whole = isinstance(record.get("text"), str)
    else:
        texts = (record.get(name) for name in ("time", "attempt", "text"))
        is_whole = event in EVENTS and all(isinstance(text, str) for text in texts)
    return record if is_whole else None


def as_line(record: Record) -> bytes:
    """A record as a line of the file."""
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _checked(fetched: Path, step: int) -> list[Record]:
    """The records of a fetched file up to a step, without what could act on a terminal."""
    records, newest = [], 0
    with open(fetched, "rb") as opened:
        while line := opened.readline(LONGEST_LINE):
            record = record_in(line)
            if record is None or not line.endswith(b"\n") or not _is_plain(record):
                raise SnapshotError(f"{fetched.name} holds a line that is not one of metrics")
            if record["event"] in FIGURES:
                if record["step"] > step:
                    break
                if record["step"] < newest:
                    raise SnapshotError(f"{fetched.name} has step {record['step']} after {newest}")
                newest = record["step"]
            records.append(
                {
                    name: printable(value, multiline=name == "text")
                    if isinstance(value, str)
                    else value
                    for name, value in record.items()
                }
            )
    return records


def _is_plain(record: Record) -> bool:
    """Whether a record has plain names, and numbers, texts, true, false and null alone."""
    return all(
        NAME.fullmatch(name)
        and (value is None or isinstance(value, bool | str) or _is_finite(value))
        for name, value in record.items()
    )


def _is_finite(value: Any) -> bool:
    """Whether a value of untrusted JSON is a number that a float can hold."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


class MetricsFile:
    """Appends lines. If the disk refuses them, they wait for the next write."""

    def __init__(self, path: Path, step: int) -> None:
        """Continue a file after `step`; the run repeats the later lines.

        The file is truncated in place, so that after a kill at any moment it has the lines up to
        `step`. Raises OSError where it is not writable, ConfigError where it is no metrics file.
        """
        self.path = path
        self._lock = Lock()  # the loop and the thread that writes a snapshot both use the file
        self.waiting = bytearray()
        self.fault: str | None = None
        """Why the last write failed; None if it succeeded."""
        with open(path, "a+b") as opened:
            self.size = opened.truncate(place_after(opened, step))

    def append(self, records: Iterable[Record]) -> None:
        """Add lines. Those that the disk refuses wait."""
        with self._lock:
            self._append(b"".join(map(as_line, records)))

    def _append(self, lines: bytes) -> None:
        self.waiting += lines
        try:
            # "a" creates the file again where somebody removed it, and continues a truncated one.
            with open(self.path, "ab") as opened:
                if self.waiting and opened.tell() > self.size:
                    opened.truncate(self.size)  # half a line, where the last write failed
                self.size = min(self.size, opened.tell())
                opened.write(self.waiting)
        except OSError as error:
            self.fault = f"{self.path}: {error.strerror}"
            return
        self.size += len(self.waiting)
        self.waiting.clear()
        self.fault = None

    def flush(self) -> None:
        """Write all lines to the disk. Raises OSError when it refuses them."""
        with self._lock:
            self._append(b"")
            if self.waiting:
                raise OSError(self.fault)
        with open(self.path, "rb") as opened:
            os.fsync(opened.fileno())
