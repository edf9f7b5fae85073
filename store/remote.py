"""What a repo and a bucket of the Hub have in common: what a start needs to read one.

huggingface_hub, "the Hub client" in comments, has no timeouts of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from store.errors import REMEDY, HubRefused, translate_errors
from store.http import hub_api
from store.latest import Latest
from store.waiting import WaitingTime
from store.xet import XetFile, XetStorage

BRANCH = "main"
PREFIX = "hf://"
"""A prefix that marks a name as one of the Hub, whatever this disk holds."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repo, as listed."""

    size: int
    sha256: str | None
    """None for a small file, which is stored in git itself."""
    xet_hash: str | None = None
    """None for a file that is not in Xet storage."""
    git_oid: str = ""
    """Git's name for the content, or for the pointer to a large one."""


class Remote(ABC):
    """A repo or a bucket, as a start reads it. Every method raises HubError."""

    def __init__(self, repo_id: str, timeout: float = 60.0, is_bucket: bool = False) -> None:
        """`timeout`: seconds that a request waits for data."""
        self.repo_id, self.timeout = repo_id, timeout
        self.notes: list[str] = []
        """Sentences about what the server lacks, each for the user once in a run."""
        self.waiting = WaitingTime(timeout)
        """What a start has left to wait for answers; uploads do not use it."""
        self._api = hub_api(timeout)
        self._xet = XetStorage(repo_id, timeout, is_bucket)

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
    def create(self, private: bool) -> None:
        """Create it if it does not exist."""

    @abstractmethod
    def head(self, revision: str = BRANCH) -> tuple[str, bool]:
        """The commit of a revision, empty for a bucket, and whether it is private."""

    @abstractmethod
    def files(self, commit: str) -> dict[str, RemoteFile]:
        """The files of a commit by path."""

    @abstractmethod
    def folders(self, files: Iterable[str], latest: Latest | None) -> list[str]:
        """The snapshot folders among files, the one to try first at the beginning."""

    @abstractmethod
    def foreign_file(self, files: Iterable[str]) -> str | None:
        """A file that no run uploaded; None if the files are a run's, or none."""

    @abstractmethod
    def latest(self, commit: str, files: Mapping[str, RemoteFile]) -> Latest | None:
        """The newest snapshot of a commit that holds `files`; None if there is none.

        Raises SnapshotError if what names it is not of this project.
        """

    def records_prefix(self, latest: Latest) -> str:
        """Before the paths of the records of the run that has the newest snapshot."""
        return ""

    @abstractmethod
    def read(self, commit: str, path: str, most: int) -> bytes:
        """A small file, of which at most `most` bytes are read. Of a bucket raises OSError, too."""

    @abstractmethod
    def download(self, commit: str, path: str, folder: Path | None, again: bool = False) -> Path:
        """Download a file of a commit to `folder`, under its own path, or to the client's cache.

        With `again`, a cached file is replaced. A bucket has no cache.
        """

    @abstractmethod
    def download_all(
        self, commit: str, files: Mapping[str, RemoteFile], folder: Path | None, again: bool = False
    ) -> None:
        """`download` of several files, those in Xet storage all at once. Raises OSError, too."""

    def note(self, text: str) -> None:
        """Add a sentence about what the server lacks."""
        self.notes.append(text)

    def check_token(self) -> None:
        """Raise HubRefused if there is no token, or a read-only one."""
        with translate_errors(self.name, BRANCH):
            who = self._api.whoami()
        token = (who.get("auth") or {}).get("accessToken") or {}
        if token.get("role") == "read":
            raise HubRefused(
                f"the token of {who.get('name')} is read-only, but the run writes to "
                f"{self.name}. {REMEDY}"
            )

    def _download_with_xet(
        self, commit: str, files: Mapping[str, RemoteFile], folder: Path
    ) -> set[str]:
        """Download the files that are in Xet storage; returns their paths."""
        found = {
            path: XetFile(file.xet_hash, file.size)
            for path, file in files.items()
            if file.xet_hash is not None
        }
        partial = {  # an earlier download, which was cut off, may have left the others
            folder / f"{path}.incomplete": file
            for path, file in found.items()
            if not (folder / path).exists()
        }
        if partial:
            size = sum(file.size for file in partial.values())
            with tqdm(total=size, unit="B", unit_scale=True, desc="fetching", disable=None) as bar:
                self._xet.download(partial, commit, lambda done: bar.update(done - bar.n))
        for path in partial:
            path.rename(path.with_suffix(""))
        return set(found)
