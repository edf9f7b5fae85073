"""Stores of plain files, without commits: any file system of fsspec, a bucket, and a disk.

Such a store cannot change several files at once, so the order is what makes an upload safe:
contents, manifest.json, latest.json, then deletions.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from common.hub_client import hub_api
from common.printable import redact_urls
from snapshot.disk.folder import flush, sha256_of, write_whole
from snapshot.errors import SnapshotError
from store.errors import NoFile, StoreError, StoreMissing, StoreMoved, StoreUnreachable
from store.latest import LATEST
from store.store import BRANCH, PREFIX, Addition, Contents, RemoteFile, Store


class Files(Store):
    """A folder of any file system that fsspec can open: S3, GCS, ..."""

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        """`timeout`: seconds that a request waits for data.

        Raises SnapshotError for a URL that fsspec cannot open.
        """
        super().__init__(timeout)
        self.url = url.rstrip("/")
        self.name = self.server = redact_urls(self.url)
        self.key = f"hub.url={self.name}"
        self._fs = _file_system(url.partition("://")[0], self.name)
        self._root = str(self._fs._strip_protocol(self.url)).rstrip("/")

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def beside(self, suffix: str) -> str:
        """The URL of a folder next to it, or in it where it is a whole bucket."""
        is_bucket = self._root.count("/") == (2 if self.url.startswith(PREFIX) else 0)
        return f"{self.url}/{suffix.lstrip('-')}" if is_bucket else super().beside(suffix)

    def is_private(self) -> bool:
        """Whether it counts as private: who may read such a store is its owner's business."""
        return True

    def create(self, private: bool) -> None:
        """Nothing: a folder comes with its first file, and a bucket is the user's to create."""

    def remove(self) -> None:
        """Remove all files of the folder, if it exists."""
        with suppress(NoFile):
            for path in self.list_files():
                self.delete(path)

    def head(self, revision: str = BRANCH, known: Contents | None = None) -> Contents:
        """The present files."""
        try:
            sizes = self.list_files()
        except NoFile as error:
            raise StoreMissing(f"{self.name} does not exist. Create it.", error.short) from error
        files = {path: RemoteFile(size) for path, size in sorted(sizes.items())}
        return Contents(self, "", self.is_private(), files).with_latest()

    def list_files(self) -> dict[str, int]:
        """The sizes of all files by path. Raises NoFile if the store does not exist."""
        self._fs.invalidate_cache()
        entries = self.ask(partial(self._fs.find, self._root, detail=True))
        inside = f"{self._root}/"
        return {
            path.removeprefix(inside): int(entry["size"] or 0)
            for path, entry in entries.items()
            if entry["type"] == "file" and path.startswith(inside) and not path.endswith("/")
        }

    def read_small(self, head: Contents, path: str) -> bytes:
        """A file, without a place on a disk."""
        return bytes(self.ask(partial(self._fs.cat_file, self._at(path))))

    def fetch(
        self, head: Contents, paths: Collection[str], folder: Path | None, again: bool = False
    ) -> Path:
        """Download files to `folder`, or to a cache."""
        if folder is None:
            folder = Path(constants.HF_HOME) / "stores" / sha256(self.url.encode()).hexdigest()[:16]
        for path in paths:
            place = folder / path
            if again or not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                part = place.with_name(f"{place.name}.incomplete")
                get = partial(self._fs.get_file, self._at(path), str(part))
                self.ask(get, head.files[path].size, downloads=True)
                part.replace(place)
        return folder

    def publish(
        self, head: Contents, add: Mapping[str, Addition], delete: Collection[str], message: str
    ) -> Contents:
        """Contents, then small files in their order, then deletions."""
        contents = {path: one for path, one in add.items() if isinstance(one.source, Path)}
        sent = {path: self._send(path, one) for path, one in contents.items()}
        self._refuse_moved(head, sent)
        for path, addition in add.items():
            if path not in contents:
                sent[path] = self._send(path, addition)
        gone = self._delete_all(delete)
        files = {path: one for path, one in {**head.files, **sent}.items() if path not in gone}
        return replace(head, token=sent[LATEST].sha256 or "", files=files)

    def _send(self, path: str, addition: Addition) -> RemoteFile:
        """Write a file that is as its manifest says."""
        source = addition.source
        digest = sha256(source).hexdigest() if isinstance(source, bytes) else sha256_of(source)
        if addition.sha256 not in (digest, None):
            raise SnapshotError(f"{source!s} is damaged: its content has changed")
        self.write(path, source)
        return RemoteFile(_size_of(source), digest)

    def write(self, path: str, source: Path | bytes) -> None:
        """Write a file, which may exist. Readers see nothing of it before all of it is there."""
        if isinstance(source, bytes):
            put = partial(self._fs.pipe_file, self._at(path), source)
        else:
            put = partial(self._fs.put_file, str(source), self._at(path))
        self.ask(put, _size_of(source))

    def _refuse_moved(self, head: Contents, sent: Mapping[str, RemoteFile]) -> None:
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

    def _delete_all(self, paths: Collection[str]) -> set[str]:
        """Delete files in their order; returns those that are gone.

        Where a store keeps one, as one under a retention rule, the rest of its folder stays: of a
        snapshot the manifest goes first, so that no half of it counts.
        """
        gone, locked = set[str](), set[str]()
        for path in paths:
            folder = path.rpartition("/")[0]
            if folder in locked:
                continue
            try:
                with suppress(NoFile):
                    self.delete(path)
                gone.add(path)
            except StoreUnreachable:
                break  # the next upload tries again
            except StoreError as error:
                locked.add(folder)
                self.note(
                    f"old snapshots still use storage of {self.name}: {error.reason}. Uploads "
                    "continue."
                )
        return gone

    def delete(self, path: str) -> None:
        """Delete a file. Raises NoFile if it does not exist."""
        self.ask(partial(self._fs.rm_file, self._at(path)))


