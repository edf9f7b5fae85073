"""metrics.jsonl: one JSON object a line, every step once, over all restarts of a run.

Steps only rise in it. A start looks for its step from the end of the file, where few lines follow.
Between the figures of the steps are lines on what happened to the run (store/events.py). The file
travels with the store of its run; what is fetched from there is untrusted input.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from common.printable import printable
from config.schema import ConfigError
from snapshot.errors import SnapshotError
from store.events import KINDS as EVENTS
from store.events import event_in
from store.records import LARGEST_BYTES

Record = dict[str, Any]
KINDS = ("train", "eval", "sample")
"""The kinds of lines with figures, in the order in which a step adds them."""
BLOCK_BYTES = 1 << 20
"""Bytes that are read at once, from the end of a file back."""
HOLE = b"\0"
"""After a power loss a file may hold this where its content had not reached the disk."""
LINE = re.compile(rb'\{"event": "(train|eval)", "step": (\d+), "loss": (\d[\d.e+-]*)[,}]')
"""The beginning of a line as this file writes it; matching takes a fifth of the time of JSON."""
LONGEST_LINE, LONGEST_SAMPLE_LINE = 8_192, 65_536
NAME = re.compile(r"[a-z_][a-z_0-9]{0,39}")


def read_metrics(path: Path, after: int = 0) -> list[Record]:
    """The figures of the steps after one, without a last line that was cut short.

    Raises ConfigError that names the line when the file holds something else.
    """
    if not path.exists():
        return []
    with open(path, "rb") as opened:
        begin = place_after(opened, after) if after else 0
        lines = [(at, line) for at, line in lines_from(opened, begin) if line.endswith(b"\n")]
        records = [_parsed(opened, at, line) for at, line in lines]
        return [record for record in records if record["event"] in KINDS]


def held_out_at(path: Path, step: int) -> float | None:
    """The held-out loss of a step, or None where the file has none. Raises ConfigError."""
    records = _records_of(path, step)
    return next((float(r["loss"]) for r in records if r["event"] == "eval"), None)


def has_step(path: Path, step: int) -> bool:
    """Whether a metrics file has lines of a step. Raises ConfigError as `place_after` does."""
    return bool(_records_of(path, step))


def newest_step(path: Path) -> int | None:
    """The newest step of a metrics file; None if it has none. Raises OSError and ConfigError."""
    with open(path, "rb") as opened:
        begin = max(0, os.fstat(opened.fileno()).st_size - BLOCK_BYTES)
        lines = [one for one in lines_from(opened, begin) if not _is_lost(one[1])]
        return max((_step_at(opened, *line) for line in lines), default=0) or None


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
        opened.seek(0)
        return opened.read(end)


def add_fetched(path: Path, fetched: Path, step: int) -> None:
    """Put fetched lines up to `step` into a metrics file, in the place of its own of these steps.

    Raises SnapshotError if that holds no metrics; the file then stays as it is.
    """
    partial = path.with_name(f"{path.name}.new")
    first = next((at for at, _ in _checked(fetched, step) if at), 1)
    try:
        with open(partial, "wb") as merged:
            if first > 1:
                merged.write(metrics_up_to(path, first - 1))
            for _, line in _checked(fetched, step):
                merged.write(line)
            merged.flush()
            os.fsync(merged.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def place_after(opened: BinaryIO, step: int) -> int:
    """The offset in an opened metrics file where the lines up to `step` end, and events after them.

    Half a line may follow, or the remains of lines that a power loss kept from the disk. Raises
    ConfigError for a line that is not a line of metrics.
    """
    begin = os.fstat(opened.fileno()).st_size
    while begin:
        begin = max(0, begin - BLOCK_BYTES)
        lines = lines_from(opened, begin)
        steps = (_step_at(opened, at, line) for at, line in lines if not _is_lost(line))
        if next(filter(None, steps), step + 1) <= step:
            begin = next(lines_from(opened, begin))[0]
            break
    place, lost = begin, None
    for at, line in lines_from(opened, begin):
        if _is_lost(line):
            lost = lost or (at, line)
            continue
        record = figures_at(opened, at, line)
        is_event = record["event"] in EVENTS
        if not is_event and record["step"] > step:
            break
        if lost is None:
            place = at + len(line)
        # Evaluation and sample of the step follow its snapshot, and are repeated.
        elif not is_event and (record["step"], record["event"] != "train") <= (step, False):
            _parsed(opened, *lost)
    return place


def _step_at(opened: BinaryIO, at: int, line: bytes) -> int:
    """The step of a line with figures; 0 of an event."""
    record = figures_at(opened, at, line)
    return 0 if record["event"] in EVENTS else int(record["step"])


def lines_from(opened: BinaryIO, offset: int) -> Iterator[tuple[int, bytes]]:
    """The lines that begin at an offset or later, and where they begin."""
    opened.seek(max(0, offset - 1))
    if offset:
        offset += len(opened.readline()) - 1
    while line := opened.readline():
        yield offset, line
        offset += len(line)


def _records_of(path: Path, step: int) -> list[Record]:
    """The figures of a step, up to the first line that a power loss has damaged."""
    if not path.exists():
        return []
    records = []
    with open(path, "rb") as opened:
        for at, line in lines_from(opened, place_after(opened, step - 1)):
            if _is_lost(line):
                break
            record = figures_at(opened, at, line)
            if record["event"] in EVENTS:
                continue
            if record["step"] > step:
                break
            records.append(record)
    return records


def _is_lost(line: bytes) -> bool:
    """Whether a line is not whole: its end was not written, or not before a power loss."""
    return not line.endswith(b"\n") or (HOLE in line and line.isascii())


def _checked(fetched: Path, step: int) -> Iterator[tuple[int, bytes]]:
    """Step (0 for an event) and line of a fetched file, rewritten from their checked values."""
    newest, seen = 0, set[str]()
    with open(fetched, "rb") as opened:
        while line := opened.readline(LONGEST_SAMPLE_LINE):
            if (event := event_in(line)) is not None:
                yield 0, as_line(event)
                continue
            record = _record_in(line)
            if record is None or not line.endswith(b"\n"):
                raise SnapshotError(f"{fetched.name} holds a line that is not one of metrics")
            at, kind = record["step"], record["event"]
            if at > step:
                return
            newest, seen = (newest, seen) if at == newest else (at, set())
            if at < newest or kind in seen:
                raise SnapshotError(f"{fetched.name} has step {at} twice")
            seen.add(kind)
            yield at, as_line(record)


def _record_in(line: bytes) -> Record | None:
    """The record of an untrusted line; None if it is no line of metrics."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    if not is_content(record) or record["event"] in EVENTS:
        return None
    if record["event"] != "sample" and len(line) > LONGEST_LINE:
        return None
    if any(NAME.fullmatch(name) is None or not _is_value(v) for name, v in record.items()):
        return None
    return {
        name: printable(v, multiline=name == "text") if isinstance(v, str) else v
        for name, v in record.items()
    }


