"""A model repo of the Hub as a store: one commit for each upload."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Semaphore

import huggingface_hub  # imports the rest at its first use, which a run without a Hub has not
from huggingface_hub import CommitOperationAdd, CommitOperationDelete
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from common.hub_client import hub_api, open_xet_session
from common.retries import in_background
from snapshot.errors import SnapshotError
from store.errors import REMEDY, StoreError, StoreRefused
from store.latest import METRICS
from store.store import BRANCH, PREFIX, Addition, Contents, RemoteFile, Store

CARD = "README.md"
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
DOWNLOADS_AT_ONCE = 8


class Hub(Store):
    """One model repo."""

    has_commits = True
    server = "the Hub"

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

    def check_token(self) -> None:
        """Raise StoreRefused if there is no token, or a read-only one."""
        who = self.ask(self._api.whoami)
        token = (who.get("auth") or {}).get("accessToken") or {}
        if token.get("role") == "read":
            raise StoreRefused(
                f"the token of {who.get('name')} is read-only, but the run writes to "
                f"{self.name}. {REMEDY}"
            )

    def create(self, private: bool) -> None:
        """Create the repo if it does not exist."""
        self.ask(partial(self._api.create_repo, self.repo_id, private=private, exist_ok=True))

    def remove(self) -> None:
        """Remove the repo, if it exists."""
        self.ask(partial(self._api.delete_repo, self.repo_id, missing_ok=True))

    def head(self, revision: str = BRANCH, known: Contents | None = None) -> Contents:
        """The commit of a revision and its files; `known` where that is still the commit."""
        commit, private = self._commit_of(revision)
        if known is not None and (known.token, known.private) == (commit, private):
            return known
        return Contents(self, commit, private, self._files(commit)).with_latest()

    def _commit_of(self, revision: str = BRANCH) -> tuple[str, bool]:
        info = self.ask(partial(self._api.repo_info, self.repo_id, revision=revision))
        return str(info.sha), bool(info.private)

    def _files(self, commit: str) -> dict[str, RemoteFile]:
        tree = partial(self._api.list_repo_tree, self.repo_id, recursive=True, revision=commit)
        return {
            entry.path: RemoteFile(entry.size, entry.lfs.sha256 if entry.lfs else None)
            for entry in self.ask(lambda: list(tree()))
            if isinstance(entry, huggingface_hub.RepoFile)
        }

    def read_small(self, head: Contents, path: str) -> bytes:
        """A file, without a place on a disk."""
        url = huggingface_hub.hf_hub_url(self.repo_id, path, revision=head.token)

        def content() -> bytes:
            response = get_session().get(url, headers=build_hf_headers(), follow_redirects=True)
            hf_raise_for_status(response)
            return bytes(response.content)

        return self.ask(content)

    def fetch(
        self, head: Contents, paths: Collection[str], folder: Path | None, again: bool = False
    ) -> Path:
        """Download files to `folder`, or to the client's cache."""
        slots = Semaphore(DOWNLOADS_AT_ONCE)

        def download(path: str) -> Path:
            with slots:
                place = huggingface_hub.hf_hub_download(
                    self.repo_id, path, revision=head.token, local_dir=folder, force_download=again
                )
            return Path(place.removesuffix(path))

        def download_all() -> list[Path]:
            started = [in_background(partial(download, path)) for path in paths]
            wait(started)  # the next try must not meet one that is still under way
            return [one.result() for one in started]

        open_xet_session()
        size = sum(head.files[path].size for path in paths)
        places = self.ask(download_all, size, downloads=True)
        return folder or places[0]

    def publish(
        self, head: Contents, add: Mapping[str, Addition], delete: Collection[str], message: str
    ) -> Contents:
        """One commit on top of `head`. Raises as `Store.publish` says."""
        for added in add.values():
            if isinstance(added.source, Path):
                added.source.stat()  # raises OSError; the client would raise ValueError
        additions = {path: CommitOperationAdd(path, added.source) for path, added in add.items()}
        self._upload_contents(additions.values())
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
        after = replace(head, token=commit, files=files)
        replaced = {METRICS} & set(add) & head.files.keys()
        self._unneeded |= _digests_in({path: head.files[path] for path in (*delete, *replaced)})
        self._free(after)
        return after

    def _upload_contents(self, additions: Collection[CommitOperationAdd]) -> None:
        """Upload the large files that the Hub does not have yet, without a commit.

        A file that is added at two paths is sent once: for the second, the Hub has its contents.
        """
        first = {one.path_or_fileobj: one for one in additions}.values()
        size = sum(one.upload_info.size for one in first)
        open_xet_session()
        for part in (first, additions):
            # An empty gitignore, or a .gitignore in the repo would silently drop files.
            upload = partial(self._api.preupload_lfs_files, self.repo_id, part)
            self.ask(partial(upload, free_memory=False, gitignore_content=""), size)

    def _commit(
        self, operations: list[huggingface_hub.CommitOperation], message: str, head: Contents
    ) -> str:
        """Create a commit on top of `head`; its id. Raises StoreMoved if that is not the newest.

        The Hub refuses a card with fields that it does not know, and must not refuse a snapshot for
        that: what is refused is tried once more without the card.
        """

        def commit(operations: list[huggingface_hub.CommitOperation]) -> str:
            create = partial(self._api.create_commit, self.repo_id, operations)
            request = partial(create, commit_message=message, parent_commit=head.token)
            return str(self.ask(request).oid)

        rest = [one for one in operations if one.path_in_repo != CARD]
        try:
            return commit(operations)
        except StoreRefused as error:
            if len(rest) == len(operations):
                raise
            made = commit(rest)
            self.note(
                f"{CARD} is not uploaded: {error.reason}. Snapshots are; to mend it, check "
                "hub.license and hub.language."
            )
            return made

    def tag(self, name: str, head: Contents) -> None:
        """Give a commit a tag, unless another one has it."""
        tag = partial(self._api.create_tag, self.repo_id, tag=name, revision=head.token)
        self.ask(partial(tag, exist_ok=True))

    def _free(self, head: Contents) -> None:
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
                "Uploads continue; HfApi().super_squash_history(repo) frees it."
            )
        except StoreError:
            pass  # the next upload tries again

    def _refs(self) -> set[str]:
        """The commits of all tags, of all branches but `main`, and of pull requests."""
        refs = self.ask(partial(self._api.list_repo_refs, self.repo_id, include_pull_requests=True))
        all_refs = (*refs.tags, *refs.branches, *refs.converts, *(refs.pull_requests or ()))
        return {one.target_commit for one in all_refs if one.ref != f"refs/heads/{BRANCH}"}

    def _delete_contents(self, digests: Collection[str]) -> None:
        # Of a file, the client uses nothing but the digest.
        rest = {"filename": "", "pushedAt": "2000-01-01T00:00:00.000Z", "size": 0}
        files = [
            huggingface_hub.hf_api.LFSFileInfo(fileOid=digest, oid=digest, **rest)
            for digest in sorted(digests)
        ]
        delete = partial(self._api.permanently_delete_lfs_files, self.repo_id, files)
        self.ask(partial(delete, rewrite_history=False))


def _digests_in(files: Mapping[str, RemoteFile]) -> set[str]:
    return {file.sha256 for file in files.values() if file.sha256 is not None}
