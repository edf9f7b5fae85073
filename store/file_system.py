"""A folder of any file system that fsspec can open, as a store of files: S3, GCS, Azure, ..."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO, TypeVar

from common.failures import NO_CREDENTIALS, failure_of
from common.hub_client import SLOWEST_BYTES_PER_SECOND
from common.printable import redact_urls
from snapshot.errors import SnapshotError
from store.errors import (
    NoFile,
    StoreError,
    StoreMissing,
    StoreRefused,
    StoreUnreachable,
    Unsupported,
)
from store.files import BLOCK_BYTES, Files

Answer = TypeVar("Answer")
MOST_BLOCKS = 9_000
"""S3 takes 10,000 parts of a file."""


class FileSystem(Files):
    """One folder. Every method raises StoreError; OSError is of this machine's own disk."""

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
            self._make_folders(path)
            return self._write(self._at(path), source)

    def _make_folders(self, path: str) -> None:
        names = path.split("/")[:-1]
        for count in range(len(names)):
            folder = self._at("/".join(names[: count + 1]))
            with suppress(StoreError):  # it exists, or the write says what is wrong
                self._ask(partial(self._fs.mkdir, folder, create_parents=False))

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
