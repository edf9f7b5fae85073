"""What happens to a run, as lines of metrics.jsonl.

That file travels with the store of the run, which others may read, so these texts name no folders.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import PurePath

from common.printable import printable, redact_urls
from snapshot.disk.folder import expanded
from store.events import KINDS, LONGEST_TEXT, read_events
from training.reporting.metrics import MetricsFile

FOLDERS = re.compile(r"\S*/")


class Events:
    """Appends the events of an attempt."""

    def __init__(self, metrics: MetricsFile, attempt_id: str, places: Iterable[str] = ()) -> None:
        """No text shows `places`, which are paths of this machine."""
        self._metrics, self._attempt = metrics, attempt_id[:8]
        self._folders = _folders_of(places)

    def add(self, event: str, step: int, text: str = "") -> None:
        """Add an event, one of `KINDS`. Any thread may call this."""
        assert event in KINDS, event
        line = {
            "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "attempt": self._attempt,
            "event": event,
            "step": step,
            "text": self._shown(text),
        }
        self._metrics.append([line])

    def has_warning(self, text: str) -> bool:
        """Whether there is a warning with this text, of any attempt."""
        events, shown = read_events(self._metrics.path), self._shown(text)
        return any(event["event"] == "warning" and event["text"] == shown for event in events)

    def _shown(self, text: str) -> str:
        shown = printable(redact_urls(text))
        for folder in self._folders:
            shown = shown.replace(f"{folder}/", "").replace(folder, PurePath(folder).name)
        return FOLDERS.sub("", shown)[:LONGEST_TEXT]


def _folders_of(places: Iterable[str]) -> list[str]:
    """The folders of paths, as written and as absolute paths, the longest first."""
    found: set[str] = set()
    for place in filter(None, places):
        for path in (PurePath(place), expanded(place).absolute()):
            found.update(str(folder) for folder in (path, *path.parents) if len(folder.parts) > 1)
    return sorted(found, key=len, reverse=True)
