"""The Hub operations that a store needs, each with a timeout and a few kinds of errors.

Retries and decisions are left to the callers. huggingface_hub, "the Hub client" in comments, has no
timeouts of its own. The errors are in store/errors.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import huggingface_hub  # imports the rest at its first use, which a run without a Hub has not
from huggingface_hub import constants, get_token
from huggingface_hub.errors import LocalTokenNotFoundError
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from common.hub_client import deadline, hub_api, transfer
from snapshot.errors import DiskFault, is_full
from store.errors import (
    REMEDY,
    NoFile,
    NoRevision,
    StoreMissing,
    StoreRefused,
    Unsupported,
    translate_errors,
)
from store.latest import LATEST
from store.store import BRANCH, RemoteFile, Store, Transfer

MOST_FILES = 100_000
"""More than any run has; a longer listing is cut off."""
OWN_FILES = {"README.md", ".gitattributes"}
"""Files that a repo may hold before a run uploads to it."""
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
COMMIT_ID = re.compile(r"[A-Za-z0-9]{5,128}")
LARGE_BYTES = 5 << 20
"""The Hub takes at most 10 MB into git itself."""


class Hub(Store):
    """One model repo. Every method raises StoreError."""

    def __init__(self, repo_id: str, timeout: float = 60.0) -> None:
        """`timeout`: seconds that a request waits for data."""
        super().__init__(timeout)
        self.repo_id = repo_id
        self._api = hub_api(timeout)

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.repo_id

    @property
    def key(self) -> str:
        """The configuration key and value that name it."""
        return f"hub.repo_id={self.repo_id}"

    @contextmanager
    def _asking(
        self, revision: str = BRANCH, not_found: type[StoreRefused] = Unsupported
    ) -> Iterator[None]:
        """Requests that end in time, and whose errors are of a few kinds."""
        with translate_errors(self.repo_id, revision, not_found), deadline(self.timeout):
            yield

    def beside(self, suffix: str) -> str:
        """The URL of another one of the same owner."""
        return f"{self.url}{suffix}"

    @property
    def is_offline(self) -> bool:
        """Whether this process must not use the Hub; that lasts as long as the process."""
        return bool(constants.HF_HUB_OFFLINE)

    def require_token(self) -> None:
        """Raise StoreRefused if there is no token. Makes no request."""
        with self._asking():
            if not get_token():
                raise LocalTokenNotFoundError

    def check_token(self) -> None:
        """Raise StoreRefused if there is no token, or a read-only one."""
        with self._asking():
            who = self._api.whoami()
        token = (who.get("auth") or {}).get("accessToken") or {}
        if token.get("role") == "read":
            raise StoreRefused(
                f"the token of {who.get('name')} is read-only, but the run writes to "
                f"{self.name}. {REMEDY}"
            )

    def foreign_file(self, files: Iterable[str]) -> str | None:
        """A file that no run uploaded; None if the files are a run's, or none."""
        others = sorted(set(files) - OWN_FILES)
        return others[0] if others and LATEST not in others else None

    def create(self, private: bool) -> None:
        """Create the repo if it does not exist."""
        with self._asking():
            self._api.create_repo(self.repo_id, private=private, exist_ok=True)

    def remove(self) -> None:
        """Remove the repo, if it exists."""
        with self._asking():
            self._api.delete_repo(self.repo_id, missing_ok=True)

    def head(self, revision: str = BRANCH) -> tuple[str, bool]:
        """The commit of a revision, and whether the repo is private."""
        not_found = StoreMissing if revision == BRANCH else NoRevision
        with self._asking(revision, not_found):
            info = self._api.repo_info(self.repo_id, revision=revision)
        commit = str(info.sha or "")
        if COMMIT_ID.fullmatch(commit) is None:
            raise StoreRefused(
                f"{self.repo_id} has no commit id at {revision}, but {commit!r:.80}."
            )
        return commit, bool(info.private)

    def files(self, commit: str) -> dict[str, RemoteFile]:
        """The files of a commit by path."""
        with self._asking(commit, NoRevision):
            tree = self._api.list_repo_tree(self.repo_id, recursive=True, revision=commit)
            entries = list(islice(tree, MOST_FILES))
        return {
            entry.path: RemoteFile(
                entry.size,
                _digest(entry.lfs.sha256) if entry.lfs else None,
                entry.blob_id,
            )
            for entry in entries
            if isinstance(entry, huggingface_hub.RepoFile)
        }

    def read(self, commit: str, path: str, most: int) -> bytes:
        """A small file, of which at most `most` bytes are read. It needs no place on a disk."""
        url = huggingface_hub.hf_hub_url(self.repo_id, path, revision=commit)
        content = b""
        with (
            self._asking(commit, NoFile),
            get_session().stream("GET", url, headers=build_hf_headers()) as response,
        ):
            hf_raise_for_status(response)
            for part in response.iter_bytes():
                content += part
                if len(content) > most:
                    raise StoreRefused(f"{path} of {self.repo_id} is larger than its repo lists.")
        return content

    def download(self, commit: str, path: str, folder: Path | None, again: bool = False) -> Path:
        """Download a file of a commit to `folder`, under its own path, or to the client's cache.

        With `again`, a cached file is replaced. Raises OSError for a folder that cannot be written,
        DiskFault for such a cache.
        """
        with _naming_cache(folder), self._asking(commit, NoFile):
            return self._download(commit, path, folder, again)

    def download_all(
        self, commit: str, files: Mapping[str, RemoteFile], folder: Path | None, again: bool = False
    ) -> None:
        """`download` of several files. Raises OSError, too."""
        size = sum(file.size for file in files.values())
        with (
            _naming_cache(folder),
            translate_errors(self.repo_id, commit, NoFile),
            transfer(self.timeout, size),
        ):
            for path in sorted(files):
                self._download(commit, path, folder, again)

    def _download(self, commit: str, path: str, folder: Path | None, again: bool) -> Path:
        return Path(
            huggingface_hub.hf_hub_download(
                self.repo_id, path, revision=commit, local_dir=folder, force_download=again
            )
        )

    def upload_contents(self, additions: Sequence[huggingface_hub.CommitOperationAdd]) -> Transfer:
        """Upload the large files that the Hub does not have yet, without a commit.

        A file that is added at two paths is uploaded once.
        """
        first = {one.path_or_fileobj: one for one in reversed(additions)}
        size = sum(one.upload_info.size for one in first.values() if _is_large(one))
        started = time.monotonic()
        self._send(list(first.values()), size)
        for one in additions:
            same = first[one.path_or_fileobj]
            if same is not one and same._is_uploaded:
                # As the client itself marks what it has uploaded. If it changes its marks, it
                # uploads it again, and finds that nothing is left to send.
                one.upload_info.sha256 = same.upload_info.sha256
                one._upload_mode, one._is_uploaded = same._upload_mode, True
        self._send(additions, size)
        return Transfer(size, time.monotonic() - started)

    def _send(self, additions: Sequence[huggingface_hub.CommitOperationAdd], size: int) -> None:
        with translate_errors(self.repo_id, BRANCH), transfer(self.timeout, size):
            # An empty gitignore, or a .gitignore in the repo would silently drop files.
            self._api.preupload_lfs_files(
                self.repo_id, additions, free_memory=False, gitignore_content=""
            )

    def commit(
        self, operations: Sequence[huggingface_hub.CommitOperation], message: str, parent: str
    ) -> str:
        """Create a commit on top of `parent`; returns its id. After an error, the outcome is open.

        If the server ignores the parent, or if its commit ids are not valid for the client (64
        digits), the commit is on top of any head: read the head just before.
        """
        accepted = constants.REGEX_COMMIT_OID.fullmatch(parent) is not None
        with self._asking():
            created = self._api.create_commit(
                self.repo_id,
                operations,
                commit_message=message,
                parent_commit=parent if accepted else None,
            )
        return str(created.oid)

    def refs(self) -> dict[str, str]:
        """The commits of all tags, of all branches but `main`, and of pull requests.

        By `tags/name`, `heads/name`, `pr/1`.
        """
        with self._asking():
            try:
                found = self._api.list_repo_refs(self.repo_id, include_pull_requests=True)
            except KeyError:  # of a server that has no pull requests
                found = self._api.list_repo_refs(self.repo_id)
        all_refs = (*found.tags, *found.branches, *found.converts, *(found.pull_requests or ()))
        refs = {one.ref.removeprefix("refs/"): one.target_commit for one in all_refs}
        refs.pop(f"heads/{BRANCH}", None)
        return refs

    def tag(self, name: str, commit: str) -> None:
        """Give a commit a tag, unless another one has it."""
        with self._asking(commit):
            self._api.create_tag(self.repo_id, tag=name, revision=commit, exist_ok=True)

    def delete_contents(self, digests: Collection[str]) -> None:
        """Delete large files for good, in all commits, by their SHA-256. The commits stay."""
        files = [_lfs_file(digest) for digest in sorted(digests)]
        with self._asking():
            self._api.permanently_delete_lfs_files(self.repo_id, files, rewrite_history=False)


