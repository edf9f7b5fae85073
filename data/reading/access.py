"""Reads the bytes of data files, wherever they are."""

from __future__ import annotations

import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import fsspec

from data.errors import DataError
from data.printable import redact_urls
from data.reading.groups import DataFile
from data.reading.http import HTTP, Changed, HttpFiles, Refused
from data.reading.waiting import Unanswered, Waiting

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData

Answer = TypeVar("Answer")


class Access:
    """Reads ranges of bytes. Any thread may call it."""

    def __init__(self, cache_dir: Path, say: Callable[[str], None] | None = None) -> None:
        """`say` prints a line for the user, for example about a wait."""
        self.cache_dir, self.say = cache_dir, say
        self.waiting = Waiting(say or (lambda line: None))
        self.http = HttpFiles()
        self.footers: OrderedDict[tuple[str, str], FileMetaData] = OrderedDict()
        """Footers of Parquet files, by URL and version."""
        self.skipped: set[str] = set()
        """Broken rows and groups that have been reported since the process started."""
        self.lock = threading.Lock()

    def read(self, source: str, file: DataFile, begin: int, end: int) -> bytes | bytearray:
        """The bytes of a file from `begin` to `end`, or to the end of the file.

        Waits where a network or a server fails. Raises DataError if the file is refused, has
        changed or vanished, and TextUnreachable after hours.
        """
        end = min(end, file.size)
        into = bytearray()

        def attempt() -> bool:
            before = len(into)
            try:
                if HTTP.match(file.url):
                    self.http.read(file, begin, end, into)
                else:
                    _read_by_fsspec(file, begin, end, into)
            except Unanswered:
                if len(into) == before:
                    raise
            return len(into) >= end - begin

        try:
            if begin < end and not file.is_remote:
                return _read_local(source, file, begin, end)
            if begin < end:
                self._until_answered(source, file.name, attempt)
        except (Changed, FileNotFoundError) as error:
            how = "changed" if isinstance(error, Changed) else "vanished"
            raise DataError(
                f"data.source={source}: {file.name} has {how} since the run listed it. Restore it, "
                "or start another run on the files as they are."
            ) from error
        return into

    def ask(self, source: str, url: str, request: Callable[[], Answer]) -> Answer:
        """Return what `request` returns, and retry it while the server fails. Raises DataError."""
        answers: list[Answer] = []

        def attempt() -> bool:
            answers.append(request())
            return True

        try:
            self._until_answered(source, url, attempt)
        except FileNotFoundError as error:
            name = redact_urls(url)
            raise DataError(f"data.source={name} does not exist. Check the name.") from error
        return answers[0]

    def note_left_out(self, source: str, left_out: Sequence[str]) -> None:
        """Report what cannot be read and why, each entry once."""
        for broken in left_out:
            with self.lock:
                if broken in self.skipped:
                    continue
                self.skipped.add(broken)
                count = len(self.skipped)
            if self.say is not None:
                since = f"({count:,} since the start)"
                self.say(f"warning: data.source={source}: left out: {broken} {since}")

    def close(self) -> None:
        """Close the connections and end all waits: a thread that reads gets Stopped."""
        self.waiting.close()
        self.http.close()

    def _until_answered(self, source: str, name: str, attempt: Callable[[], bool]) -> None:
        what = f"data.source={redact_urls(source)}"
        try:
            self.waiting.until_answered(what, attempt)
        except Refused as error:
            raise DataError(f"{what}: {redact_urls(name)} {error}") from error


def _read_by_fsspec(file: DataFile, begin: int, end: int, into: bytearray) -> None:
    """Like HttpFiles.read. The version is compared before each range is read."""

    def read_range(system: Any, path: str) -> Any:
        system.invalidate_cache(path)  # otherwise it may answer with what it has listed
        if version_of(system.info(path)) != file.version:
            raise Changed
        return system.cat_file(path, start=begin + len(into), end=end)

    into += with_filesystem(file.url, read_range)
    if len(into) < end - begin:
        raise Unanswered("the answer is too short")


def with_filesystem(url: str, call: Callable[[Any, str], Answer]) -> Answer:
    """Call a function with the file system of a URL and the path in it.

    Raises Refused and FileNotFoundError for a lasting failure, Unanswered for any other.
    """
    try:
        return call(*fsspec.core.url_to_fs(url))
    except (Changed, FileNotFoundError):
        raise
    except (ImportError, ValueError) as error:  # the package of the protocol, or no such protocol
        raise Refused(f"cannot be opened: {str(error).rstrip('.')}.") from error
    except PermissionError as error:
        raise Refused(f"is refused: {str(error).rstrip('.')}. Check the credentials.") from error
    except Exception as error:  # each file system has its own types
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Unanswered(redact_urls(reason)) from error


def version_of(info: dict[str, Any]) -> str:
    """A string that changes when the file does, from what fsspec knows about it."""
    named = ("ETag", "etag", "md5", "mtime", "LastModified", "last_modified", "created")
    found = next((info[name] for name in named if info.get(name) is not None), "")
    if isinstance(found, datetime):  # some file systems list seconds, and stat dates
        found = found.timestamp()
    return f"{info.get('size')}-{found}"


def stamps_of(source: str, files: Iterable[Path]) -> list[tuple[int, int, int]]:
    """Size, modification time and inode of each file, which change when a process writes to it.

    Raises DataError if a file is not a regular file: a device or a pipe may never end.
    """
    stamps = []
    for file in files:
        try:
            found = file.stat()
        except OSError as error:
            raise unreadable_file(source, file, error) from error
        if not stat.S_ISREG(found.st_mode):
            raise DataError(
                f"data.source={source}: {file} is not a regular file, but a device or a pipe, for "
                "example. Write its text to a file first."
            )
        stamps.append((found.st_size, found.st_mtime_ns, found.st_ino))
    return stamps


def unreadable_file(source: str, file: Path, error: OSError) -> DataError:
    """The error for a file of this machine that cannot be read."""
    return DataError(f"data.source={source}: cannot read {file}: {error.strerror}.")


def local_file(source: str, path: Path, name: str) -> DataFile:
    """A file of this machine. Raises DataError if there is no such file."""
    ((size, modified, _),) = stamps_of(source, [path])
    return DataFile(str(path), name, size, f"{size}-{modified}")


def _read_local(source: str, file: DataFile, begin: int, end: int) -> bytes:
    path = Path(file.url)
    if path.exists() and local_file(source, path, file.name).version != file.version:
        raise Changed
    try:
        with open(path, "rb") as opened:
            opened.seek(begin)
            content = opened.read(end - begin)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable_file(source, path, error) from error
    if len(content) < end - begin:
        raise Changed
    return content
