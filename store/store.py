"""What is asked of a store: a place away from this disk, where a run keeps its snapshots.

A start lists and reads it (`Store`); the uploads of an attempt publish, delete and fence there
(`Attempt`). store/kinds.py has the kinds of stores by their URLs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from snapshot.disk.folder import step_of
from snapshot.errors import SnapshotError
from store.errors import StoreRefused
from store.fence import Fence
from store.latest import LATEST, Latest, folders_in, read_latest, remote_step

BRANCH = "main"
LARGEST_LATEST_BYTES = 10_000
PREFIX = "hf://"
"""A prefix that marks a name as one of the Hub, whatever this disk holds."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a store, as listed."""

    size: int
    sha256: str | None = None
    """None where the store does not tell: of a small file, which is stored in git itself."""
    git_oid: str = ""
    """Git's name for the content, or for the pointer to a large one."""


@dataclass(frozen=True)
class Transfer:
    """What an upload has sent of large files, or the sum of several uploads."""

    bytes_sent: int = 0
    """The sizes of the files; Xet sends less: neither what the storage has, nor uncompressed."""
    seconds: float = 0.0

    def __add__(self, other: Transfer) -> Transfer:
        return Transfer(self.bytes_sent + other.bytes_sent, self.seconds + other.seconds)

    def as_words(self) -> str:
        """For the end of a run: '130.2 MB in 26.1 s, 5.0 MB/s'."""
        megabytes = self.bytes_sent / 1e6
        speed = f", {megabytes / self.seconds:.1f} MB/s" if self.seconds else ""
        return f"{megabytes:.1f} MB in {self.seconds:.1f} s{speed}"


class Store(ABC):
    """A store, as a start reads it. Every method raises StoreError."""

    def __init__(self, timeout: float) -> None:
        """`timeout`: seconds that a request waits for data."""
        self.timeout = timeout
        self.notes: list[str] = []
        """Sentences about what the server lacks, each for the user once in a run."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What messages call it."""

    @property
    def url(self) -> str:
        """What names it in `snapshot.resume`, as in `hf://me/run`."""
        return f"{PREFIX}{self.name}"

    @property
    @abstractmethod
    def key(self) -> str:
        """The configuration key and value that name it."""

    @abstractmethod
    def beside(self, suffix: str) -> str:
        """The URL of another store next to it, whose name ends with `suffix`."""

    @property
    def is_offline(self) -> bool:
        """Whether this process must not use it."""
        return False

    def require_token(self) -> None:  # noqa: B027
        """Raise StoreRefused if the store needs a token and there is none. Makes no request."""

    def check_token(self) -> None:  # noqa: B027
        """Raise StoreRefused if there is no token, or a read-only one, where the store has them."""

    @abstractmethod
    def create(self, private: bool) -> None:
        """Create it if it does not exist."""

    @abstractmethod
    def remove(self) -> None:
        """Remove it and all that it holds, if it exists. Only for one that the caller created."""

    @abstractmethod
    def head(self, revision: str = BRANCH) -> tuple[str, bool]:
        """The commit of a revision, empty without commits, and whether the store is private."""

    @abstractmethod
    def files(self, commit: str) -> dict[str, RemoteFile]:
        """The files of a commit by path."""

    def folders(self, files: Iterable[str], latest: Latest | None) -> list[str]:
        """The snapshot folders among files, the one of `latest` first, then the newest first."""
        found = folders_in(files)
        if latest is not None and latest.folder in found:
            found.remove(latest.folder)
            found.insert(0, latest.folder)
        return found

    @abstractmethod
    def foreign_file(self, files: Iterable[str]) -> str | None:
        """A file that no run uploaded; None if the files are a run's, or none."""

    def latest(self, commit: str, files: Mapping[str, RemoteFile]) -> Latest | None:
        """`latest.json` of a commit that holds `files`; None if it is not among them.

        It names a best snapshot only where that is among them. Raises SnapshotError if it is not a
        `latest.json` of this project.
        """
        if LATEST not in files:
            return None
        if files[LATEST].size > LARGEST_LATEST_BYTES:
            raise SnapshotError(f"{LATEST} of {self.name} has {files[LATEST].size:,} bytes")
        try:
            latest = self._read_latest(commit)
        except SnapshotError:  # perhaps damaged in transit
            latest = self._read_latest(commit)
        has_best = latest.best_step in map(remote_step, folders_in(files))
        return latest if has_best else latest.without_best()

    def _read_latest(self, commit: str) -> Latest:
        return read_latest(self.read(commit, LATEST, LARGEST_LATEST_BYTES), self.name)

    def latest_during_run(self, commit: str, files: Mapping[str, RemoteFile]) -> Latest | None:
        """What `latest.json` itself says, for an upload.

        Raises StoreRefused while it cannot be read.
        """
        try:
            return Store.latest(self, commit, files)
        except SnapshotError as error:  # it may be that of an attempt that lives
            raise StoreRefused(
                f"{error}, so it is unknown which attempt owns {self.name}. Restore that file.",
                "latest.json",
            ) from error

    @abstractmethod
    def read(self, commit: str, path: str, most: int) -> bytes:
        """A small file, of which at most `most` bytes are read. May raise OSError, too."""

    @abstractmethod
    def download(self, commit: str, path: str, folder: Path | None, again: bool = False) -> Path:
        """Download a file of a commit to `folder`, under its own path, or to the client's cache.

        With `again`, a cached file is replaced. Only a repo of the Hub has a cache.
        """

    @abstractmethod
    def download_all(
        self, commit: str, files: Mapping[str, RemoteFile], folder: Path | None, again: bool = False
    ) -> None:
        """`download` of several files. Raises OSError, too."""

    def note(self, text: str) -> None:
        """Add a sentence about what the server lacks."""
        self.notes.append(text)


