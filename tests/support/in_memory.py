"""Both kinds of store in this process's memory, with faults at any request: no HTTP, no disk.

What runs on them is the shipped code of an attempt: only the requests are answered here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import huggingface_hub

from store.errors import NoFile, StoreMoved, StoreUnreachable
from store.files import Files
from store.hub import Hub
from store.latest import LATEST, Latest, folders_in, read_latest
from store.store import BRANCH, Contents, RemoteFile, Store

NAME = "me/run"
Content = dict[str, bytes]
FAULTS = ("fails", "answer is lost", "killed before", "killed after", "stale", "paused")


class Killed(BaseException):
    """The process of the attempt is gone."""


@dataclass
class Fault:
    """What goes wrong at the request of that number, from 1."""

    kind: str
    at: int
    then: Callable[[], object] = lambda: None
    """What others do while the attempt is paused."""


@dataclass
class Shared:
    """What is stored, as it was after each change; every attempt has a client of its own."""

    versions: list[Content] = field(default_factory=lambda: [{}])
    on_delete: Callable[[str, Content, set[str]], None] = lambda attempt, before, paths: None
    """Called with the attempt that deletes, what was there, and the paths."""
    written: list[tuple[Latest, bool]] = field(default_factory=list)
    """Every latest.json, and whether its attempt was paused, or read stale state, before."""

    @property
    def now(self) -> Content:
        return self.versions[-1]

    def change(self, attempt: str, add: Content, delete: set[str], disturbed: bool) -> None:
        if delete:
            self.on_delete(attempt, self.now, delete)
        left = {path: content for path, content in self.now.items() if path not in delete}
        self.versions.append({**left, **add})
        if LATEST in add:
            self.written.append((read_latest(add[LATEST], NAME), disturbed))

    def whole(self) -> set[str]:
        """The folders that have a manifest."""
        return set(folders_in(self.now))


class Client:
    """What the requests of one attempt have in common."""

    shared: Shared
    attempt = ""
    fault: Fault | None = None
    requests = 0
    behind = 0
    """How many changes the store is behind, for this client's reads."""
    disturbed = False

    def begin(self, fault: Fault | None) -> None:
        """The requests of an upload follow."""
        self.fault, self.requests, self.behind, self.disturbed = fault, 0, 0, False

    def answer(self, apply: Callable[[], object]):
        """The answer to a request, unless it is the one with a fault."""
        self.requests += 1
        fault = self.fault
        if fault is None or self.requests != fault.at:
            return apply()
        self.disturbed |= fault.kind in ("stale", "paused")
        if fault.kind == "stale":
            self.behind = 3
        if fault.kind == "paused":
            fault.then()
        if fault.kind == "killed before":
            raise Killed
        if fault.kind == "fails":
            raise StoreUnreachable("the store cannot be reached")
        answer = apply()
        if fault.kind == "killed after":
            raise Killed
        if fault.kind == "answer is lost":
            raise StoreUnreachable("the answer is lost")
        return answer

    def seen(self) -> int:
        """The number of the version that a read shows."""
        return max(0, len(self.shared.versions) - 1 - self.behind)


class MemoryRepo(Client, Hub):
    """A repo of the Hub; its commits are the versions."""

    def __init__(self, shared: Shared, attempt: str = "") -> None:
        Store.__init__(self, 5.0)
        self.repo_id = self.name = NAME
        self.shared, self.attempt, self._unneeded = shared, attempt, set()

    def create(self, private: bool) -> None:
        self.answer(lambda: None)

    def _commit_of(self, revision: str = BRANCH) -> tuple[str, bool]:
        return self.answer(lambda: (f"{self.seen():040x}", True))

    def _files(self, commit: str) -> dict[str, RemoteFile]:
        content = self.shared.versions[int(commit, 16)]
        return self.answer(lambda: {path: listed(one, True) for path, one in content.items()})

    def read_small(self, head: Contents, path: str) -> bytes:
        return self.answer(lambda: self.shared.versions[int(head.token, 16)][path])

    def _upload_contents(self, additions) -> None:
        self.answer(lambda: None)

    def _commit(self, operations, message: str, head: Contents) -> str:
        add, delete = {}, set()
        for one in operations:
            if isinstance(one, huggingface_hub.CommitOperationAdd):
                source = one.path_or_fileobj
                content = source if isinstance(source, bytes) else Path(source).read_bytes()
                add[one.path_in_repo] = content
            else:
                delete.add(one.path_in_repo)

        def apply() -> str:
            if int(head.token, 16) != len(self.shared.versions) - 1:
                raise StoreMoved("the head has moved", "HTTP 412")
            self.shared.change(self.attempt, add, delete, self.disturbed)
            self.behind = 0
            return f"{len(self.shared.versions) - 1:040x}"

        return self.answer(apply)

    def tag(self, name: str, head: Contents) -> None:
        pass

    def _refs(self) -> set[str]:
        return set()

    def _delete_contents(self, digests) -> None:
        pass


class MemoryFiles(Client, Files):
    """A store of files: each write and each deletion is a version."""

    name, key = NAME, f"hub.url={NAME}"

    def __init__(self, shared: Shared, attempt: str = "") -> None:
        Store.__init__(self, 5.0)
        self.shared, self.attempt = shared, attempt

    def create(self, private: bool) -> None:
        self.answer(lambda: None)

    def list_files(self) -> dict[str, int]:
        return self.answer(
            lambda: {path: len(one) for path, one in self.shared.versions[self.seen()].items()}
        )

    def read_small(self, head: Contents, path: str) -> bytes:
        def apply() -> bytes:
            try:
                return self.shared.versions[self.seen()][path]
            except KeyError:
                raise NoFile(f"{path} is gone") from None

        return self.answer(apply)

    def write(self, path: str, source: Path | bytes) -> None:
        content = source if isinstance(source, bytes) else source.read_bytes()

        def apply() -> None:
            self.shared.change(self.attempt, {path: content}, set(), self.disturbed)
            self.behind = 0

        self.answer(apply)

    def delete(self, path: str) -> None:
        if path not in self.shared.now:
            raise NoFile(f"{path} is gone")
        self.answer(lambda: self.shared.change(self.attempt, {}, {path}, False))


def listed(content: bytes, with_digest: bool) -> RemoteFile:
    """A file as a store lists it: one of files does not tell its hash."""
    return RemoteFile(len(content), hashlib.sha256(content).hexdigest() if with_digest else None)


KINDS: dict[str, Callable[[Shared, str], Store]] = {"repo": MemoryRepo, "files": MemoryFiles}
