"""What the loopback Hub keeps: repos with their commits, buckets, and their contents. No HTTP.

A commit is immutable and lists all its files. Nothing large is ever held in memory. Every method
may be called from several threads.
"""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from loopback_server import Refusal

MAIN = "main"
BUCKETS = "buckets/"
"""Before the name of a bucket."""


class Contents:
    """Contents below a folder, each in a file named by its SHA-256.

    A large one counts as there only when it was uploaded as such.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._incoming = folder / "contents", folder / "incoming"
        for place in (self._folder, self._incoming):
            place.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._large: set[str] = set()

    def path(self, sha256: str) -> Path:
        """Where a content lies, if it is there."""
        return self._folder / sha256

    def size_of_large(self, sha256: str) -> int | None:
        """The size of an uploaded content; None where it was not uploaded."""
        with self._lock:
            return self.path(sha256).stat().st_size if sha256 in self._large else None

    def bytes_of_large(self) -> int:
        """What is stored of uploaded contents, needed or not."""
        with self._lock:
            return sum(self.path(sha256).stat().st_size for sha256 in self._large)

    def forget(self, sha256: str) -> None:
        """Delete an uploaded content, whichever commits have it."""
        with self._lock:
            if sha256 in self._large:
                self._large.remove(sha256)
                self.path(sha256).unlink()

    def keep(self, content: bytes) -> str:
        """Keep a small content; its SHA-256."""
        sha256 = hashlib.sha256(content).hexdigest()
        if not self.path(sha256).exists():
            self._write([content], hashlib.sha256()).replace(self.path(sha256))
        return sha256

    def receive(self, sha256: str, blocks: Iterable[bytes]) -> None:
        """Keep a large content as it comes in. Raises Refusal where its name is another's."""
        found = hashlib.sha256()
        partial = self._write(blocks, found)
        if found.hexdigest() != sha256:
            partial.unlink()
            raise Refusal(400, f"The content is not that of {sha256}", "BadDigest")
        with self._lock:
            partial.replace(self.path(sha256))
            self._large.add(sha256)

    def _write(self, blocks: Iterable[bytes], found: hashlib._Hash) -> Path:
        partial = self._incoming / uuid.uuid4().hex
        try:
            with partial.open("wb") as file:
                for block in blocks:
                    found.update(block)
                    file.write(block)
        except BaseException:
            partial.unlink()
            raise
        return partial


def git_oid(content: bytes) -> str:
    """The name git gives to a content."""
    blob = b"blob %d\0%b" % (len(content), content)
    return hashlib.sha1(blob, usedforsecurity=False).hexdigest()


def pointer(sha256: str, size: int) -> bytes:
    """What stands in git for a large content."""
    return (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    )


@dataclass(frozen=True)
class Entry:
    """A file of a commit."""

    size: int
    sha256: str
    git_oid: str
    is_lfs: bool

    @property
    def etag(self) -> str:
        """What the client compares to know whether it has the content."""
        return self.sha256 if self.is_lfs else self.git_oid


@dataclass(frozen=True)
class Commit:
    """A state of a repo, and how it came about."""

    id: str
    parent: str | None
    title: str
    message: str
    author: str
    date: datetime
    files: dict[str, Entry] = field(repr=False)


@dataclass(frozen=True)
class Add:
    """Put a content into git itself."""

    path: str
    content: bytes = field(repr=False)


@dataclass(frozen=True)
class AddLarge:
    """Point at a content that was uploaded before."""

    path: str
    sha256: str
    size: int | None = None


@dataclass(frozen=True)
class Delete:
    """Take a file away, or all files of a folder."""

    path: str
    is_folder: bool = False


Operation = Add | AddLarge | Delete


