"""events.jsonl: what happened to a run other than its steps, over all attempts and machines.

One JSON object a line: time (UTC), attempt, event, step, text. The file travels with the run's
repo, which others may read, so its texts name no folders.
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
from training.reporting.tail import newest_lines

Event = dict[str, Any]
KINDS = ("start", "machine", "changed", "warning", "stop", "end")
MOST_EVENTS = 4_000
LONGEST_TEXT = 400
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
ATTEMPT = re.compile("[0-9a-f]{8}")
FOLDERS = re.compile(r"\S*/")


class Events:
    """Appends the events of an attempt. A disk that refuses one costs that event, not the run."""

    def __init__(self, path: Path, attempt_id: str, places: Iterable[str] = ()) -> None:
        """`places`: paths of this machine, which no text shows, whatever characters they have."""
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
        return any(one["event"] == "warning" and one["text"] == shown for one in newest)

    def _shown(self, text: str) -> str:
        return self._without_folders(printable(redact_urls(text)))[:LONGEST_TEXT]

    def _without_folders(self, text: str) -> str:
        for folder in self._folders:
            text = text.replace(f"{folder}/", "").replace(folder, PurePath(folder).name)
        return FOLDERS.sub("", text)

    def merge(self, fetched: bytes) -> None:
        """Add the events of other machines, in the order of their times. Raises OSError."""
        with self._lock:
            lines = {json.dumps(one) for one in (*parse_events(fetched), *read_events(self.path))}
            ordered = sorted(map(json.loads, lines), key=_time_and_place)
            write_whole(self.path, as_text(ordered[-MOST_EVENTS:]))


def _folders_of(places: Iterable[str]) -> list[str]:
    """The folders of paths as they are written and as absolute ones, the longest first."""
    found: set[str] = set()
    for place in filter(None, places):
        for path in (PurePath(place), Path(place).expanduser().absolute()):
            found.update(str(one) for one in (path, *path.parents) if len(one.parts) > 1)
    return sorted(found, key=len, reverse=True)


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
