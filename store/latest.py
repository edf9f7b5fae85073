"""What lies where in a store, and `latest.json`: its newest snapshot, of which run and attempt.

snapshots/step-00001000-3f2a1b2c/...    a snapshot, with its attempt's id; whole when it has its
                                        manifest.json
latest.json                             the newest one, its run, attempt and generation
metrics.jsonl                           the figures of every step, and what happened to the run
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from snapshot.disk.folder import (
    DIGEST,
    LARGEST_STEP,
    MANIFEST,
    SYSTEM_FILES,
    between,
    matches,
    parse_json,
)
from snapshot.errors import SnapshotError

LATEST = "latest.json"
METRICS = "metrics.jsonl"
LARGEST_METRICS_BYTES = 256 << 20
"""The metrics of more than a million steps."""
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
"""Of times in records, which are in UTC."""
FORMAT_VERSION = 2
SNAPSHOTS = "snapshots"
"""The folder of a store that holds its snapshots."""
FOLDER = re.compile(rf"({SNAPSHOTS}/step-([0-9]{{8,13}})-([0-9a-z]{{1,8}}))/[^/]+")
"""A file of a snapshot: its folder, the step, and the beginning of the attempt's id."""
SHAPE = {
    **dict.fromkeys(("run_id", "attempt_id"), re.compile(".+")),
    "generation": range(1, 10**9 + 1),
    "step": range(LARGEST_STEP + 1),
    "folder": re.compile(FOLDER.pattern.removesuffix("/[^/]+")),
    "manifest_sha256": DIGEST,
    **dict.fromkeys(("machine", "time"), str),
    "best_step": range(LARGEST_STEP + 1),
    "best_loss": (None, between(0.0, sys.float_info.max)),
}
"""Of its JSON, for `matches`."""
WRITTEN_BY_010 = "was written by 0.1.0: train on from its weights"
RECORD = re.compile(rf"({re.escape(LATEST)}|{re.escape(METRICS)})((\.[0-9a-f]{{8}})?\.new)?")
"""A record of a run, also under the name that it has on a disk until all of it is there."""
OWN_FILES = ("README.md", ".gitattributes")
"""Files that a repo may hold before a run uploads to it."""


@dataclass(frozen=True)
class Latest:
    """The fields of `latest.json`."""

    run_id: str
    attempt_id: str
    generation: int
    """Of several attempts, the one with the highest generation owns the run."""
    step: int
    folder: str
    manifest_sha256: str
    machine: str = ""
    """The name of the attempt's machine. Untrusted, as all texts here are."""
    time: str = ""
    """When this was written, UTC by that machine's clock. Nothing is decided by it."""
    best_step: int = 0
    """The step of the best snapshot; 0 if there is none."""
    best_loss: float | None = None
    """Its held-out loss, nats per token."""

    def is_same_upload(self, other: Latest) -> bool:
        """Whether both are of one upload of one attempt."""
        mine = (self.attempt_id, self.folder, self.manifest_sha256)
        return mine == (other.attempt_id, other.folder, other.manifest_sha256)


def read_latest(file: bytes, name: str) -> Latest:
    """Check the content of `latest.json`, which is untrusted input, of the store of that name.

    Raises SnapshotError if it is not valid.
    """
    content = parse_json(file, f"{LATEST} of {name}")
    version = content.get("format_version") if isinstance(content, dict) else None
    if version == 1 and "attempt_id" in content:
        raise SnapshotError(f"{name} {WRITTEN_BY_010} with model.pretrained={name}")
    if version is not None and version != FORMAT_VERSION:
        raise SnapshotError(
            f"{LATEST} of {name} has format version {version!r:.40}; this program reads "
            f"version {FORMAT_VERSION}"
        )
    fields: Any = {} if version is None else {key: content.get(key) for key in SHAPE}
    if not matches(fields, SHAPE) or remote_step(fields["folder"]) != fields["step"]:
        raise SnapshotError(f"{LATEST} of {name} is not one of this project's")
    return Latest(**fields)


def latest_as_bytes(latest: Latest) -> bytes:
    """The content of `latest.json`."""
    content = {"format_version": FORMAT_VERSION, **asdict(latest)}
    return (json.dumps(content, indent=2) + "\n").encode()


def remote_folder(step_name: str, attempt_id: str) -> str:
    """The folder in a store for a snapshot of that name; no other attempt writes there."""
    return f"{SNAPSHOTS}/{step_name}-{attempt_id[:8]}"


def folders_in(paths: Iterable[str]) -> list[str]:
    """The snapshot folders among the paths of a store that have a manifest, newest first."""
    manifests = (FOLDER.fullmatch(path) for path in paths if path.endswith(f"/{MANIFEST}"))
    folders = [match[1] for match in manifests if match and int(match[2]) <= LARGEST_STEP]
    return sorted(folders, key=lambda folder: (remote_step(folder), folder), reverse=True)


def foreign_file(paths: Collection[str], has_commits: bool = False) -> str | None:
    """A file that no run uploaded; None if the files are a run's, or none.

    With its `latest.json` a store is a run's. Before there is one, a first upload that was cut off
    leaves parts of a snapshot, and then records; a commit leaves nothing.
    """
    if LATEST in paths:
        return None
    own = set() if has_commits else set(filter(FOLDER.fullmatch, paths))
    own |= set(filter(RECORD.fullmatch, paths)) if own else set()
    others = (path for path in sorted({*paths} - own) if path not in OWN_FILES)
    return next((one for one in others if not SYSTEM_FILES.fullmatch(one.rpartition("/")[2])), None)


def remote_step(folder: str) -> int:
    """The step of `snapshots/step-00000100-3f2a1b2c`."""
    return int(folder.split("-")[1])


def utc() -> str:
    """The time now, as in '2026-11-27T10:31:04Z'."""
    return datetime.now(UTC).strftime(TIME_FORMAT)
