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
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

from common.printable import printable, redact_urls
from config.schema import ConfigError
from snapshot.disk.folder import write_whole
from snapshot.errors import SnapshotError
from store.latest import LARGEST_METRICS_BYTES

Record = dict[str, Any]
FIGURES = ("train", "eval", "sample")
"""The `event` of lines with figures, in the order in which a step adds them."""
EVENTS = ("start", "machine", "changed", "stop", "end", "warning")
"""The `event` of lines on what happened: time (UTC), attempt, event, step and text."""
PATH = re.compile(r"[~\w.:-]*[/\\]")
"""How a folder or an address begins in a text."""
HOLE = b"\0"
"""After a power loss a file may hold this where its content had not reached the disk."""
LINE = re.compile(rb'\{"event": "(train|eval)", "step": (\d+), "loss": (\d[\d.e+-]*)[,}]')
"""The beginning of a line as this file writes it; matching takes a fifth of the time of JSON."""
LONGEST_TEXT = 400
LONGEST_LINE = 65_536
NAME = re.compile(r"[a-z_][a-z_0-9]{0,39}")


def scan(path: Path) -> Iterator[tuple[int, bytes, Record]]:
    """The whole lines of a file: where each ends, the line, and its event, step and loss or text.

    Half a line at the end is left out, and so is what a power loss has damaged. No lines if there
    is no file. Raises ConfigError that names the line when the file holds something else.
    """
    if not path.exists():
        return
    end = 0
    with open(path, "rb") as opened:
        for number, line in enumerate(opened, 1):
            end += len(line)
            if not line.endswith(b"\n"):
                return
            if HOLE in line and line.isascii():  # otherwise it may be a file of another kind
                continue
            if (record := _figures_in(line) or record_in(line)) is None:
                raise _not_metrics(f"line {number}", path)
            yield end, line, record


def _not_metrics(line: str, path: Path) -> ConfigError:
    return ConfigError(
        f"{line} of {path} is not a line of metrics. Remove it, or move the file out of run.dir; "
        "the run itself does not need it."
    )


def read_metrics(path: Path, after: int = -1) -> list[Record]:
    """The figures of the steps after one, in their order. Raises ConfigError as `scan` does."""
    records = []
    for _, line, found in scan(path):
        if found["event"] in FIGURES and found["step"] > after:
            if (record := record_in(line)) is None:  # `scan` has read its beginning alone
                raise _not_metrics(f"the line of step {found['step']}", path)
            records.append(record)
    return records


def read_events(path: Path) -> list[Record]:
    """The lines on what happened to the run, as far as the file can be read."""
    events = []
    with suppress(OSError, ConfigError):
        for _, _, record in scan(path):
            if record["event"] in EVENTS:
                events.append(record | {"text": printable(record["text"])[:LONGEST_TEXT]})
    return events


def held_out_losses(path: Path) -> dict[int, float]:
    """The held-out losses in a file, by step. Raises ConfigError."""
    return {r["step"]: float(r["loss"]) for _, _, r in scan(path) if r["event"] == "eval"}


def newest_step(path: Path) -> int | None:
    """The newest step of a metrics file; None if it has none. Raises OSError and ConfigError."""
    return max((r["step"] for _, _, r in scan(path) if r["event"] in FIGURES), default=None)


def lines_up_to(path: Path, step: int) -> Iterator[tuple[int, bytes]]:
    """The lines of the steps up to one, and of what happened then, each with where it ends."""
    for end, line, record in scan(path):
        if record["event"] in FIGURES and record["step"] > step:
            return
        yield end, line


def metrics_up_to(path: Path, step: int) -> bytes:
    """The lines of the steps up to one, for an upload.

    Raises OSError, and ConfigError if the file is no metrics file or too long to be uploaded.
    """
    content = b"".join(line for _, line in lines_up_to(path, step))
    if len(content) > LARGEST_METRICS_BYTES:
        raise ConfigError(f"{path} has {len(content):,} bytes, over the limit of an upload")
    return content


def add_fetched(path: Path, fetched: Path, step: int) -> None:
    """Put fetched lines up to `step` into a metrics file, in the place of its own of these steps.

    Raises SnapshotError if that holds no metrics; the file then stays as it is.
    """
    records = _checked(fetched, step)
    first = next((record["step"] for record in records if record["event"] in FIGURES), 1)
    before = metrics_up_to(path, first - 1) if first > 1 else b""
    write_whole(path, b"".join([before, *map(as_line, records)]))


def _figures_in(line: bytes) -> Record | None:
    """Event, step and loss of a line as this file writes it; None for any other."""
    if (ours := LINE.match(line)) is not None:
        with suppress(ValueError):  # such as 1.2.3
            if _is_finite(loss := float(ours[3])):
                return {"event": ours[1].decode(), "step": int(ours[2]), "loss": loss}
    return None


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
        with open(path, "ab") as opened:
            ends = (end for end, _ in lines_up_to(path, step))
            self.size = opened.truncate(max(ends, default=0))

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


class Events:
    """Adds to metrics.jsonl what happens to a run.

    The file travels with the run's store, which others may read: a warning ends before the first
    path in it, and no other text has one.
    """

    def __init__(self, metrics: MetricsFile, attempt_id: str) -> None:
        self._metrics, self._attempt = metrics, attempt_id[:8]

    def add(self, event: str, step: int, text: str = "") -> None:
        """Add an event, one of `EVENTS`. Any thread may call this."""
        if event == "warning":
            text = PATH.split(text)[0].rstrip(" '(\"")
        line = {
            "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "attempt": self._attempt,
            "event": event,
            "step": step,
            "text": printable(redact_urls(text))[:LONGEST_TEXT],
        }
        self._metrics.append([line])
