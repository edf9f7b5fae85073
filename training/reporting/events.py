"""events.jsonl: what happened to a run, one JSON object a line.

An event has time (UTC), attempt, event, step and text. The file travels with the repo of the run,
which others may read, so its texts name no folders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path, PurePath
from threading import Lock

from common.printable import printable, redact_urls
from snapshot.disk.folder import expanded, write_whole
from store.events import (
    KINDS,
    LONGEST_TEXT,
    MOST_EVENTS,
    Event,
    as_text,
    parse_events,
    read_events,
)

FOLDERS = re.compile(r"\S*/")


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
        line = self._event(event, step, self._shown(text))
        with self._lock, suppress(OSError), open(self.path, "a", encoding="utf-8") as opened:
            opened.write(f"{json.dumps(line)}\n")

    def _event(self, event: str, step: int, text: str) -> Event:
        return {
            "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "attempt": self._attempt,
            "event": event,
            "step": step,
            "text": text,
        }

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
        """Add the events of other machines, in the order of their times. Raises OSError.

        Of one second, those of the attempt that began first come first.
        """
        with self._lock:
            events = [*parse_events(fetched), *read_events(self.path)]
            begun: dict[str, str] = {}
            for event in events:
                attempt = event["attempt"]
                begun[attempt] = min(event["time"], begun.get(attempt, event["time"]))
            lines = dict.fromkeys(json.dumps(event) for event in events)
            ordered = sorted(
                map(json.loads, lines), key=lambda one: (one["time"], begun[one["attempt"]])
            )
            write_whole(self.path, as_text(ordered[-MOST_EVENTS:]))


def _folders_of(places: Iterable[str]) -> list[str]:
    """The folders of paths, as written and as absolute paths, the longest first."""
    found: set[str] = set()
    for place in filter(None, places):
        for path in (PurePath(place), expanded(place).absolute()):
            found.update(str(folder) for folder in (path, *path.parents) if len(folder.parts) > 1)
    return sorted(found, key=len, reverse=True)
