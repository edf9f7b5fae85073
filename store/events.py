"""What happened to a run: lines of metrics.jsonl, as any of its readers parses them.

An event has time (UTC), attempt, event, step and text. The file travels with the store of the run,
which others may read and write, so it is untrusted input.
"""

from __future__ import annotations

import json
import mmap
import re
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.printable import printable
from store.latest import TIME

Event = dict[str, Any]
KINDS = ("start", "machine", "changed", "warning", "stop", "end")
MOST_EVENTS = 4_000
LONGEST_TEXT = 400
ATTEMPT = re.compile("[0-9a-f]{8}")
LINE = re.compile(rb'^\{"time": [^\n]*\n', re.MULTILINE)
"""A line of an event: those of figures begin with its kind."""


def read_events(path: Path) -> list[Event]:
    """The newest events in a run's metrics.jsonl; none where it cannot be read."""
    with (
        suppress(OSError, ValueError),  # an empty file has no map
        open(path, "rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return parse_events(line[0] for line in LINE.finditer(content))
    return []


def parse_events(lines: Iterable[bytes]) -> list[Event]:
    """The newest events among untrusted lines."""
    return list(deque(filter(None, map(event_in, lines)), MOST_EVENTS))


def event_in(line: bytes) -> Event | None:
    """The event of an untrusted line; None if it is none."""
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
