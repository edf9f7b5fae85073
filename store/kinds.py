"""The kinds of stores, by the beginnings of their URLs; and what a name on the command line means.

Another kind is a row in `KINDS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from snapshot.disk.folder import visible
from snapshot.errors import SnapshotError
from store.files import Bucket, Disk, Files
from store.hub import REPO_ID, Hub
from store.store import BRANCH, PREFIX, Store

BUCKETS = f"{PREFIX}buckets/"
"""How the URL of a bucket of the Hub begins."""
NAMED_FILES = re.compile(
    rf"{BUCKETS}{REPO_ID.pattern}(/.*)?|(?!{PREFIX})[a-z][a-z0-9+.-]*://.+", re.IGNORECASE
)
"""A store of files: a bucket of the Hub, or any other URL."""
NAMED_REPO = re.compile(rf"({PREFIX})?({REPO_ID.pattern})(?:@([\w./-]+))?")
KINDS: dict[str, Callable[[str, float], Store]] = {
    BUCKETS: Bucket,
    PREFIX: Hub,
    "file://": Disk,
    "local://": Disk,
    "": Files,
}
"""From a URL and a timeout in seconds; the first beginning that a URL has decides."""


def open_store(url: str, timeout: float = 60.0) -> Store:
    """The store at a URL. Makes no request. Raises SnapshotError for one that is none."""
    open_kind = next(kind for beginning, kind in KINDS.items() if url.startswith(beginning))
    return open_kind(url, timeout)


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


def named_store(name: str, timeout: float = 60.0) -> tuple[Store, str] | None:
    """The store that a name means, and the revision; None for a path.

    It is a repo or any URL (of a bucket, `hf://buckets/owner/name`). Raises SnapshotError as
    `named_repo` and `open_store` do.
    """
    if NAMED_FILES.fullmatch(name):
        return open_store(name, timeout), BRANCH
    repo = named_repo(name)
    return None if repo is None else (Hub(repo[0], timeout), repo[1])