@dataclass(frozen=True)
class Policy:
    """The keys `hub.*` of the configuration that decide how snapshots are uploaded."""

    keep: int
    min_interval: float
    private: bool
    takeover: bool
    milestone_every: int | None = None
    """Steps between snapshots that are all uploaded, and stay."""

    def is_milestone(self, step: int) -> bool:
        """Whether the snapshot of a step is uploaded in any case, and stays."""
        return self.milestone_every is not None and step % self.milestone_every == 0


@dataclass(frozen=True)
class Card:
    """The model card: README.md, and the loss curves as a PNG, if there are any."""

    text: str
    curves: bytes | None = None


@dataclass(frozen=True)
class Best:
    """The snapshot with the lowest held-out loss."""

    step: int
    loss: float
    folder: Path | None
    """None if only the store has it."""


@dataclass(frozen=True)
class Upload:
    """A snapshot to upload."""

    folder: Path
    card: Card
    best: Best | None = None
    """The snapshot with the lowest held-out loss so far, if that is kept."""

    @property
    def step(self) -> int:
        return step_of(self.folder)


@dataclass(frozen=True)
class UploadTarget:
    """The store that an attempt uploads to, and what is known about it at the start."""

    store: Store
    policy: Policy
    run_id: str
    attempt_id: str
    known_latest: Latest | None = None
    """The newest snapshot at the start; None if there was none, or the store was not read."""
    ended_attempts: Collection[str] = ()
    """Earlier attempts of this run that are known to be over."""
    records: Callable[[int, int], tuple[dict[str, bytes], int]] = lambda after, step: ({}, step)
    """The run's records of the steps after one and up to another, by path in the store; and the
    step up to which they reach. May raise OSError and ValueError."""
    repo_was_read: bool = True
    """False if the store could not be reached at the start; it may not even exist."""
    said_before: Callable[[str], bool] = lambda text: False
    """Whether an earlier attempt has said this about the server."""

    @property
    def fence(self) -> Fence:
        """Which other attempts this one gives way to."""
        return Fence(
            self.store.name,
            self.run_id,
            self.attempt_id,
            self.known_latest,
            self.repo_was_read,
            self.policy.takeover,
        )


class Attempt(Protocol):
    """The uploads of one attempt to a store, one at a time. One thread calls it."""

    repo_was_read: bool
    """Whether the store has been read at least once."""

    def upload(self, upload: Upload) -> Transfer:
        """Publish a snapshot, unless the store has it; returns what was sent.

        Raises Fenced and Behind as `Fence.check` does, StoreError, SnapshotError if the files on
        disk have changed, and OSError if the folder no longer exists. A snapshot becomes visible
        when all of it is there.
        """

    def tidy(self, step: int) -> None:
        """After the upload of a step: delete what the policy does not keep. Raises nothing."""
