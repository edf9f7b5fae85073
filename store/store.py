"""What is asked of a store: a place away from this disk, where a run keeps its snapshots.

A start reads it, and the uploads of an attempt publish to it (store/attempt.py). Another kind of
store is a class like this one and a row of `KINDS` in store/kinds.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.utils._xet import abort_xet_session

from common.failures import NO_ANSWER, Unanswered
from common.retries import Answer, in_background
from snapshot.errors import SnapshotError
from store.errors import disk_error, translate
from store.latest import (
    LATEST,
    WRITTEN_BY_010,
    Latest,
    folders_in,
    foreign_file,
    read_latest,
    remote_step,
)

BRANCH = "main"
LARGEST_JSON_BYTES = 4 << 20
"""Of latest.json and of a manifest."""
PREFIX = "hf://"
"""A prefix that marks a name as one of the Hub, whatever this disk holds."""
SLOWEST_BYTES_PER_SECOND = 250_000
"""A transfer may last as long as its bytes need at this speed, and the timeout of a request."""
REPEAT_SECONDS = 2.0
"""The same for requests without bytes: the Hub client repeats after a second what was reset."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a store, as listed."""

    size: int
    sha256: str | None = None
    """None where the store does not tell."""


@dataclass(frozen=True)
class Contents:
    """What a store holds at one moment."""

    store: Store
    token: str
    """Changes when something is published: the commit of a repo; else by `with_latest`."""
    private: bool
    files: Mapping[str, RemoteFile]
    """By path."""
    latest: Latest | None = None
    """Its latest.json; None if there is none, or it is not valid."""
    fault: str | None = None
    """What is wrong with its latest.json, if anything."""
    revision: str = BRANCH
    """The branch, tag or commit that was read, or the only snapshot of it that counts."""

    @property
    def commit(self) -> str:
        """Of a repo; empty for a store without commits."""
        return self.token if self.store.has_commits else ""

    @property
    def name(self) -> str:
        """Store and commit, for messages."""
        return f"{self.store.name}@{self.commit[:8]}".rstrip("@")

    def pinned(self, folder: str) -> str:
        """A name by which any machine finds this snapshot: by its commit, or by its folder."""
        by_commit = self.commit and self.revision != folder
        return f"{self.store.url}@{self.commit if by_commit else folder}"

    def folders(self) -> list[str]:
        """Its snapshot folders, the one of latest.json first, then the newest first."""
        newest = "" if self.latest is None else self.latest.folder
        return sorted(folders_in(self.files), key=lambda folder: folder != newest)

    def with_latest(self) -> Contents:
        """The same with what latest.json says; without a token, that is its hash.

        Raises StoreError.
        """
        if LATEST not in self.files:
            return self
        try:
            content = self.store.read(self, LATEST)
            latest = read_latest(content, self.store.name)
        except SnapshotError as error:
            return replace(self, token=self.token or str(error), fault=str(error))
        if latest.best_step not in map(remote_step, folders_in(self.files)):  # somebody removed it
            latest = replace(latest, best_step=0, best_loss=None)
        return replace(self, token=self.token or sha256(content).hexdigest(), latest=latest)

    def refusal(self) -> str | None:
        """Why a run may not use the store: it holds something that no run uploaded.

        None if the store belongs to a run, or is new.
        """
        if self.fault is not None:
            remedy = (
                "so no run of this project is known to own it. Name one that is new or empty. If a "
                "run owns it, restore that file, or continue from its snapshots with "
                f"snapshot.resume={self.store.url}, another run.name and a new store"
            )
            if WRITTEN_BY_010 in self.fault:
                remedy = "and name another store"
            return f"{self.store.key} cannot be used: {self.fault}, {remedy}."
        if foreign := foreign_file(self.files, self.store.has_commits):
            return (
                f"{self.store.key} holds {foreign}, which no run of this project uploaded. Name "
                "one that is new or empty, or move that file away."
            )
        return None


@dataclass(frozen=True)
class Addition:
    """A file to publish."""

    source: Path | bytes
    sha256: str | None = None
    """What must be sent, as the snapshot's manifest says; None for any content."""


