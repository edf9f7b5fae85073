"""events.jsonl: what happened to a run, one JSON object a line, as any of its readers parses it.

An event has time (UTC), attempt, event, step and text. The file travels with the store of the run,
which others may read and write, so it is untrusted input.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.printable import printable
from store.latest import TIME

MOST_BYTES = 4 << 20
"""Enough for thousands of events or samples."""
Event = dict[str, Any]
KINDS = ("start", "machine", "changed", "warning", "stop", "end")
MOST_EVENTS = 4_000
LONGEST_TEXT = 400
ATTEMPT = re.compile("[0-9a-f]{8}")


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