def _is_value(value: Any) -> bool:
    return value is None or isinstance(value, bool | str) or is_finite(value)


def as_line(record: Record) -> bytes:
    """A record as a line of the file."""
    return json.dumps(record, allow_nan=False).encode() + b"\n"


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


def figures_at(opened: BinaryIO, begin: int, line: bytes) -> Record:
    """Event, step and loss of a line; of a sample or an event, its text."""
    if (ours := LINE.match(line)) is not None:
        with suppress(ValueError):  # such as 1.2.3
            if is_finite(loss := float(ours[3])):
                return {"event": ours[1].decode(), "step": int(ours[2]), "loss": loss}
    return _parsed(opened, begin, line)


def is_content(record: Record) -> bool:
    """Whether a record of untrusted JSON has what a line of its kind is about: loss or text."""
    if record.get("event") in ("sample", *EVENTS):
        return isinstance(record.get("text"), str)
    return record.get("event") in KINDS and is_finite(record.get("loss"))


def is_finite(value: Any) -> bool:
    """Whether a value of untrusted JSON is a number that a float can hold."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _parsed(opened: BinaryIO, begin: int, line: bytes) -> Record:
    try:
        record = json.loads(line.decode())
        known = isinstance(record, dict) and type(record.get("step")) is int
        known = known and is_content(record)
    except (ValueError, RecursionError):
        known = False
    if known:
        return record
    number = 1 + sum(1 for at, _ in lines_from(opened, 0) if at < begin)
    raise ConfigError(
        f"line {number} of {opened.name} is not a line of metrics. Remove it, or move the file "
        "out of run.dir; the run itself does not need it."
    )
