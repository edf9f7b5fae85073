"""A model repo of the Hub as a store: one commit for each upload.

huggingface_hub, "the Hub client" in comments, has no timeouts of its own: common/hub_client.py
bounds its requests, store/errors.py translates its errors. Retries and decisions are left to the
callers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from itertools import islice
from pathlib import Path

import huggingface_hub  # imports the rest at its first use, which a run without a Hub has not
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, constants, get_token
from huggingface_hub.errors import LocalTokenNotFoundError
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from common.hub_client import deadline, hub_api, transfer
from snapshot.errors import DiskFault, SnapshotError, is_full
from store.errors import (
    REMEDY,
    NoFile,
    NoRevision,
    StoreError,
    StoreMissing,
    StoreMoved,
    StoreRefused,
    Unsupported,
    translate_errors,
)
from store.latest import LATEST
from store.records import METRICS
from store.store import BRANCH, PREFIX, Addition, Head, RemoteFile, Store, Transfer

CARD = "README.md"
MOST_FILES = 100_000
"""More than any run has; a longer listing is cut off."""
OWN_FILES = {CARD, ".gitattributes"}
"""Files that a repo may hold before a run uploads to it."""
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
COMMIT_ID = re.compile(r"[A-Za-z0-9]{5,128}")
DOWNLOADS_AT_ONCE = 8
LARGE_BYTES = 5 << 20
"""The Hub takes at most 10 MB into git itself."""


class Hub(Store):
    """One model repo. Every method raises StoreError."""

    has_commits = True

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        """`url`: `hf://owner/name`, or without the prefix."""
        super().__init__(timeout)
        self.repo_id = self.name = url.removeprefix(PREFIX)
        self.url, self.key = f"{PREFIX}{self.repo_id}", f"hub.repo_id={self.repo_id}"
        self._api = hub_api(timeout)
        self._unneeded: set[str] = set()
        """By their SHA-256, large files that a commit of ours has removed, until they are freed."""
        self._referred: dict[str, set[str]] = {}
        """The large files of commits that have a name."""

    @contextmanager
    def _asking(
        self, revision: str = BRANCH, not_found: type[StoreRefused] = Unsupported
    ) -> Iterator[None]:
        """Requests that end in time, and whose errors are of a few kinds."""
        with translate_errors(self.repo_id, revision, not_found), deadline(self.timeout):
            yield

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

    def foreign_file(self, paths: Iterable[str]) -> str | None:
        """A file that no run uploaded; None if the files are a run's, or none."""
        return super().foreign_file(set(paths) - OWN_FILES)

    def create(self, private: bool) -> None:
        """Create the repo if it does not exist."""
        with self._asking():
            self._api.create_repo(self.repo_id, private=private, exist_ok=True)

    def remove(self) -> None:
        """Remove the repo, if it exists."""
        with self._asking():
            self._api.delete_repo(self.repo_id, missing_ok=True)

    def head(self, revision: str = BRANCH, known: Head | None = None) -> Head:
        """The commit of a revision and its files; `known` where that is still the commit."""
        commit, private = self._commit_of(revision)
        if known is not None and known.token == commit and known.private == private:
            return known
        return Head(commit, private, self._files(commit))

    def _commit_of(self, revision: str = BRANCH) -> tuple[str, bool]:
        not_found = StoreMissing if revision == BRANCH else NoRevision
        with self._asking(revision, not_found):
            info = self._api.repo_info(self.repo_id, revision=revision)
        commit = str(info.sha or "")
        if COMMIT_ID.fullmatch(commit) is None:
            raise StoreRefused(
                f"{self.repo_id} has no commit id at {revision}, but {commit!r:.80}."
            )
        return commit, bool(info.private)

    def _files(self, commit: str) -> dict[str, RemoteFile]:
        with self._asking(commit, NoRevision):
            tree = self._api.list_repo_tree(self.repo_id, recursive=True, revision=commit)
            entries = list(islice(tree, MOST_FILES))
        return {
            entry.path: RemoteFile(entry.size, _digest(entry.lfs.sha256) if entry.lfs else None)
            for entry in entries
            if isinstance(entry, huggingface_hub.RepoFile)
        }

    def read(self, head: Head, path: str, most: int) -> bytes:
        """A small file, of which at most `most` bytes are read. It needs no place on a disk."""
        url = huggingface_hub.hf_hub_url(self.repo_id, path, revision=head.token)
        content = b""
        with (
            self._asking(head.token, NoFile),
            get_session().stream("GET", url, headers=build_hf_headers()) as response,
        ):
            hf_raise_for_status(response)
            for part in response.iter_bytes():
                content += part
                if len(content) > most:
                    raise StoreRefused(f"{path} of {self.repo_id} is larger than its repo lists.")
        return content

    def fetch(
        self, head: Head, paths: Collection[str], folder: Path | None, again: bool = False
    ) -> Path:
        """Download files to `folder`, or to the client's cache.

        Raises OSError for a folder that cannot be written, DiskFault for such a cache.
        """
        size = sum(head.files[path].size for path in paths)

        def download(path: str) -> Path:
            place = huggingface_hub.hf_hub_download(
                self.repo_id, path, revision=head.token, local_dir=folder, force_download=again
            )
            return Path(place.removesuffix(path))

        with (
            _naming_cache(folder),
            translate_errors(self.repo_id, head.token, NoFile),
            transfer(self.timeout, size),
            ThreadPoolExecutor(DOWNLOADS_AT_ONCE) as pool,
        ):
            contexts = [copy_context() for _ in paths]  # which have the deadline
            places = list(pool.map(lambda one, path: one.run(download, path), contexts, paths))
        return folder or places[0]

    def publish(
        self, head: Head, add: Mapping[str, Addition], delete: Collection[str], message: str
    ) -> tuple[Head, Transfer]:
        """One commit on top of `head`. Raises as `Store.publish` says."""
        if LATEST not in head.files:
            self._refuse_to_overwrite(head, add)
        for added in add.values():
            if isinstance(added.source, Path):
                added.source.stat()  # raises OSError; the client would raise ValueError
        additions = {path: CommitOperationAdd(path, added.source) for path, added in add.items()}
        transfer = self._upload_contents(additions.values())
        sent = {path: one.upload_info.sha256.hex() for path, one in additions.items()}
        for path, added in add.items():
            if added.sha256 not in (sent[path], None):
                raise SnapshotError(f"{added.source!s} is damaged: its content has changed")
        deletions = [CommitOperationDelete(path, is_folder=False) for path in sorted(delete)]
        commit = self._commit([*additions.values(), *deletions], message, head)
        files = {path: file for path, file in head.files.items() if path not in delete}
        for path, one in additions.items():
            digest = sent[path] if one._upload_mode == "lfs" else None
            files[path] = RemoteFile(one.upload_info.size, digest)
        after = Head(commit, head.private, files)
        replaced = {METRICS} & set(add) & head.files.keys()
        self._unneeded |= _digests_in({path: head.files[path] for path in (*delete, *replaced)})
        self._free(after)
        return after, transfer

    def _refuse_to_overwrite(self, head: Head, add: Collection[str]) -> None:
        """Raise StoreRefused if files are there that no latest.json says to be a run's."""
        if others := sorted(set(add) & (head.files.keys() - OWN_FILES)):
            raise StoreRefused(
                f"{self.repo_id} holds {others[0]} and no {LATEST}, so no run of this project is "
                f"known to own it. Restore {LATEST} from an earlier commit, or empty the repo.",
                "not this run's",
            )

    def _upload_contents(self, additions: Collection[CommitOperationAdd]) -> Transfer:
        """Upload the large files that the Hub does not have yet, without a commit.

        A file that is added at two paths is sent once: for the second, the Hub has its contents.
        """
        first = {one.path_or_fileobj: one for one in additions}
        size = sum(one.upload_info.size for one in first.values() if _is_large(one))
        started = time.monotonic()
        for part in (first.values(), additions):
            with translate_errors(self.repo_id, BRANCH), transfer(self.timeout, size):
                # An empty gitignore, or a .gitignore in the repo would silently drop files.
                self._api.preupload_lfs_files(
                    self.repo_id, part, free_memory=False, gitignore_content=""
                )
        return Transfer(size, time.monotonic() - started)

    def _refuse_moved(self, head: Head) -> None:
        """Raise StoreMoved unless `head` is the newest commit: the contents took a while.

        The server may not look: some ignore the parent of a commit, and the client sends no commit
        id of 64 digits.
        """
        if self._commit_of()[0] != head.token:
            raise StoreMoved(f"{self.repo_id} has moved on meanwhile", "moved on")

    def _commit(
        self, operations: list[huggingface_hub.CommitOperation], message: str, head: Head
    ) -> str:
        """Create a commit on top of `head`, without the card if the Hub refuses it with that."""
        self._refuse_moved(head)
        accepted = constants.REGEX_COMMIT_OID.fullmatch(head.token) is not None
        try:
            with self._asking():
                created = self._api.create_commit(
                    self.repo_id,
                    operations,
                    commit_message=message,
                    parent_commit=head.token if accepted else None,
                )
            return str(created.oid)
        except StoreRefused:
            rest = [one for one in operations if one.path_in_repo != CARD]
            if len(rest) == len(operations):
                raise
            return self._commit(rest, message, head)

    def tag(self, name: str, head: Head) -> None:
        """Give a commit a tag, unless another one has it."""
        with self._asking(head.token):
            self._api.create_tag(self.repo_id, tag=name, revision=head.token, exist_ok=True)

    def _free(self, head: Head) -> None:
        """Delete contents that the newest commit removed, for good. Raises nothing.

        What a tag, another branch or a pull request refers to stays. What fails is tried again
        after the next upload.
        """
        try:
            if self._unneeded and self._commit_of()[0] == head.token:  # or others may need them
                self._unneeded -= _digests_in(head.files)
                for commit in self._refs() if self._unneeded else ():
                    if commit not in self._referred:
                        self._referred[commit] = _digests_in(self._files(commit))
                    self._unneeded -= self._referred[commit]
                if self._unneeded:
                    self._delete_contents(self._unneeded)
                self._unneeded.clear()
        except StoreRefused as error:
            self.note(
                f"files of pruned snapshots still use storage of {self.repo_id}: {error.reason}. "
                "Uploads continue; HfApi().super_squash_history(repo) frees it where the server "
                "can."
            )
        except StoreError:
            pass  # the next upload tries again

    def _refs(self) -> set[str]:
        """The commits of all tags, of all branches but `main`, and of pull requests."""
        with self._asking():
            try:
                refs = self._api.list_repo_refs(self.repo_id, include_pull_requests=True)
            except KeyError:  # of a server that has no pull requests
                refs = self._api.list_repo_refs(self.repo_id)
        all_refs = (*refs.tags, *refs.branches, *refs.converts, *(refs.pull_requests or ()))
        return {one.target_commit for one in all_refs if one.ref != f"refs/heads/{BRANCH}"}

    def _delete_contents(self, digests: Collection[str]) -> None:
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


def _is_large(addition: CommitOperationAdd) -> bool:
    """Whether a file belongs in the storage for large files; smaller ones may be in git itself."""
    if not isinstance(addition.path_or_fileobj, str):
        return False
    large_type = addition.path_in_repo.endswith(".safetensors")
    return large_type or addition.upload_info.size >= LARGE_BYTES


def _digests_in(files: Mapping[str, RemoteFile]) -> set[str]:
    return {file.sha256 for file in files.values() if file.sha256 is not None}


def _lfs_file(digest: str) -> huggingface_hub.hf_api.LFSFileInfo:
    """What the client's deletion takes; it uses nothing but the digest."""
    pushed_at = "2000-01-01T00:00:00.000Z"
    return huggingface_hub.hf_api.LFSFileInfo(
        fileOid=digest, filename="", oid=digest, pushedAt=pushed_at, size=0
    )


def _digest(oid: str) -> str:
    """The hex digits of a SHA-256; some servers prefix them with `sha256:`."""
    return oid.removeprefix("sha256:").lower()
