"""metrics.jsonl: one JSON object a line, every step once, over all restarts of a run.

Steps only rise in it. Between the figures of the steps are lines on what happened to the run. The
file travels with the run's store: what is fetched from there is untrusted input.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from threading import Lock
from typing import Any

from common.printable import printable, redact_urls
from config.schema import ConfigError
from snapshot.disk.folder import write_whole
from store.latest import LARGEST_METRICS_BYTES, utc

Record = dict[str, Any]
FIGURES = {"train": ("loss",), "eval": ("loss",), "sample": ("text",)}
"""The `event` of lines with figures, in the order in which a step adds them, and what they have."""
EVENTS = ("start", "machine", "changed", "stop", "end", "warning")
"""The `event` of lines on what happened: time (UTC), attempt, event, step and text."""
PATH = re.compile(r"[~\w.:-]*[/\\]")
"""How a folder or an address begins in a text."""
TAIL_BYTES = 65_536
"""How much of the end of a file is read first."""
LONGEST_TEXT = 400
LONGEST_LINE = 65_536


def scan(path: Path, begin: int = 0, start: bytes = b"") -> Iterator[tuple[int, Record]]:
    """The whole lines of a file that may be untrusted: where each ends, and its record.

    A line has an empty record if it is not one of metrics, as after a power loss, or does not have
    this `start`: parsing takes most of the time. Half a line at the end is left out.
    """
    if not path.exists():
        return
    with open(path, "rb") as opened:
        end = opened.seek(begin)
        while line := opened.readline(LONGEST_LINE):
            end += len(line)
            if line.endswith(b"\n"):
                yield end, _record_in(line) if line.startswith(start) else {}


def tail_of(path: Path, step: int) -> int:
    """Where to begin to read what comes after a step, without the long run before it.

    That is a line of at most that step near the end of the file; 0 if there is none.
    """
    size, length = path.stat().st_size if path.exists() else 0, TAIL_BYTES
    while length < size:
        begin = size - length  # most likely within a line
        for end, record in scan(path, begin):
            if is_figure(record):
                if record["step"] <= step:
                    return begin
                break
            begin = end
        length *= 4
    return 0


def is_figure(record: Record) -> bool:
    """Whether a line has figures of a step."""
    return record.get("event") in FIGURES


def read_metrics(path: Path) -> list[Record]:
    """The figures of all steps, in their order."""
    return [record for _, record in scan(path) if is_figure(record)]


def held_out_losses(path: Path, since: int = 0) -> dict[int, float]:
    """The held-out losses of a step and those after it, by step."""
    return {
        record["step"]: float(record["loss"])
        for _, record in scan(path, tail_of(path, since - 1), b'{"event": "eval"')
        if is_figure(record) and record["step"] >= since
    }


def newest_step(path: Path) -> int:
    """The newest step of a metrics file; 0 if it has none."""
    records = (record for _, record in scan(path, tail_of(path, sys.maxsize)))
    return max((record["step"] for record in records if is_figure(record)), default=0)


def end_of(path: Path, step: int) -> int:
    """Where the lines of the steps up to one end, and those of what happened then."""
    end = tail_of(path, step)
    for line_end, record in scan(path, end):
        if is_figure(record) and record["step"] > step:
            break
        end = line_end
    return end


def metrics_up_to(path: Path, step: int) -> bytes:
    """The lines of the steps up to one, for an upload.

    Raises OSError, and ConfigError if the file is too long to be uploaded.
    """
    if (size := end_of(path, step)) > LARGEST_METRICS_BYTES:
        raise ConfigError(f"{path} has {size:,} bytes, over the limit of an upload")
    return path.read_bytes()[:size] if size else b""


def add_fetched(path: Path, fetched: Path, step: int) -> None:
    """Put fetched lines up to `step` into a metrics file, in the place of its own of these steps.

    Whatever in the fetched file is not a line of metrics is left out.
    """
    records = [record for _, record in scan(fetched) if record]
    first = next((record["step"] for record in records if is_figure(record)), step + 1)
    before = metrics_up_to(path, first - 1) if first > 1 else b""
    in_time = takewhile(lambda record: not is_figure(record) or record["step"] <= step, records)
    write_whole(path, b"".join([before, *map(as_line, in_time)]))


def _record_in(line: bytes) -> Record:
    """The record of an untrusted line; empty if it is not a line of metrics."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return {}
    event = record.get("event")
    needed = FIGURES.get(str(event), ("time", "attempt", "text"))
    kinds = (int, float) if "loss" in needed else (str,)
    is_whole = all(type(record.get(name)) in kinds for name in needed)
    is_flat = all(map(_is_plain, record.values()))
    return record if is_whole and is_flat and event in (*FIGURES, *EVENTS) else {}


def _is_plain(value: Any) -> bool:
    """Whether a value of untrusted JSON is a text, true, false, null or a number for a float."""
    is_number = type(value) in (int, float) and abs(value) <= sys.float_info.max
    return value is None or isinstance(value, bool | str) or is_number


def as_line(record: Record) -> bytes:
    """A record as a line of the file."""
    return json.dumps(record, allow_nan=False).encode() + b"\n"


class MetricsFile:
    """Appends lines. If the disk refuses them, they wait for the next write."""

    def __init__(self, path: Path, step: int, attempt_id: str = "") -> None:
        """Continue a file after `step`; the run repeats the later lines.

        The file is truncated in place, so that after a kill at any moment it has the lines up to
        `step`. Raises OSError where it is not writable.
        """
        self.path, self._attempt = path, attempt_id[:8]
        self._lock = Lock()  # the loop and the thread that writes a snapshot both use the file
        self.waiting = bytearray()
        self.fault: str | None = None
        """Why the last write failed; None if it succeeded."""
        with open(path, "ab") as opened:
            self.size = opened.truncate(end_of(path, step))

    def append(self, records: Iterable[Record]) -> None:
        """Add lines. Those that the disk refuses wait."""
        with self._lock:
            self._append(b"".join(map(as_line, records)))

    def add_event(self, event: str, step: int, text: str = "") -> None:
        """Add what happened to the run, one of `EVENTS`. Any thread may call this.

        Others may read the file: a warning ends before the first path in it, and no other text has
        one.
        """
        if event == "warning":
            text = PATH.split(text)[0].rstrip(" '(\"")
        line = {
            "time": utc(),
            "attempt": self._attempt,
            "event": event,
            "step": step,
            "text": printable(redact_urls(text))[:LONGEST_TEXT],
        }
        self.append([line])

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
