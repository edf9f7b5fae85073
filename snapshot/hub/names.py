"""What a name on the command line means: a path on this disk, or a repo of the Hub."""

from __future__ import annotations

import re
from pathlib import Path

from snapshot.disk.reading import visible
from snapshot.errors import SnapshotError
from snapshot.hub.client import BRANCH, REPO_ID

PREFIX = "hf://"
"""Before a repo's name: it is one, whatever this disk holds."""
NAMED_REPO = re.compile(rf"({PREFIX})?({REPO_ID.pattern})(?:@([\w./-]+))?")


def named_repo(name: str) -> tuple[str, str] | None:
    """The repo and the revision that `owner/name[@revision]` names; None for a path.

    What exists on this disk is a path. Raises SnapshotError for a name that is neither there nor
    certainly a repo: in `out/python-dcos`, `out` is a folder here, so it is a path misspelled, and
    asking the Hub could bring the model of whoever has the name `out` there.
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
