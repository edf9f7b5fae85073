"""`python -m snapshot status`: how far the run in a store is."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

from common.printable import printable
from snapshot.errors import SnapshotError
from snapshot.source import find
from store.latest import TIME_FORMAT
from store.store import BRANCH


def print_status(source: str) -> int:
    """Print the status of a run. Raises SnapshotError and StoreError if there is none."""
    contents = find(source).contents
    if contents is None:
        raise SnapshotError(
            f"{source} is a folder, and status is that of a store. The newest line of "
            "metrics.jsonl and exit_code say how far a run is here."
        )
    if contents.revision != BRANCH:
        raise SnapshotError(f"status is that of now: leave out @{contents.revision}.")
    if refusal := contents.refusal():
        raise SnapshotError(refusal)
    if (latest := contents.latest) is None:
        raise SnapshotError(f"{contents.store.name} holds no run. Check the name.")
    facts = {
        "run": f"{latest.run_id[:8]} in {contents.store.name}",
        "attempt": f"{latest.attempt_id[:8]}, generation {latest.generation}",
        "machine": latest.machine or "unknown",
        "step": f"{latest.step:,} is the newest there",
        "uploaded": _when(latest.time),
    }
    for name, text in facts.items():
        print(printable(f"{name:<10}{text}"))
    return 0


def _when(text: str) -> str:
    """A time of `store.latest.utc`, by the clock of its machine, and how long ago that was."""
    try:
        written = datetime.strptime(text, TIME_FORMAT).replace(tzinfo=UTC)
    except ValueError:
        return "unknown"
    ago = timedelta(seconds=max(0, round(time.time() - written.timestamp())))
    return f"{written:%Y-%m-%d %H:%M:%S} UTC, {ago} ago"
