"""The Hub, as far as a store needs it: requests with a bound, and errors in a few kinds.

Nothing here retries for long or decides anything: that is for those who call. The client
(huggingface_hub) has no timeout of its own, and reports in many types.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    get_token,
    hf_hub_download,
    set_client_factory,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import logging, parse_ratelimit_headers
from huggingface_hub.utils._http import default_client_factory

from snapshot.errors import SnapshotError
from snapshot.files import LARGEST_STEP, SNAPSHOT_NAME, read_json

LATEST = "latest.json"
SNAPSHOTS = "snapshots"
BRANCH = "main"
MOST_FILES = 100_000
"""More than any run keeps; a listing is not read further."""
LARGEST_LATEST_BYTES = 10_000
REMEDY = "Log in with `hf auth login`, or set HF_TOKEN, with a token that may write."
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
Operation = CommitOperationAdd | CommitOperationDelete


class HubError(Exception):
    """The Hub did not do what was asked. The message is a sentence, without a token."""

    about_card = False
    """Whether it is README.md that it did not like, or could not judge."""


class HubUnreachable(HubError):
    """It may do it later."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds that the Hub asks to wait; None where it does not say."""


class HubRefused(HubError):
    """It will not, until somebody changes a token, a right or a name."""


class HubMissing(HubRefused):
    """There is no such repo, or the token may not see it."""


class HubMoved(HubError):
    """Somebody else's commit came first."""


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
        self._timeout = timeout
        self._api = HfApi()
        logging.set_verbosity_error()  # its warnings would tear the progress bar
        set_client_factory(lambda: _client(timeout))

    def check_token(self) -> None:
        """Raises HubRefused where there is no token, or one that may only read."""
        with _told_apart(self.repo_id):
            who = self._api.whoami()
        token = who.get("auth", {}).get("accessToken", {})
        if token.get("role") == "read":
            raise HubRefused(
                f"the token of {who.get('name')} may only read, but {self.repo_id} is to be "
                f"written. {REMEDY}"
            )

    def create(self, private: bool) -> None:
        """Make the repo where there is none."""
        with _told_apart(self.repo_id):
            self._api.create_repo(self.repo_id, private=private, exist_ok=True)

    def head(self, revision: str = BRANCH) -> tuple[str, bool]:
        """The commit that a revision means, and whether the repo is private."""
        with _told_apart(self.repo_id, revision):
            # Without a timeout of its own this call waits for ever, whatever the client's is.
            info = self._api.repo_info(self.repo_id, revision=revision, timeout=self._timeout)
        return str(info.sha), bool(info.private)

    def files(self, commit: str) -> dict[str, RemoteFile]:
        """The files of a commit by path."""
        with _told_apart(self.repo_id, commit):
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
        with _told_apart(self.repo_id, commit):
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
        with _told_apart(self.repo_id, commit):
            return Path(hf_hub_download(self.repo_id, path, revision=commit, local_dir=folder))

    def upload_contents(self, additions: Sequence[CommitOperationAdd]) -> None:
        """Send the contents of large files that the Hub does not have yet; no commit."""
        with _told_apart(self.repo_id):
            self._api.preupload_lfs_files(self.repo_id, additions, free_memory=False)

    def commit(self, operations: Sequence[Operation], message: str, parent: str) -> str:
        """One commit on top of `parent`; its id. After any error the outcome is unknown."""
        with _told_apart(self.repo_id):
            done = self._api.create_commit(
                self.repo_id, operations, commit_message=message, parent_commit=parent
            )
        return str(done.oid)

    def squash(self, message: str) -> None:
        """Forget the history, so that what no commit needs any more can be freed."""
        with _told_apart(self.repo_id):
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


def without_secrets(text: str) -> str:
    """A text in which no token stands."""
    token = get_token()
    if token:
        text = text.replace(token, "hf_***")
    text = re.sub(r"hf_\w+", "hf_***", text)
    return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]+", r"\1", text)  # signed addresses


def _client(timeout: float) -> httpx2.Client:
    client = default_client_factory()
    client.timeout = httpx2.Timeout(timeout)
    return client


@contextmanager
def _told_apart(repo_id: str, revision: str = BRANCH) -> Iterator[None]:
    """Turn whatever the client raises into a HubError of the right kind."""
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        told = _kind_of(error, repo_id, revision)
        told.about_card = _is_about_card(error)
        raise told from error


def _kind_of(error: BaseException, repo_id: str, revision: str) -> HubError:
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:  # uploads come wrapped in RuntimeError
        chain.append(cause)
        cause = cause.__cause__
    for found in chain:
        if isinstance(found, LocalTokenNotFoundError):
            return HubRefused(f"hub.repo_id={repo_id} needs a token, and there is none. {REMEDY}")
        if isinstance(found, OfflineModeIsEnabled):
            return HubUnreachable("the Hub may not be asked: HF_HUB_OFFLINE is set")
        if isinstance(found, HfHubHTTPError) and found.response is not None:
            return _kind_of_answer(found, repo_id, revision)
    for found in chain:
        if isinstance(found, httpx2.TimeoutException):
            return HubUnreachable("the Hub did not answer in time")
        if isinstance(found, httpx2.TransportError | ConnectionError):
            return HubUnreachable(f"the Hub cannot be reached ({_short(found)})")
    return HubUnreachable(f"the Hub client failed: {type(error).__name__}: {_short(chain[-1])}")


def _is_about_card(error: Exception) -> bool:
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return error.response.url.path.endswith("/api/validate-yaml")
    return isinstance(error, ValueError) and "README.md" in str(error)


def _kind_of_answer(error: HfHubHTTPError, repo_id: str, revision: str) -> HubError:
    status = error.response.status_code
    said = _short(error.server_message or "") or f"HTTP {status}"
    if status == 412:
        return HubMoved(f"{repo_id} has moved on (HTTP 412)")
    if isinstance(error, RevisionNotFoundError):
        return HubRefused(f"{repo_id} has no revision {revision}. A squashed history is gone.")
    if status == 401 and not isinstance(error, RepositoryNotFoundError):
        return HubRefused(f"the Hub does not accept the token (HTTP 401: {said}). {REMEDY}")
    if isinstance(error, RepositoryNotFoundError):
        return HubMissing(
            f"there is no repo {repo_id}, or the token may not see it (HTTP {status}). Check the "
            f"name. {REMEDY}"
        )
    if status in (402, 403):
        return HubRefused(
            f"the Hub refuses (HTTP {status}: {said}). Check the token's rights on {repo_id}, and "
            "the storage that is left."
        )
    if status == 404:
        return HubRefused(f"the Hub does not know it (HTTP 404: {said})")
    return HubUnreachable(f"the Hub answers HTTP {status} ({said})", _retry_after(error))


def _retry_after(error: HfHubHTTPError) -> float | None:
    headers = error.response.headers
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    said = headers.get("Retry-After", "")
    return float(said) if said.isdigit() else None


def _short(text: object) -> str:
    lines = without_secrets(str(text)).strip().splitlines()
    return lines[0][:200].rstrip(".") if lines else ""
