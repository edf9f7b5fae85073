"""events.jsonl and samples.jsonl: what happened to a run, and the texts that it generated.

Both have one JSON object a line. An event has time (UTC), attempt, event, step and text. The file
travels with the repo of the run, which others may read, so its texts name no folders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path, PurePath
from threading import Lock
from typing import Any

from data.printable import printable, redact_urls
from snapshot.disk.files import write_whole

MOST_BYTES = 4 << 20
"""Enough for thousands of events or samples."""
Event = dict[str, Any]
KINDS = ("start", "machine", "changed", "warning", "stop", "end")
MOST_EVENTS = 4_000
LONGEST_TEXT = 400
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
ATTEMPT = re.compile("[0-9a-f]{8}")
FOLDERS = re.compile(r"\S*/")
SAMPLES = "samples.jsonl"


class Events:
    """Appends the events of an attempt. A disk that refuses one costs that event, not the run."""

    def __init__(self, path: Path, attempt_id: str, places: Iterable[str] = ()) -> None:
        """No text shows `places`, which are paths of this machine."""
        self.path, self._attempt = path, attempt_id[:8]
        self._folders = _folders_of(places)
        self._lock = Lock()  # warnings come from several threads

    def add(self, event: str, step: int, text: str = "") -> None:
        """Add an event, one of `KINDS`."""
        assert event in KINDS, event
        line = {
            "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "attempt": self._attempt,
            "event": event,
            "step": step,
            "text": self._shown(text),
        }
        with self._lock, suppress(OSError), open(self.path, "a", encoding="utf-8") as opened:
            opened.write(f"{json.dumps(line)}\n")

    def has_warning(self, text: str) -> bool:
        """Whether the newest events have a warning with this text, of any attempt."""
        shown = self._shown(text)
        newest = read_events(self.path)
        return any(event["event"] == "warning" and event["text"] == shown for event in newest)

    def _shown(self, text: str) -> str:
        return self._without_folders(printable(redact_urls(text)))[:LONGEST_TEXT]

    def _without_folders(self, text: str) -> str:
        for folder in self._folders:
            text = text.replace(f"{folder}/", "").replace(folder, PurePath(folder).name)
        return FOLDERS.sub("", text)

    def merge(self, fetched: bytes) -> None:
        """Add the events of other machines, in the order of their times. Raises OSError."""
        with self._lock:
            events = [*parse_events(fetched), *read_events(self.path)]
            lines = {json.dumps(event) for event in events}
            ordered = sorted(map(json.loads, lines), key=_time_and_place)
            write_whole(self.path, as_text(ordered[-MOST_EVENTS:]))


def read_events(path: Path) -> list[Event]:
    """The newest events of a file; none where it cannot be read."""
    return parse_events(newest_lines(path))


def parse_events(content: bytes) -> list[Event]:
    """The newest events among the lines of untrusted content."""
    events = map(_event_in, content.splitlines()[-MOST_EVENTS:])
    return [event for event in events if event is not None]


def as_text(events: list[Event]) -> str:
    """Events as the lines of a file."""
    return "".join(f"{json.dumps(event)}\n" for event in events)


def _event_in(line: bytes) -> Event | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    names = ("time", "attempt", "event", "step", "text")
    if not isinstance(found, dict) or set(found) != set(names) or type(found["step"]) is not int:
        return None
    if any(type(found[name]) is not str for name in names if name != "step"):
        return None
    known = found["event"] in KINDS and 0 <= found["step"] < 10**13
    if not known or not (TIME.fullmatch(found["time"]) and ATTEMPT.fullmatch(found["attempt"])):
        return None
    return {name: found[name] for name in names} | {"text": printable(found["text"])[:LONGEST_TEXT]}


def _time_and_place(event: Event) -> tuple[str, str, int, int]:
    return event["time"], event["attempt"], event["step"], KINDS.index(event["event"])


def _folders_of(places: Iterable[str]) -> list[str]:
    """The folders of paths, as written and as absolute paths, the longest first."""
    found: set[str] = set()
    for place in filter(None, places):
        for path in (PurePath(place), Path(place).expanduser().absolute()):
            found.update(str(folder) for folder in (path, *path.parents) if len(folder.parts) > 1)
    return sorted(found, key=len, reverse=True)


def add_sample(run_dir: Path, step: int, text: str) -> None:
    """Append a sample. A disk that refuses it costs the sample, not the run."""
    line = json.dumps({"step": step, "text": text})
    with suppress(OSError), open(run_dir / SAMPLES, "a", encoding="utf-8") as opened:
        opened.write(f"{line}\n")


def read_samples(run_dir: Path) -> dict[int, str]:
    """The newest samples by step. A step that was repeated after a restart has its last sample."""
    found: dict[int, str] = {}
    for line in newest_lines(run_dir / SAMPLES).splitlines():
        with suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            found[int(entry["step"])] = str(entry["text"])
    return found


def newest_lines(path: Path) -> bytes:
    """The last `MOST_BYTES` of a file, in whole lines; nothing if it cannot be read.

    The file grows with its run, and reading its end costs the same at any length.
    """
    with suppress(OSError), open(path, "rb") as opened:
        begin = max(0, opened.seek(0, 2) - MOST_BYTES)
        opened.seek(max(0, begin - 1))
        if begin:
            opened.readline(MOST_BYTES)  # the line that begins before
        return opened.read(MOST_BYTES)
    return b""
