"""metrics.jsonl of a run in its store, and its download, as untrusted input."""

from __future__ import annotations

from pathlib import Path

from snapshot.errors import SnapshotError
from store.fetch import Contents

METRICS = "metrics.jsonl"
"""The figures of every step, and what happened to the run."""
LARGEST_BYTES = 256 << 20
"""The metrics of more than a million steps."""


def fetch_metrics(contents: Contents, folder: Path) -> Path | None:
    """Download the metrics that a store has to `folder`; None if it has none.

    Their lines have not been checked. Raises SnapshotError for a file that is too large, StoreError
    and OSError if the download fails.
    """
    if METRICS not in contents.files:
        return None
    if (size := contents.files[METRICS].size) > LARGEST_BYTES:
        raise SnapshotError(f"{METRICS} of {contents.name} has {size:,} bytes")
    contents.store.fetch(contents.head, [METRICS], folder)
    return folder / METRICS