class Repo:
    """One model repo. Commits are named by their ids, 40 hexadecimal digits."""

    def __init__(self, repo_id: str, folder: Path, private: bool) -> None:
        self.id, self.private = repo_id, private
        self.gated = False
        """Whether everybody sees what files there are, and nobody may read them."""
        self.owner = repo_id.split("/")[-2]
        self.contents = Contents(folder)
        self._lock = threading.RLock()
        self._commits: dict[str, Commit] = {}
        self._visible: set[str] = set()
        """Commits that a branch or a tag leads to; the others are kept for the tests alone."""
        self._heads: list[str] = []
        self._branches: dict[str, str] = {}
        self._tags: dict[str, str] = {}
        files = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}
        if repo_id.startswith("spaces/"):  # as a Space begins
            files |= {"README.md": b""}
        stored = {path: self._store(Add(path, content)) for path, content in files.items()}
        self._move(MAIN, self._record(stored, None, "initial commit"))

    # What tests read. A revision is a commit, a branch or a tag.

    @property
    def head(self) -> str:
        """The commit that main is at."""
        with self._lock:
            return self._branches[MAIN]

    @property
    def commits(self) -> list[str]:
        """The history of main, oldest first."""
        return [commit.id for commit in self.history(self.commit(MAIN))][::-1]

    @property
    def every_head(self) -> list[str]:
        """What main was ever at, in order."""
        with self._lock:
            return list(self._heads)

    @property
    def branches(self) -> dict[str, str]:
        """The branches, each with its commit."""
        with self._lock:
            return dict(self._branches)

    @property
    def tags(self) -> dict[str, str]:
        """The tags, each with its commit."""
        with self._lock:
            return dict(self._tags)

    def commit(self, revision: str) -> Commit:
        """A commit. Raises KeyError."""
        with self._lock:
            name = self._branches.get(revision) or self._tags.get(revision) or revision
            return self._commits[name]

    def files(self, revision: str) -> dict[str, Entry]:
        """The files of a commit by path."""
        return dict(self.commit(revision).files)

    def read(self, revision: str, path: str) -> bytes:
        """The content of a file."""
        return self.contents.path(self.commit(revision).files[path].sha256).read_bytes()

    # What clients ask for.

    def resolve(self, revision: str, stale: bool = False) -> Commit:
        """The commit a client means; with `stale`, main as it was one commit ago."""
        with self._lock:
            revision = revision.removeprefix("refs/heads/").removeprefix("refs/tags/")
            if revision == MAIN and stale:
                return self._commits[self._heads[-2:][0]]
            name = self._branches.get(revision) or self._tags.get(revision) or revision
            if name not in self._visible:
                raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
            return self._commits[name]

    def history(self, commit: Commit) -> Iterator[Commit]:
        """A commit and those before it."""
        yield commit
        while commit.parent is not None:
            commit = self._commits[commit.parent]
            yield commit

    def oid_of_folder(self, commit: Commit, path: str) -> str:
        """A name for what a folder of a commit holds."""
        below = {name: entry.git_oid for name, entry in _below(commit, path).items()}
        return git_oid(json.dumps(below, sort_keys=True).encode())

    def apply(
        self,
        branch: str,
        operations: Iterable[Operation],
        title: str,
        *,
        message: str = "",
        author: str = "",
        parent: str | None = None,
    ) -> Commit:
        """All operations in one commit on top of a branch, or none of them.

        With `parent`, only if the branch is still there (412).
        """
        operations = list(operations)
        for operation in operations:
            _check_path(operation)
        with self._lock:
            if branch not in self._branches:
                raise Refusal(404, f"Invalid rev id: {branch}", "RevisionNotFound")
            head = self._commits[self._branches[branch]]
            if parent is not None and parent != head.id:
                raise Refusal(412, "A commit has happened since. Please refresh and try again.")
            files = dict(head.files)
            for operation in operations:
                self._change(files, operation)
            commit = self._record(files, head.id, title, message, author)
            self._move(branch, commit)
            return commit

    def create_branch(self, name: str, start: str = MAIN) -> None:
        """A branch from a revision."""
        with self._lock:
            if name in self._branches:
                raise Refusal(409, f"Reference already exists: {name}")
            self._move(name, self.resolve(start))

    def create_tag(self, name: str, revision: str) -> None:
        """A name for a commit."""
        with self._lock:
            if name in self._tags:
                raise Refusal(409, f"Tag reference already exists: {name}")
            self._tags[name] = self.resolve(revision).id

    def _change(self, files: dict[str, Entry], operation: Operation) -> None:
        if isinstance(operation, Delete):
            gone = [path for path in files if _is_meant(operation, path)]
            if not gone:
                raise Refusal(400, f"A file with this name doesn't exist: {operation.path}")
            for path in gone:
                del files[path]
        else:
            files[operation.path] = self._store(operation)

    def _store(self, operation: Add | AddLarge) -> Entry:
        if isinstance(operation, Add):
            content = operation.content
            sha256 = self.contents.keep(content)
            return Entry(len(content), sha256, git_oid(content), is_lfs=False)
        size = self.contents.size_of_large(operation.sha256)
        if size is None or operation.size not in (None, size):
            raise Refusal(400, f"{operation.path}: {operation.sha256} was not uploaded like this")
        return Entry(size, operation.sha256, git_oid(pointer(operation.sha256, size)), is_lfs=True)

    def _record(
        self,
        files: dict[str, Entry],
        parent: str | None,
        title: str,
        message: str = "",
        author: str = "",
    ) -> Commit:
        oids = {path: entry.git_oid for path, entry in sorted(files.items())}
        # Their number keeps apart what is the same: a commit twice, a branch that goes alike.
        content = json.dumps([oids, parent, title, message, author, len(self._commits)])
        oid = hashlib.sha1(content.encode(), usedforsecurity=False).hexdigest()
        author = author or self.owner
        commit = Commit(oid, parent, title, message, author, datetime.now(UTC), files)
        self._commits[oid] = commit
        return commit

    def _move(self, branch: str, commit: Commit) -> None:
        self._branches[branch] = commit.id
        if branch == MAIN:
            self._heads.append(commit.id)
        if commit.parent in self._visible:
            self._visible.add(commit.id)
        else:
            self._see()

    def _see(self) -> None:
        refs = {*self._branches.values(), *self._tags.values()}
        self._visible = {commit.id for ref in refs for commit in self.history(self._commits[ref])}


