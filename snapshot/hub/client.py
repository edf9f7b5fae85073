"""The Hub, as far as a store needs it: requests with a bound, and errors of a few kinds.

Nothing here retries for long or decides anything: that is for those who call. The client
(huggingface_hub) has no timeout of its own. What is raised: snapshot/hub/errors.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    hf_hub_download,
    set_client_factory,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, get_session, logging
from huggingface_hub.utils._http import default_client_factory

from snapshot.errors import SnapshotError
from snapshot.hub.errors import (
    ASKED,
    REMEDY,
    HubMissing,
    HubNoRevision,
    HubRefused,
    HubUnreachable,
    redact_secrets,
    seconds_asked,
    translate_errors,
)
from snapshot.hub.latest import LATEST, Latest, read_latest

BRANCH = "main"
MOST_FILES = 100_000
"""More than any run keeps; a listing is not read further."""
LARGEST_LATEST_BYTES = 10_000
LONGEST_SLEEP_SECONDS = 10.0
"""How long the client may wait by itself between its tries of one request."""
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
COMMIT_ID = re.compile(r"[A-Za-z0-9]{5,128}")
NO_SUCH_ADDRESS = (400, 404, 405, 410, 501)
"""How a server without Xet answers where Xet's tokens are asked for; others may have it later."""
Operation = CommitOperationAdd | CommitOperationDelete


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
        self.repo_id, self.timeout = repo_id, timeout
        self.notes: list[str] = []
        """Sentences about the server for the person in front of the run, each once."""
        self._api = HfApi()
        logging.set_verbosity_error()  # its warnings would tear the progress bar
        set_client_factory(lambda: _client(timeout))

    def check_token(self) -> None:
        """Raises HubRefused where there is no token, or one that may only read."""
        with translate_errors(self.repo_id, BRANCH):
            who = self._api.whoami()
        token = (who.get("auth") or {}).get("accessToken") or {}
        if token.get("role") == "read":
            raise HubRefused(
                f"the token of {who.get('name')} may only read, but {self.repo_id} is to be "
                f"written. {REMEDY}"
            )

    def create(self, private: bool) -> None:
        """Make the repo where there is none."""
        with translate_errors(self.repo_id, BRANCH):
            self._api.create_repo(self.repo_id, private=private, exist_ok=True)

    def head(self, revision: str = BRANCH) -> tuple[str, bool]:
        """The commit that a revision means, and whether the repo is private."""
        not_found = HubMissing if revision == BRANCH else HubNoRevision
        with translate_errors(self.repo_id, revision, not_found):
            info = self._api.repo_info(self.repo_id, revision=revision)
        commit = str(info.sha or "")
        if COMMIT_ID.fullmatch(commit) is None:
            raise HubRefused(f"{self.repo_id} has no commit id at {revision}, but {commit!r:.80}.")
        return commit, bool(info.private)

    def files(self, commit: str) -> dict[str, RemoteFile]:
        """The files of a commit by path."""
        with translate_errors(self.repo_id, commit, HubNoRevision):
            tree = self._api.list_repo_tree(self.repo_id, recursive=True, revision=commit)
            entries = list(islice(tree, MOST_FILES))
        return {
            entry.path: RemoteFile(entry.size, _digest(entry.lfs.sha256) if entry.lfs else None)
            for entry in entries
            if isinstance(entry, RepoFile)
        }

    def latest(self, commit: str, files: Mapping[str, RemoteFile]) -> Latest | None:
        """`latest.json` of a commit that holds `files`; None where there is none.

        Raises SnapshotError where it is not what this project writes.
        """
        if LATEST not in files:
            return None
        if files[LATEST].size > LARGEST_LATEST_BYTES:
            raise SnapshotError(f"{LATEST} of {self.repo_id} has {files[LATEST].size:,} bytes")
        try:
            return self._read_latest(commit)
        except SnapshotError:  # perhaps on the way
            return self._read_latest(commit)

    def _read_latest(self, commit: str) -> Latest:
        with TemporaryDirectory() as folder:
            return read_latest(self.download(commit, LATEST, Path(folder)), self.repo_id)

    def download(self, commit: str, path: str, folder: Path | None, again: bool = False) -> Path:
        """A file of a commit, below `folder` under its own path, or in the client's cache.

        With `again`, one that is in the cache is replaced.
        """
        with translate_errors(self.repo_id, commit):
            return Path(
                hf_hub_download(
                    self.repo_id, path, revision=commit, local_dir=folder, force_download=again
                )
            )

    def upload_contents(self, additions: Sequence[CommitOperationAdd]) -> None:
        """Send the contents of large files that the Hub does not have yet; no commit.

        Where the client uses Xet and the server has none, Xet is switched off for this process.
        """
        try:
            self._send(additions)
        except HubUnreachable:  # so looks a server without Xet
            if not self._leaves_xet():
                raise
            self._send(additions)

    def _leaves_xet(self) -> bool:
        """Switch Xet off where the server has none; whether it was that."""
        if constants.HF_HUB_DISABLE_XET or find_spec("hf_xet") is None:
            return False
        address = f"{self._api.endpoint}/api/models/{self.repo_id}/xet-write-token/{BRANCH}"
        with translate_errors(self.repo_id, BRANCH):
            status = get_session().get(address, headers=build_hf_headers()).status_code
        if status not in NO_SUCH_ADDRESS:
            return False
        # The client (huggingface_hub 2.4) reads its environment once, and this at every upload.
        constants.HF_HUB_DISABLE_XET = True
        self.notes.append(
            f"{redact_secrets(self._api.endpoint)} has no Xet storage (HTTP {status}), with which "
            "the client uploads large files; they are uploaded without it. If that fails, start "
            "with HF_HUB_DISABLE_XET=1 in the environment, which also spares this first try."
        )
        return True

    def _send(self, additions: Sequence[CommitOperationAdd]) -> None:
        with translate_errors(self.repo_id, BRANCH):
            # An empty list of what git ignores: a .gitignore in the repo would silently take files
            # out of a snapshot.
            self._api.preupload_lfs_files(
                self.repo_id, additions, free_memory=False, gitignore_content=""
            )

    def commit(self, operations: Sequence[Operation], message: str, parent: str) -> str:
        """One commit on top of `parent`; its id. After any error the outcome is unknown.

        A server that ignores the parent, or names commits in a way that the client does not accept
        as one (64 digits), commits on top of whatever its head is: read the head just before.
        """
        accepted = constants.REGEX_COMMIT_OID.fullmatch(parent) is not None
        with translate_errors(self.repo_id, BRANCH):
            done = self._api.create_commit(
                self.repo_id,
                operations,
                commit_message=message,
                parent_commit=parent if accepted else None,
            )
        return str(done.oid)

    def squash(self, message: str) -> None:
        """Forget the history, so that what no commit needs any more can be freed."""
        with translate_errors(self.repo_id, BRANCH):
            self._api.super_squash_history(self.repo_id, branch=BRANCH, commit_message=message)


def _digest(oid: str) -> str:
    """The hex digits of a content's SHA-256; some servers write `sha256:` before them."""
    return oid.removeprefix("sha256:").lower()


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
