"""A run's records in its repo: what they are called, and their download, as untrusted input.

metrics/from-00000001.jsonl      metrics.jsonl, in segments of 10,000 steps
events.jsonl                     restarts, stops, faults, machines

Only the newest segment changes, so an upload costs the same however long the run is.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from snapshot.disk.folder import sha256_of
from snapshot.errors import SnapshotError
from store.fetch import Contents
from store.latest import Latest
from store.store import RemoteFile

EVENTS = "events.jsonl"
SEGMENT_STEPS = 10_000
LARGEST_BYTES = {"metrics": 16 << 20, EVENTS: 4 << 20}
"""By the first part of a path. A segment of this project has about 2 MB."""
SEGMENT = re.compile(r"metrics/from-([0-9]{8,13})\.jsonl")
MOST_METRICS_BYTES = 256 << 20
"""Of all segments, which is more than a million steps. Older ones are not fetched."""
GIT_OID = re.compile("[0-9a-f]{40}")


def segment_path(first: int) -> str:
    """The path of the segment that begins with a step."""
    return f"metrics/from-{first:08d}.jsonl"


def segments_in(paths: Iterable[str]) -> dict[int, str]:
    """The segments among the paths of a repo, by their first step, in order."""
    found = {int(match[1]): path for path in paths if (match := SEGMENT.fullmatch(path))}
    return dict(sorted(found.items()))


def replaced_segments(
    paths: Iterable[str], added: Iterable[str], latest: Latest, before: Latest | None
) -> list[str]:
    """Segments that an upload deletes: of another run, and of steps that the run has not taken."""
    same_run = before is not None and before.run_id == latest.run_id
    added = set(added)
    return [
        path
        for first, path in segments_in(paths).items()
        if first > latest.step or not (same_run or path in added)
    ]


@dataclass(frozen=True)
class Records:
    """Downloaded records, whose lines have not been checked."""

    segments: list[Path]
    """In order."""
    begin: int
    """The first step that they may have; steps before it are only in the repo."""
    events: Path | None


def fetch_records(repo: Contents, step: int, folder: Path) -> Records:
    """Download the records up to a step to `folder`: the newest segments, and the events.

    Raises SnapshotError for a file that is too large or not the one that the repo lists, StoreError
    and OSError if a download fails.
    """
    found = {first: path for first, path in segments_in(repo.files).items() if first <= step}
    totals = accumulate(repo.files[path].size for path in reversed(found.values()))
    count = sum(total <= MOST_METRICS_BYTES for total in totals)
    newest = list(found)[-max(1, count) :]
    begin = 1 if len(newest) == len(found) else newest[0]
    paths = [found[first] for first in newest] + [EVENTS] * (EVENTS in repo.files)
    files = {path: repo.files[path] for path in paths}
    for path, file in files.items():
        if file.size > LARGEST_BYTES[path.partition("/")[0]]:
            raise SnapshotError(f"{path} of {repo.name} has {file.size:,} bytes")
    repo.store.download_all(repo.commit, files, folder)
    for path, file in files.items():
        if not _is_as_listed(folder / path, file):
            raise SnapshotError(f"{path} of {repo.name} was damaged on its way")
    here = [folder / path for path in files]
    has_events = EVENTS in repo.files
    return Records(here[:-1] if has_events else here, begin, here[-1] if has_events else None)


def _is_as_listed(path: Path, file: RemoteFile) -> bool:
    if file.sha256 is not None:
        return sha256_of(path) == file.sha256
    if GIT_OID.fullmatch(file.git_oid) is None:  # of a bucket, or a server with other hashes
        return path.stat().st_size == file.size
    content = path.read_bytes()
    blob = b"blob %d\0%b" % (len(content), content)
    return hashlib.sha1(blob, usedforsecurity=False).hexdigest() == file.git_oid