def _below(commit: Commit, path: str) -> dict[str, Entry]:
    return {
        name: entry
        for name, entry in commit.files.items()
        if name == path or name.startswith(f"{path}/")
    }


def _is_meant(operation: Delete, path: str) -> bool:
    if operation.is_folder:
        return path.startswith(operation.path.rstrip("/") + "/")
    return path == operation.path


def _check_path(operation: Operation) -> None:
    path = operation.path
    if isinstance(operation, Delete) and operation.is_folder:
        path = path.removesuffix("/")
    bad = any(part in ("", ".", "..", ".git") for part in path.split("/"))
    if bad or "\\" in path or "\0" in path:
        raise Refusal(400, f"Invalid path: {path!r}")


@dataclass(frozen=True)
class Stored:
    """A file of a bucket."""

    size: int
    xet_hash: str
    sha256: str


class Bucket:
    """One bucket, files without commits; its id begins with `BUCKETS`."""

    def __init__(self, bucket_id: str, folder: Path, private: bool) -> None:
        self.id, self.private = bucket_id, private
        self.owner = bucket_id.split("/")[-2]
        self.created = datetime.now(UTC)
        self.contents = Contents(folder)
        self._lock = threading.RLock()
        self._files: dict[str, Stored] = {}

    @property
    def files(self) -> dict[str, Stored]:
        """The files by path."""
        with self._lock:
            return dict(self._files)

    def read(self, path: str) -> bytes:
        """The content of a file."""
        return self.contents.path(self.files[path].sha256).read_bytes()

    def put(self, path: str, stored: Stored | None) -> None:
        """Add or replace a file, or remove it; None for the latter."""
        with self._lock:
            if stored is None:
                self._files.pop(path, None)
            else:
                self._files[path] = stored
