"""The Hub, as far as a store needs it: requests with a bound, and errors of a few kinds.

Nothing here retries for long or decides anything: that is for those who call. The client
(huggingface_hub) has no timeout of its own. What is raised: snapshot/hub_errors.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    hf_hub_download,
    set_client_factory,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import logging
from huggingface_hub.utils._http import default_client_factory

from snapshot.errors import SnapshotError
from snapshot.files import LARGEST_STEP, SNAPSHOT_NAME, read_json
from snapshot.hub_errors import ASKED, REMEDY, HubRefused, seconds_asked, told_apart

LATEST = "latest.json"
SNAPSHOTS = "snapshots"
BRANCH = "main"
MOST_FILES = 100_000
"""More than any run keeps; a listing is not read further."""
LARGEST_LATEST_BYTES = 10_000
LONGEST_SLEEP_SECONDS = 10.0
"""How long the client may wait by itself between its tries of one request."""
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
Operation = CommitOperationAdd | CommitOperationDelete


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


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repo, as the listing has it."""

    size: int
    sha256: str | None
    """Of a large file; None of one that lies in git itself."""


class Hub:
    """One model repo. Every method raises HubError of one of the kinds above."""

    def __init__(self, repo_id: str, timeout: float = 60.0) -> None:
        """`timeout`: seconds after which a silent request is given up."""
        self.repo_id = repo_id
        self._api = HfApi()
        logging.set_verbosity_error()  # its warnings would tear the progress bar
        set_client_factory(lambda: _client(timeout))

    def check_token(self) -> None:
        """Raises HubRefused where there is no token, or one that may only read."""
        with told_apart(self.repo_id, BRANCH):
            who = self._api.whoami()
        token = (who.get("auth") or {}).get("accessToken") or {}
        if token.get("role") == "read":
            raise HubRefused(
                f"the token of {who.get('name')} may only read, but {self.repo_id} is to be "
                f"written. {REMEDY}"
            )

    def create(self, private: bool) -> None:
        """Make the repo where there is none."""
        with told_apart(self.repo_id, BRANCH):
            self._api.create_repo(self.repo_id, private=private, exist_ok=True)

    def head(self, revision: str = BRANCH) -> tuple[str, bool]:
        """The commit that a revision means, and whether the repo is private."""
        with told_apart(self.repo_id, revision):
            info = self._api.repo_info(self.repo_id, revision=revision)
        return str(info.sha), bool(info.private)

    def files(self, commit: str) -> dict[str, RemoteFile]:
        """The files of a commit by path."""
        with told_apart(self.repo_id, commit):
            tree = self._api.list_repo_tree(self.repo_id, recursive=True, revision=commit)
            entries = list(islice(tree, MOST_FILES))
        return {
            entry.path: RemoteFile(entry.size, entry.lfs.sha256 if entry.lfs else None)
            for entry in entries
            if isinstance(entry, RepoFile)
        }

    def latest(self, commit: str) -> Latest | None:
        """`latest.json` of a commit; None where there is none.

        Raises SnapshotError where it is not what this project writes.
        """
        with told_apart(self.repo_id, commit):
            found = self._api.get_paths_info(self.repo_id, LATEST, revision=commit)
        if not found or not isinstance(found[0], RepoFile):
            return None
        if found[0].size > LARGEST_LATEST_BYTES:
            raise SnapshotError(f"{LATEST} of {self.repo_id} has {found[0].size:,} bytes")
        try:
            return self._read_latest(commit)
        except SnapshotError:  # perhaps on the way
            return self._read_latest(commit)

    def _read_latest(self, commit: str) -> Latest:
        with TemporaryDirectory() as folder:
            return read_latest(self.download(commit, LATEST, Path(folder)), self.repo_id)

    def download(self, commit: str, path: str, folder: Path | None) -> Path:
        """A file of a commit, below `folder` under its own path, or in the client's cache."""
        with told_apart(self.repo_id, commit):
            return Path(hf_hub_download(self.repo_id, path, revision=commit, local_dir=folder))

    def upload_contents(self, additions: Sequence[CommitOperationAdd]) -> None:
        """Send the contents of large files that the Hub does not have yet; no commit."""
        with told_apart(self.repo_id, BRANCH):
            # An empty list of what git ignores: a .gitignore in the repo would silently take files
            # out of a snapshot.
            self._api.preupload_lfs_files(
                self.repo_id, additions, free_memory=False, gitignore_content=""
            )

    def commit(self, operations: Sequence[Operation], message: str, parent: str) -> str:
        """One commit on top of `parent`; its id. After any error the outcome is unknown."""
        with told_apart(self.repo_id, BRANCH):
            done = self._api.create_commit(
                self.repo_id, operations, commit_message=message, parent_commit=parent
            )
        return str(done.oid)

    def squash(self, message: str) -> None:
        """Forget the history, so that what no commit needs any more can be freed."""
        with told_apart(self.repo_id, BRANCH):
            self._api.super_squash_history(self.repo_id, branch=BRANCH, commit_message=message)


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


def _client(timeout: float) -> httpx2.Client:
    """The client's own, which waits for no answer and no turn longer than it should."""

    def bound(request: httpx2.Request) -> None:
        # Some of its calls (repo_info, list_repo_tree) ask for no timeout, whatever the client's.
        asked = request.extensions.get("timeout", {})
        bounds = dict.fromkeys(("connect", "read", "write", "pool"), timeout)
        request.extensions["timeout"] = {
            name: seconds if asked.get(name) is None else asked[name]
            for name, seconds in bounds.items()
        }

    client = default_client_factory()
    client.timeout = httpx2.Timeout(timeout)
    hooks = client.event_hooks
    client.event_hooks = {
        "request": [*hooks["request"], bound],
        "response": [*hooks["response"], _keep_from_sleeping],
    }
    return client


def _keep_from_sleeping(response: httpx2.Response) -> None:
    """Hide from the client how long to wait, which it does however long: we wait ourselves."""
    seconds = seconds_asked(response.headers)
    if response.is_error and seconds is not None and seconds > LONGEST_SLEEP_SECONDS:
        response.extensions[ASKED] = seconds
        for name in ("ratelimit", "Retry-After"):
            response.headers.pop(name, None)
