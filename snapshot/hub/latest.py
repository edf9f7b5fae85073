"""`latest.json`: whose the newest snapshot of a repo is, and which."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from snapshot.disk.files import LARGEST_STEP, SNAPSHOT_NAME, read_json
from snapshot.errors import SnapshotError

LATEST = "latest.json"
SNAPSHOTS = "snapshots"
"""The folder of a repo in which its snapshots lie."""


@dataclass(frozen=True)
class Latest:
    """`latest.json`: whose the newest snapshot of a repo is, and which."""

    run_id: str
    attempt_id: str
    step: int
    folder: str
    manifest_sha256: str
    commits: int = 0
    """Commits since the history was squashed."""


def read_latest(path: Path, repo_id: str) -> Latest:
    """`latest.json`, checked. Raises SnapshotError."""
    content = read_json(path)
    names = {entry.name: entry.type for entry in fields(Latest)}
    sound = isinstance(content, dict) and set(content) >= set(names)
    if sound:
        kinds = {"str": str, "int": int}
        sound = all(type(content[name]) is kinds[str(kind)] for name, kind in names.items())
    if sound:
        name = SNAPSHOT_NAME.fullmatch(content["folder"].removeprefix(f"{SNAPSHOTS}/"))
        sound = name is not None and int(name[1]) == content["step"] <= LARGEST_STEP
    if not sound or not re.fullmatch("[0-9a-f]{64}", content["manifest_sha256"]):
        raise SnapshotError(f"{LATEST} of {repo_id} is not one of this project's")
    return Latest(**{name: content[name] for name in names})


def latest_as_bytes(latest: Latest) -> bytes:
    """`latest.json` as it is written."""
    return (json.dumps(asdict(latest), indent=2) + "\n").encode()
