"""Names on the command line: a path on this disk, or a repo of the Hub."""

from __future__ import annotations

import re
from pathlib import Path

from snapshot.disk.reading import visible
from snapshot.errors import SnapshotError
from store.bucket import Bucket
from store.client import REPO_ID, Hub
from store.remote import BRANCH, PREFIX, Remote

NAMED_BUCKET = re.compile(rf"{PREFIX}buckets/({REPO_ID.pattern})")
NAMED_REPO = re.compile(rf"({PREFIX})?({REPO_ID.pattern})(?:@([\w./-]+))?")


def named_repo(name: str) -> tuple[str, str] | None:
    """The repo and the revision that `owner/name[@revision]` names; None for a path.

    A name that exists on this disk is a path. Raises SnapshotError for a name that does not exist
    and may be a misspelled path: if `out` is a folder here, `out/python-dcos` must not download a
    model of the Hub user `out`.
    """
    match = NAMED_REPO.fullmatch(name)
    if match is None or (match[1] is None and visible(Path(name)).exists()):
        return None
    repo, revision = match[2], match[3] or BRANCH
    owner = repo.partition("/")[0]
    if match[1] is None and visible(Path(owner)).exists():
        raise SnapshotError(
            f"there is no {name}, and {owner} is a folder or a file here, so the Hub is not asked. "
            f"Check the path; for the repo of that name on the Hub write {PREFIX}{name}."
        )
    return repo, revision


def named_remote(name: str, timeout: float = 60.0) -> tuple[Remote, str] | None:
    """The repo or the bucket (`hf://buckets/owner/name`) that a name means, and the revision.

    None for a path. Raises SnapshotError as `named_repo` does.
    """
    if (match := NAMED_BUCKET.fullmatch(name)) is not None:
        return Bucket(match[1], timeout), BRANCH
    found = named_repo(name)
    return None if found is None else (Hub(found[0], timeout), found[1])
