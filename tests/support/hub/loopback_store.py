"""What the loopback Hub keeps: repos with their commits, and buckets. No HTTP.

A commit is immutable and lists all its files. All is in memory, so it is for small models.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from loopback_server import Refusal

MAIN = "main"
BUCKETS = "buckets/"
"""Before the name of a bucket."""


@dataclass(frozen=True)
class Entry:
    """A file of a commit."""

    size: int
    sha256: str
    git_oid: str
    content: bytes | None = field(default=None, repr=False)
    """None for a large one, which is among those that the repo has received."""

    @property
    def is_lfs(self) -> bool:
        """Whether it is a large file."""
        return self.content is None

    @property
    def etag(self) -> str:
        """What the client compares to know whether it has the content."""
        return self.sha256 if self.is_lfs else self.git_oid


def small(content: bytes) -> Entry:
    """A file in git itself."""
    return Entry(len(content), sha256_of(content), git_oid(content), content)


def git_oid(content: bytes) -> str:
    """The name git gives to a content."""
    blob = b"blob %d\0%b" % (len(content), content)
    return hashlib.sha1(blob, usedforsecurity=False).hexdigest()


def sha256_of(content: bytes) -> str:
    """The name of a large content."""
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Commit:
    """A state of a repo."""

    id: str
    date: datetime
    files: dict[str, Entry] = field(repr=False)


class Contents:
    """What a repo or a bucket has received as large files, by SHA-256."""

    def __init__(self, name: str, private: bool) -> None:
        self.id, self.private = name, private
        self.owner = name.split("/")[-2]
        self.large: dict[str, bytes] = {}

    def receive(self, sha256: str, content: bytes) -> None:
        """Keep a large content. Raises Refusal where its name is another's."""
        if sha256_of(content) != sha256:
            raise Refusal(400, f"The content is not that of {sha256}", "BadDigest")
        self.large[sha256] = content

    def bytes_of_large(self) -> int:
        """What is stored of large contents, needed or not."""
        return sum(map(len, self.large.values()))


class Repo(Contents):
    """One repo. Commits are named by their ids, 40 hexadecimal digits."""

    def __init__(self, repo_id: str, private: bool) -> None:
        super().__init__(repo_id, private)
        self.gated = False
        """Whether everybody sees what files there are, and nobody may read them."""
        self.branches: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.every_head: list[str] = []
        """What main was ever at, in order."""
        self._commits: dict[str, Commit] = {}
        files = {".gitattributes": small(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n")}
        self._commit(MAIN, files)

    # A revision is a commit, a branch or a tag.

    @property
    def head(self) -> str:
        """The commit that main is at."""
        return self.branches[MAIN]

    def commit(self, revision: str) -> Commit:
        """A commit. Raises Refusal where there is none."""
        name = self.branches.get(revision) or self.tags.get(revision) or revision
        if name not in self._commits:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self._commits[name]

    def files(self, revision: str) -> dict[str, Entry]:
        """The files of a commit by path."""
        return dict(self.commit(revision).files)

    def content(self, entry: Entry) -> bytes:
        """The content of a file."""
        return self.large[entry.sha256] if entry.content is None else entry.content

    def read(self, revision: str, path: str) -> bytes:
        """The content of a file of a commit."""
        return self.content(self.commit(revision).files[path])

    def uploaded(self, path: str, sha256: str, size: int | None) -> Entry:
        """A file of a large content. Raises Refusal where that was not uploaded before."""
        content = self.large.get(sha256)
        if content is None or size not in (None, len(content)):
            raise Refusal(400, f"{path}: {sha256} was not uploaded like this")
        return Entry(len(content), sha256, git_oid(f"pointer to {sha256}".encode()))

    def apply(
        self, branch: str, changes: Mapping[str, Entry | None], parent: str | None = None
    ) -> str:
        """All changes in one commit on top of a branch, or none; None removes a file. Its id.

        With `parent`, only if the branch is still there (412). A path that ends in / is a folder's.
        """
        if branch not in self.branches:
            raise Refusal(404, f"Invalid rev id: {branch}", "RevisionNotFound")
        head = self.branches[branch]
        if parent not in (None, head):
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        files = self.files(head)
        for path, entry in changes.items():
            if {"", ".", "..", ".git"} & {*path.removesuffix("/").split("/")}:
                raise Refusal(400, f"Invalid path: {path!a}")
            if entry is not None:
                files[path] = entry
                continue
            is_folder = path.endswith("/")
            gone = [one for one in files if (one.startswith(path) if is_folder else one == path)]
            if not gone:
                raise Refusal(400, f"A file with this name doesn't exist: {path!a}")
            for one in gone:
                del files[one]
        return self._commit(branch, files)

    def _commit(self, branch: str, files: dict[str, Entry]) -> str:
        commit = Commit(secrets.token_hex(20), datetime.now(UTC), files)
        self._commits[commit.id] = commit
        self.branches[branch] = commit.id
        if branch == MAIN:
            self.every_head.append(commit.id)
        return commit.id


@dataclass(frozen=True)
class Stored:
    """A file of a bucket."""

    size: int
    xet_hash: str
    sha256: str


class Bucket(Contents):
    """One bucket, files without commits; its id begins with `BUCKETS`."""

    def __init__(self, bucket_id: str, private: bool) -> None:
        super().__init__(bucket_id, private)
        self.created = datetime.now(UTC)
        self.files: dict[str, Stored] = {}

    def read(self, path: str) -> bytes:
        """The content of a file."""
        return self.large[self.files[path].sha256]
