"""A store of plain files, without commits: a folder of a disk, of S3, of a bucket of the Hub.

snapshots/step-00001000-3f2a1b2c/...    a snapshot, with its attempt's id; whole when it has its
                                        manifest.json
latest.json                             the newest one, its run, attempt and generation
metrics.jsonl                           the run's records (store/records.py)

Such a store cannot change several files at once, so the order is what makes an upload safe:
contents, manifest.json, latest.json, then deletions.
"""

from __future__ import annotations

import re
import time
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from snapshot.disk.folder import SYSTEM_FILES
from snapshot.errors import SnapshotError
from store.errors import NoFile, StoreError, StoreMoved, StoreUnreachable
from store.latest import FOLDER, LATEST
from store.store import (
    BRANCH,
    LARGEST_LATEST_BYTES,
    Addition,
    Head,
    RemoteFile,
    Store,
    Transfer,
)

RECORDS = re.compile(r"metrics\.jsonl|proof\.json")
PART = ".partial-"
"""How a file of a disk begins until all of it is there."""
BLOCK_BYTES = 8 << 20
"""What one request of a long transfer carries."""


class Files(Store):
    """A store of files. Another file system is a subclass with the five methods that follow."""

    @abstractmethod
    def list_files(self) -> dict[str, int]:
        """The sizes of all files by path."""

    @abstractmethod
    def read_bytes(self, path: str, start: int, end: int) -> bytes:
        """Some bytes of a file. Raises NoFile if it does not exist."""

    @abstractmethod
    def write(self, path: str, source: BinaryIO) -> str:
        """Write a file, which may exist; returns the SHA-256 of what was written.

        Readers see nothing of it before all of it is there.
        """

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file. Raises NoFile if it does not exist."""

    def is_private(self) -> bool:
        """Whether only the run's user can see it; True where only its owner knows."""
        return True

    def head(self, revision: str = BRANCH, known: Head | None = None) -> Head:
        """The present files. The token is the hash of `latest.json`."""
        private = self.is_private()
        files = {path: RemoteFile(size) for path, size in sorted(self.list_files().items())}
        return Head(self._token(files), private, files)

    def _token(self, files: Mapping[str, RemoteFile]) -> str:
        if LATEST not in files:
            return ""
        return sha256(self.read_bytes(LATEST, 0, LARGEST_LATEST_BYTES)).hexdigest()

    def read(self, head: Head, path: str, most: int) -> bytes:
        """A small file, of which at most `most` bytes are read."""
        return self.read_bytes(path, 0, most)

    def fetch(
        self, head: Head, paths: Collection[str], folder: Path | None, again: bool = False
    ) -> Path:
        """Download files to `folder`, block by block. Raises OSError, too."""
        assert folder is not None, "only a repo has a cache"
        missing = [path for path in paths if again or not (folder / path).exists()]
        size = sum(head.files[path].size for path in missing)
        hidden = None if size > BLOCK_BYTES else True  # None: hidden where no terminal is
        with tqdm(total=size, unit="B", unit_scale=True, desc="fetching", disable=hidden) as bar:
            for path in missing:
                partial_file = folder / f"{path}.incomplete"
                partial_file.parent.mkdir(parents=True, exist_ok=True)
                with open(partial_file, "wb") as opened:
                    for start in range(0, head.files[path].size, BLOCK_BYTES):
                        end = min(start + BLOCK_BYTES, head.files[path].size)
                        opened.write(self.read_bytes(path, start, end))
                        bar.update(end - start)
                partial_file.replace(folder / path)
        return folder

    def publish(
        self, head: Head, add: Mapping[str, Addition], delete: Collection[str], message: str
    ) -> tuple[Head, Transfer]:
        """Contents, then small files in their order, then deletions."""
        started = time.monotonic()
        contents = {path: one for path, one in add.items() if isinstance(one.source, Path)}
        sent = {path: self._send(path, one) for path, one in contents.items()}
        size = sum(file.size for file in sent.values())
        transfer = Transfer(size, time.monotonic() - started)
        self._refuse_moved(head, sent)
        for path, addition in add.items():
            if path not in contents:
                sent[path] = self._send(path, addition)
        files = {**head.files, **sent}
        for path in self._delete_all(delete):
            files.pop(path, None)
        return Head(sent[LATEST].sha256 or "", head.private, files), transfer

    def _send(self, path: str, addition: Addition) -> RemoteFile:
        if isinstance(addition.source, bytes):
            return RemoteFile(len(addition.source), self.write(path, BytesIO(addition.source)))
        with open(addition.source, "rb") as opened:
            digest = self.write(path, opened)
            size = opened.tell()
        if addition.sha256 not in (digest, None):
            raise SnapshotError(f"{addition.source} is damaged: its content has changed")
        return RemoteFile(size, digest)

    def _refuse_moved(self, head: Head, sent: Mapping[str, RemoteFile]) -> None:
        """Raise StoreMoved if another attempt has published since `head` was read.

        Raises StoreUnreachable unless the store lists all files as they were sent.
        """
        now = self.head()
        if now.token != head.token:
            raise StoreMoved(f"{self.name} has moved on meanwhile", "moved on")
        for path, file in sent.items():
            if path not in now.files or now.files[path].size != file.size:
                raise StoreUnreachable(
                    f"{self.name} has applied an upload in part: {path} is missing", "in part"
                )

    def _delete_all(self, paths: Collection[str]) -> list[str]:
        """Delete files in their order; returns those that are gone.

        Where a store keeps one, as one under a retention rule, the rest of its folder stays: of a
        snapshot the manifest goes first, so that no half of it counts.
        """
        gone, stays = [], set()
        for path in paths:
            folder = path.rpartition("/")[0]
            try:
                if folder not in stays:
                    self.delete(path)
                    gone.append(path)
            except NoFile:
                gone.append(path)
            except StoreUnreachable:
                break  # the next upload tries again
            except StoreError as error:
                stays.add(folder)
                self.note(
                    f"old snapshots still use storage of {self.name}: {error.reason}. Uploads "
                    "continue."
                )
        return gone

    def foreign_file(self, paths: Iterable[str]) -> str | None:
        """A file that no run uploaded, and no file manager created.

        Records count as a run's only beside its snapshots or latest.json.
        """
        known = {path for path in paths if FOLDER.fullmatch(path) or path == LATEST}
        for path in sorted(set(paths) - known):
            is_known = path.startswith(PART) or (known and RECORDS.fullmatch(path))
            if not (is_known or SYSTEM_FILES.fullmatch(path.rpartition("/")[2])):
                return path
        return None
