"""A run's records in its store, and their download, as untrusted input.

metrics.jsonl      the figures of every step
events.jsonl       restarts, stops, faults, machines
"""

from __future__ import annotations

from pathlib import Path

from snapshot.errors import SnapshotError
from store.fetch import Contents

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
LARGEST_BYTES = {METRICS: 256 << 20, EVENTS: 4 << 20}
"""The metrics of more than a million steps, and thousands of events."""


def fetch_records(contents: Contents, folder: Path) -> dict[str, Path]:
    """Download the records that a store has to `folder`; their paths, by name.

    Their lines have not been checked. Raises SnapshotError for a file that is too large, StoreError
    and OSError if a download fails.
    """
    names = [name for name in LARGEST_BYTES if name in contents.files]
    for name in names:
        if (size := contents.files[name].size) > LARGEST_BYTES[name]:
            raise SnapshotError(f"{name} of {contents.name} has {size:,} bytes")
    contents.store.fetch(contents.head, names, folder)
    return {name: folder / name for name in names}
