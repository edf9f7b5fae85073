"""`latest.json`: the newest snapshot of a repo, and the run and attempt that it belongs to."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from snapshot.disk.files import LARGEST_STEP, MANIFEST, SNAPSHOT_NAME, parse_json
from snapshot.errors import SnapshotError

LATEST = "latest.json"
FORMAT_VERSION = 1
SNAPSHOTS = "snapshots"
"""The folder of a repo that holds its snapshots."""
BEST = "best/"
"""The folder of a repo with the snapshot that has the lowest held-out loss."""


@dataclass(frozen=True)
class Latest:
    """The fields of `latest.json`."""

    run_id: str
    attempt_id: str
    step: int
    folder: str
    manifest_sha256: str
    commits: int = 0
    """Commits since the last squash of the history."""
    best_step: int = 0
    """The step of the snapshot in `best/`; 0 if there is none."""
    best_loss: float | None = None
    """Its held-out loss, nats per token."""
    heartbeat: int = 0
    """Counts the commits of the attempt, so that each of them changes this file."""
    silence_seconds: int = 3600
    """While the attempt lives, it commits again within so many seconds; 0: it has ended."""
    machine: str = ""
    """The name of the attempt's machine."""
    since: str = ""
    """When the attempt became the owner; this and `seen` are UTC, by that machine's clock."""
    seen: str = ""
    """When this was written."""
    ended: str = ""
    """How the attempt has ended, a key of `store.ownership.ENDS`; empty while it trains."""
    alive_seconds: int = 0
    """While the attempt lives, its tag changes within so many seconds; 0: it has no tag."""

    @property
    def has_snapshot(self) -> bool:
        """False if an attempt has only announced that it trains."""
        return self.step > 0

    def without_best(self) -> Latest:
        """The same, where there is no best snapshot."""
        return replace(self, best_step=0, best_loss=None)

    def is_same_upload(self, other: Latest | None) -> bool:
        """Whether both are of one upload, whatever else has been committed since."""
        return other is not None and self == replace(
            other,
            commits=self.commits,
            heartbeat=self.heartbeat,
            silence_seconds=self.silence_seconds,
            since=self.since,
            seen=self.seen,
            ended=self.ended,
            alive_seconds=self.alive_seconds,
        )


NOT_IN_OLDER_FILES = {
    "format_version": FORMAT_VERSION,
    "best_step": 0,
    "best_loss": None,
    "heartbeat": 0,
    "silence_seconds": 3600,
    "machine": "",
    "since": "",
    "seen": "",
    "ended": "",
    "alive_seconds": 0,
}
LONGEST_SILENCE_SECONDS = 24 * 3600
"""A longer announcement counts as this."""


def read_latest(file: bytes, repo_id: str) -> Latest:
    """Check the content of `latest.json`. Raises SnapshotError if it is not valid."""
    content = parse_json(file, f"{LATEST} of {repo_id}")
    if isinstance(content, dict):
        content = {**NOT_IN_OLDER_FILES, **content}
        if (version := content["format_version"]) != FORMAT_VERSION:
            raise SnapshotError(
                f"{LATEST} of {repo_id} has format version {version!r:.40}; this program reads "
                f"version {FORMAT_VERSION}"
            )
    names = {entry.name: entry.type for entry in fields(Latest)}
    valid = isinstance(content, dict) and set(content) >= set(names)
    if valid:
        kinds = {"str": (str,), "int": (int,), "float | None": (float, type(None))}
        valid = all(type(content[name]) in kinds[str(kind)] for name, kind in names.items())
        valid = valid and bool(content["run_id"] and content["attempt_id"])
        valid = valid and min(content["silence_seconds"], content["alive_seconds"]) >= 0
    if valid:
        name = SNAPSHOT_NAME.fullmatch(content["folder"].removeprefix(f"{SNAPSHOTS}/"))
        valid = name is not None and int(name[1]) == content["step"] <= LARGEST_STEP
    if not valid or not re.fullmatch("[0-9a-f]{64}", content["manifest_sha256"]):
        raise SnapshotError(f"{LATEST} of {repo_id} is not one of this project's")
    latest = Latest(**{name: content[name] for name in names})
    if best_in({"step": latest.best_step, "loss": latest.best_loss}) is None:
        latest = latest.without_best()
    return replace(latest, silence_seconds=min(latest.silence_seconds, LONGEST_SILENCE_SECONDS))


def latest_as_bytes(latest: Latest) -> bytes:
    """The content of `latest.json`."""
    content = {"format_version": FORMAT_VERSION, **asdict(latest)}
    return (json.dumps(content, indent=2) + "\n").encode()


def best_in(content: object) -> tuple[int, float] | None:
    """Step and held-out loss of the best snapshot, from untrusted JSON; None if it names none."""
    if not isinstance(content, dict):
        return None
    step: Any = content.get("step")
    loss: Any = content.get("loss")
    if type(step) is not int or type(loss) not in (int, float):
        return None
    # What is below all losses, or cannot be compared, would stay the best for good. An integer of
    # JSON may be larger than any float.
    valid = 0 < step <= LARGEST_STEP and 0 <= loss <= sys.float_info.max
    return (step, float(loss)) if valid else None


def folders_in(paths: Iterable[str]) -> list[str]:
    """The snapshot folders among the paths of a repo, newest first: those with a manifest."""
    found = set()
    for path in paths:
        top, _, rest = path.partition("/")
        name, _, file = rest.partition("/")
        if top == SNAPSHOTS and SNAPSHOT_NAME.fullmatch(name) and file == MANIFEST:
            found.add(f"{SNAPSHOTS}/{name}")
    return sorted(found, key=remote_step, reverse=True)


def remote_step(folder: str) -> int:
    """The step of a path that ends in `/step-00000100`."""
    match = SNAPSHOT_NAME.fullmatch(folder.rpartition("/")[2])
    assert match is not None, folder
    return int(match[1])
