"""Stores of files in this project: any file system of fsspec, a disk, a bucket of the Hub."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from huggingface_hub.utils._xet import abort_xet_session

from common.failures import NO_CREDENTIALS, failure_of
from common.hub_client import SLOWEST_BYTES_PER_SECOND, hub_api, open_xet_session
from common.printable import redact_urls
from snapshot.errors import SnapshotError
from store.errors import (
    NoFile,
    StoreError,
    StoreMissing,
    StoreRefused,
    StoreUnreachable,
    Unsupported,
    translate,
)
from store.files import BLOCK_BYTES, PART, Files
from store.latest import SNAPSHOTS
from store.store import BRANCH, PREFIX

Answer = TypeVar("Answer")
MOST_BLOCKS = 9_000
"""S3 takes 10,000 parts of a file."""
BUCKETS = f"{PREFIX}buckets/"
"""How the URL of a bucket of the Hub begins."""
READ_AHEAD_BYTES = 64 << 10
"""The Hub's file system reads so much more than it is asked for."""


class FileSystem(Files):
    """A folder of any file system that fsspec can open: S3, GCS, Azure, ...

    Every method raises StoreError; OSError is of this machine's own disk.
    """

    def __init__(self, url: str, timeout: float = 60.0, **options: Any) -> None:
        """`timeout`: seconds that a request waits for data; `options` are fsspec's.

        Raises SnapshotError for a URL that fsspec cannot open.
        """
        super().__init__(timeout)
        self.url = url.rstrip("/")
        self.name = redact_urls(self.url)
        self.key = f"hub.url={self.name}"
        self._fs = _file_system(url.partition("://")[0], self.name, options)
        self._root = str(self._fs._strip_protocol(self.url)).rstrip("/")

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def beside(self, suffix: str) -> str:
        """The URL of a folder next to it, or in it where it is a whole bucket."""
        is_bucket = "/" not in self._root
        return f"{self.url}/{suffix.lstrip('-')}" if is_bucket else super().beside(suffix)

    def create(self, private: bool) -> None:
        """Nothing: a folder comes with its first file, and a bucket is the user's to create."""

    def remove(self) -> None:
        """Remove the folder, if it exists."""
        with suppress(NoFile):
            self._ask(partial(self._fs.rm, self._root, recursive=True))

    def list_files(self) -> dict[str, int]:
        """The sizes of all files by path."""
        self._fs.invalidate_cache()
        try:
            entries = self._ask(partial(self._fs.find, self._root, detail=True))
        except NoFile as error:
            raise StoreMissing(f"{self.name} does not exist. Create that bucket.") from error
        inside = f"{self._root}/"
        return {
            path.removeprefix(inside): int(entry["size"] or 0)
            for path, entry in entries.items()
            if entry["type"] == "file" and path.startswith(inside) and not path.endswith("/")
        }

    def read_bytes(self, path: str, start: int, end: int) -> bytes:
        """Some bytes of a file."""
        return bytes(self._ask(partial(self._fs.cat_file, self._at(path), start=start, end=end)))

    def write(self, path: str, source: BinaryIO) -> str:
        """Write a file, in blocks if it is large; returns its SHA-256."""
        try:
            return self._write(self._at(path), source)
        except NoFile:  # of a store that has folders
            folder = self._at(path).rpartition("/")[0]
            self._ask(partial(self._fs.makedirs, folder, exist_ok=True))
            return self._write(self._at(path), source)

    def _write(self, path: str, source: BinaryIO) -> str:
        size = source.seek(0, os.SEEK_END)
        source.seek(0)
        block_bytes = max(BLOCK_BYTES, -(-size // MOST_BLOCKS))
        if size <= block_bytes:
            content = source.read()
            self._ask(partial(self._fs.pipe_file, path, content), size)
            return hashlib.sha256(content).hexdigest()
        digest = hashlib.sha256()
        opened = self._ask(partial(self._fs.open, path, "wb", block_size=block_bytes))
        try:
            while block := source.read(block_bytes):
                digest.update(block)
                self._ask(partial(opened.write, block), len(block))
            self._ask(opened.close, size)  # a bucket of the Hub uploads all of it here
        except BaseException:
            with suppress(Exception):
                self._ask(opened.discard)
            opened.closed = True  # or its end would make a file of what was sent so far
            raise
        return digest.hexdigest()

    def delete(self, path: str) -> None:
        """Delete a file."""
        self._ask(partial(self._fs.rm_file, self._at(path)))

    def _ask(self, request: Callable[[], Answer], carried: int = 0) -> Answer:
        """The answer to a request, which is given up after some time: few file systems do so.

        `carried`: how many bytes it carries, which take some time more.
        """
        answer: Future[Answer] = Future()

        def run() -> None:
            try:
                answer.set_result(request())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=run, name="store request", daemon=True).start()
        try:
            return answer.result(self.timeout + carried / SLOWEST_BYTES_PER_SECOND)
        except Exception as error:
            raise self.translated(error) from error

    def translated(self, error: Exception) -> StoreError:
        """The error of the right kind. Each file system has types of its own."""
        failure, number = failure_of(error), getattr(error, "errno", None)
        if isinstance(error, FileNotFoundError):
            return NoFile(f"{self.name} lacks a file ({failure}): its snapshot was pruned", "lost")
        if failure.may_pass:
            return StoreUnreachable(
                f"{self.name} cannot be reached ({failure})",
                failure.short,
                timed_out=failure.timed_out,
            )
        kind, sentence = StoreRefused, f"{self.name} cannot be used ({failure.short}: {failure})."
        if NO_CREDENTIALS.search(failure.short):
            sentence = (
                f"{self.key} needs credentials ({failure}). Set them as its command line tools "
                "read them, in the environment or in their files."
            )
        elif isinstance(error, PermissionError) or number == errno.EROFS:
            sentence = f"{self.name} refuses ({failure}). Check the credentials and their "
            sentence += "permissions."
        elif number in (errno.ENOSPC, errno.EDQUOT):
            sentence = f"{self.name} has no room left ({failure}). Free some."
        elif number == errno.ENOSYS or isinstance(error, NotImplementedError):
            kind, sentence = Unsupported, f"{self.name} cannot do that ({failure})."
        return kind(sentence, failure.short)


class Disk(FileSystem):
    """A folder of a disk, which may be shared by machines, and may not be mounted.

    It is never created by an upload, and a folder that cannot be listed is an error: "nothing is
    there" would begin the run again.
    """

    def _check(self, folder: str = "") -> None:
        """Raise StoreMissing if there is no such folder: the disk may not be mounted."""
        folder = folder or self._root
        with suppress(NoFile):
            if stat.S_ISDIR(self._ask(partial(os.stat, folder)).st_mode):
                return
        raise StoreMissing(
            f"there is no folder {folder}. Mount that disk, or check {self.key}.", "no folder"
        )

    def create(self, private: bool) -> None:
        """Create the folder, in one that must exist."""
        self._check(str(Path(self._root).parent))
        self._ask(partial(Path(self._root).mkdir, exist_ok=True))

    def list_files(self) -> dict[str, int]:
        """The sizes of all files by path."""
        self._check()
        return self._ask(partial(files_below, Path(self._root)))

    def write(self, path: str, source: BinaryIO) -> str:
        """Write a file, which appears under its name when all of it is on the disk."""
        self._check()
        target, part = Path(self._at(path)), Path(self._at(f"{PART}{uuid.uuid4().hex[:8]}"))
        size, digest = source.seek(0, os.SEEK_END), hashlib.sha256()
        source.seek(0)

        def write() -> None:
            try:
                with open(part, "wb") as opened:
                    while block := source.read(BLOCK_BYTES):
                        digest.update(block)
                        opened.write(block)
                    opened.flush()
                    os.fsync(opened.fileno())
                target.parent.mkdir(parents=True, exist_ok=True)
                part.replace(target)
            except BaseException:
                part.unlink(missing_ok=True)
                raise

        self._ask(write, size)
        return digest.hexdigest()

    def delete(self, path: str) -> None:
        """Delete a file, and its folder if that is empty then."""
        super().delete(path)
        with suppress(OSError):
            Path(self._at(path)).parent.rmdir()


def files_below(root: Path) -> dict[str, int]:
    """The sizes of all files of a folder by path; links to folders are followed.

    Raises OSError, unless no snapshot can be there, for a folder that cannot be read and for a link
    to nothing, perhaps to a disk that is not mounted. What is deleted meanwhile is left out.
    """

    def may_hold_snapshots(path: Path) -> bool:
        return path == root or path.relative_to(root).parts[0] == SNAPSHOTS

    def refuse(error: OSError) -> None:
        path = Path(error.filename)
        is_systems = isinstance(error, PermissionError) and not may_hold_snapshots(path)
        is_gone = isinstance(error, FileNotFoundError) and path != root
        if not (is_systems or is_gone):  # lost+found of a whole disk
            raise error

    sizes = {}
    for folder, inside, names in os.walk(root, onerror=refuse, followlinks=True):
        paths = [Path(folder, name) for name in inside]
        inside[:] = [path.name for path in paths if not _leads_up(path)]
        for path in (Path(folder, name) for name in names):
            try:
                sizes[path.relative_to(root).as_posix()] = path.stat().st_size
            except FileNotFoundError:
                if path.is_symlink() and may_hold_snapshots(path):
                    raise OSError(errno.EIO, "a link to nothing", str(path)) from None
    return sizes


def _leads_up(path: Path) -> bool:
    """Whether a link leads to a folder that it is in: it holds nothing new, and has no end."""
    return path.is_symlink() and any(path.samefile(above) for above in path.parents)


class Bucket(FileSystem):
    """A bucket of the Hub, or a folder in one. Every method raises StoreError."""

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        """`url`: `hf://buckets/owner/name`; `timeout`: seconds that a request waits for data."""
        self._api = hub_api(timeout)
        super().__init__(url, timeout, block_size=READ_AHEAD_BYTES)
        self._id = "/".join(self._root.split("/")[1:3])

    def is_private(self) -> bool:
        """Whether only its owner can see it."""
        return bool(self._ask(partial(self._api.bucket_info, self._id)).private)

    def create(self, private: bool) -> None:
        """Create the bucket, if it does not exist."""
        self._ask(partial(self._api.create_bucket, self._id, private=private, exist_ok=True))

    def remove(self) -> None:
        """Remove the bucket, or the folder in one."""
        if self._root != f"buckets/{self._id}":
            super().remove()
            return
        with suppress(NoFile):
            self._ask(partial(self._api.delete_bucket, self._id, missing_ok=True))

    def write(self, path: str, source: BinaryIO) -> str:
        """Write a file; returns its SHA-256."""
        open_xet_session()
        return super().write(path, source)

    def translated(self, error: Exception) -> StoreError:
        """The error of the right kind."""
        if isinstance(error, TimeoutError):
            abort_xet_session()  # an upload through Xet has no limit of its own
        elif not isinstance(error, FileNotFoundError):
            return translate(error, self.name, BRANCH, NoFile)
        return super().translated(error)


def _file_system(protocol: str, name: str, options: dict[str, Any]) -> Any:
    """A file system that reads listings always anew: another attempt may have changed them."""
    import fsspec  # only for such a store
    from fsspec.registry import known_implementations

    try:
        return fsspec.filesystem(
            protocol, use_listings_cache=False, skip_instance_cache=True, **options
        )
    except ValueError as error:
        raise SnapshotError(f"{name} cannot be opened: fsspec has no {protocol}://.") from error
    except ImportError as error:
        package = known_implementations[protocol]["class"].partition(".")[0]
        raise SnapshotError(f"{name} needs a package: pip install {package}") from error