@contextmanager
def _naming_cache(folder: Path | None) -> Iterator[None]:
    """Say where the client's cache is, if that is what cannot be written."""
    try:
        yield
    except OSError as error:
        if folder is not None:
            raise
        remedy = "Free some space there, or set" if is_full(error) else "Set"
        raise DiskFault(
            f"the Hub client's cache, {constants.HF_HUB_CACHE}, cannot be written: "
            f"{error.strerror}. {remedy} HF_HOME to a folder that can be written."
        ) from error


def _is_large(addition: huggingface_hub.CommitOperationAdd) -> bool:
    """Whether a file belongs in the storage for large files; smaller ones may be in git itself."""
    if not isinstance(addition.path_or_fileobj, str):
        return False
    large_type = addition.path_in_repo.endswith(".safetensors")
    return large_type or addition.upload_info.size >= LARGE_BYTES


def _lfs_file(digest: str) -> huggingface_hub.hf_api.LFSFileInfo:
    """What the client's deletion takes; it uses nothing but the digest."""
    pushed_at = "2000-01-01T00:00:00.000Z"
    return huggingface_hub.hf_api.LFSFileInfo(
        fileOid=digest, filename="", oid=digest, pushedAt=pushed_at, size=0
    )


def _digest(oid: str) -> str:
    """The hex digits of a SHA-256; some servers prefix them with `sha256:`."""
    return oid.removeprefix("sha256:").lower()