class Store(ABC):
    """A store. Every method raises StoreError, and OSError for a fault of this machine's disk."""

    name: str
    """What messages call it."""
    server: str
    """Who answers for it, for messages."""
    url: str
    """What names it in `snapshot.resume`, as in `hf://me/run`."""
    key: str
    """The configuration key and value that name it."""
    has_commits = False
    """Whether it is a repo: an upload is one commit, and people look at its top as at a model."""
    folder: Path | None = None
    """Where it lies, if that is a disk."""

    def __init__(self, timeout: float) -> None:
        """`timeout`: seconds that a request waits for data."""
        self.timeout = timeout
        self.notes: list[str] = []
        """Sentences for the user about what could not be done in addition to an upload."""
        self._noted: set[str] = set()

    def note(self, text: str) -> None:
        """Add a sentence to `notes`, once in an attempt."""
        if text not in self._noted:
            self._noted.add(text)
            self.notes.append(text)

    def ask(
        self, request: Callable[[], Answer], carried: int = 0, downloads: bool = False
    ) -> Answer:
        """What a request returns. It is given up after some time: few clients do so.

        `carried`: how many bytes it transfers, which take some time more; `downloads`: whether to a
        disk of this machine.
        """
        more = carried / SLOWEST_BYTES_PER_SECOND if carried else REPEAT_SECONDS
        try:
            return in_background(request).result(self.timeout + more)
        except Exception as error:
            if of_disk := disk_error(error, downloads, self.folder):
                raise of_disk from error
            failure = error
            if carried and isinstance(error, TimeoutError):
                abort_xet_session()  # which has no limit of its own, and carries transfers alone
                # A start repeats a transfer, but not a request that a server does not answer.
                failure = Unanswered(NO_ANSWER, "slow transfer")
            raise translate(failure, self.name, self.key, self.server) from error

    @abstractmethod
    def head(self, revision: str = BRANCH, known: Contents | None = None) -> Contents:
        """What it holds now, with its latest.json.

        It may be `known` itself if nothing was published since that was read.
        """

    def read(self, head: Contents, path: str) -> bytes:
        """A small JSON file. Raises SnapshotError for one of an absurd size."""
        if (size := head.files[path].size) > LARGEST_JSON_BYTES:
            raise SnapshotError(f"{path} of {self.name} has {size:,} bytes")
        return self.read_small(head, path)

    @abstractmethod
    def read_small(self, head: Contents, path: str) -> bytes:
        """A file, without a place on a disk."""

    @abstractmethod
    def fetch(
        self, head: Contents, paths: Collection[str], folder: Path | None, again: bool = False
    ) -> Path:
        """Download files, and return the folder that they are in, under their own paths.

        They go to `folder`, or without one to a cache: for a repo, that of the Hub client. Files
        that are there are not downloaded, except `again`.
        """

    @abstractmethod
    def publish(
        self, head: Contents, add: Mapping[str, Addition], delete: Collection[str], message: str
    ) -> Contents:
        """Add files on top of `head`, then delete others; returns the new head.

        Readers see nothing of it before the manifests among `add` are there. These and
        `latest.json`, the last of `add`, are written when all else is there. Raises StoreMoved if
        something was published since `head` was read, and SnapshotError if a file is not as its
        manifest says. After another error the outcome is unknown. What cannot be deleted is a note.
        """

    @abstractmethod
    def create(self, private: bool) -> None:
        """Create it if it does not exist."""

    @abstractmethod
    def remove(self) -> None:
        """Remove it and all that it holds, if it exists. Only for one that the caller created."""

    def beside(self, suffix: str) -> str:
        """The URL of another store next to it, whose name ends with `suffix`."""
        return f"{self.url}{suffix}"

    @property
    def is_offline(self) -> bool:
        """Whether this process must not use it; that lasts as long as the process."""
        return self.url.startswith(PREFIX) and bool(constants.HF_HUB_OFFLINE)

    def check_token(self) -> None:  # noqa: B027
        """Raise StoreRefused if there is no token, or a read-only one, where the store has them."""

    def tag(self, name: str, head: Contents) -> None:  # noqa: B027
        """Give what `head` holds a name that stays, where the store has such."""