class Bucket(Files):
    """A bucket of the Hub, or a folder in one."""

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        """`timeout`: seconds that a request waits for data."""
        self._api = hub_api(timeout)  # which bounds the requests of its file system, too
        super().__init__(url, timeout)

    def is_private(self) -> bool:
        """Whether the Hub shows the bucket to nobody else."""
        owner, name = self._root.split("/")[1:3]
        return bool(self.ask(partial(self._api.bucket_info, f"{owner}/{name}")).private)


class Disk(Files):
    """A folder of a disk, which may be shared by machines."""

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        """`timeout`: seconds that a request waits for the disk."""
        super().__init__(url, timeout)
        self.folder = Path(self._root)

    def create(self, private: bool) -> None:
        """Create the folder, in one that must exist."""
        self.ask(partial(Path(self._root).mkdir, exist_ok=True))

    def list_files(self) -> dict[str, int]:
        """The sizes of all files by path, without those that are deleted meanwhile.

        A folder that cannot be read is an error: "nothing is there" would begin the run again.
        """
        root = Path(self._root)

        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError) or Path(error.filename) == root:
                raise error

        def sizes() -> dict[str, int]:
            sizes_by_path = {}
            for folder, _, names in os.walk(root, onerror=fail, followlinks=True):
                for path in (Path(folder, name) for name in names):
                    with suppress(FileNotFoundError):
                        sizes_by_path[path.relative_to(root).as_posix()] = path.stat().st_size
            return sizes_by_path

        return self.ask(sizes)

    def write(self, path: str, source: Path | bytes) -> None:
        """Write a file to the disk. A small one appears under its name when all of it is there."""
        target = Path(self._at(path))

        def write() -> None:
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(source, bytes):
                write_whole(target, source)
            else:
                shutil.copyfile(source, target)
                flush([target])

        self.ask(write, _size_of(source))

    def remove(self) -> None:
        """Remove the folder, if it exists."""
        with suppress(NoFile):
            self.ask(partial(self._fs.rm, self._root, recursive=True))

    def delete(self, path: str) -> None:
        """Delete a file, and its folder if that is empty then."""
        super().delete(path)
        with suppress(OSError):
            Path(self._at(path)).parent.rmdir()


def _size_of(source: Path | bytes) -> int:
    return len(source) if isinstance(source, bytes) else source.stat().st_size


def _file_system(protocol: str, name: str) -> Any:
    """A file system that reads listings always anew: another attempt may have changed them."""
    import fsspec  # only for such a store

    try:
        return fsspec.filesystem(protocol, use_listings_cache=False, skip_instance_cache=True)
    except (ValueError, ImportError) as error:  # which names the package to install
        raise SnapshotError(f"{name} cannot be opened by fsspec: {error}.") from error
