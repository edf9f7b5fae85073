"""Reads the bytes of data files, wherever they are."""

from __future__ import annotations

import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import httpx2

from common.failures import Refused, Unanswered
from data.errors import DataError
from data.reading import waiting
from data.reading.groups import DataFile
from data.reading.waiting import Waiting

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData

HTTP = re.compile(r"https?://", re.IGNORECASE)
CONTENT_RANGE = re.compile(r"bytes (?:(?P<begin>\d+)-\d+|\*)/(?P<size>\d+)")
NO_RANGE = "the answer is not the range of bytes that was requested"
NO_RANGES = (
    "cannot be streamed: the server sends no byte ranges. Set data.streaming=false, which "
    "downloads it, or give the path of a copy."
)
TRIES_FOR_RANGE = 3
"""A cache may send a whole file in place of a range; a server that does so three times always."""
OID = "oid:"
"""Prefix of the versions of Hub files. They belong to a commit, so they cannot change."""
LOST = "has {} since the run listed it. Restore it, or start another run on the files as they are."
CHANGED = LOST.format("changed")


class Access:
    """Reads ranges of bytes. Any thread may call it."""

    def __init__(self, cache_dir: Path, say: Callable[[str], None] | None = None) -> None:
        """`say` prints a line for the user, for example about a wait."""
        self.cache_dir, self.say = cache_dir, say
        self.waiting = Waiting(say or (lambda line: None))
        self.footers: OrderedDict[tuple[str, str], FileMetaData] = OrderedDict()
        """Footers of Parquet files, by URL and version."""
        self.skipped: set[str] = set()
        """Broken rows and groups that have been reported since the process started."""
        self.lock = threading.Lock()

    def read(self, source: str, file: DataFile, begin: int, end: int) -> bytes | bytearray:
        """The bytes of a file from `begin` to `end`, or to the end of the file.

        Waits where a network or a server fails; what arrived before is not requested again. Raises
        DataError if the file is refused, has changed or vanished, and TextUnreachable after hours.
        """
        end = min(end, file.size)
        found: bytes | bytearray = b""

        def rest() -> bytes | bytearray:
            return self._some(source, file, begin + len(found), end)

        while len(found) < end - begin:
            piece = self.waiting.until_answered(source, rest, f": {file.name}")
            found = found + piece if found else piece  # without a copy of what arrives at once
        return found

    def _some(self, source: str, file: DataFile, begin: int, end: int) -> bytes | bytearray:
        """At least the first byte of a range."""
        try:
            if HTTP.match(file.url):
                found: bytes | bytearray = self._from_url(file, begin, end)
            elif file.is_remote:
                found = _from_store(file, begin, end)
            else:
                found = _from_disk(source, file, begin, end)
        except FileNotFoundError as error:
            raise Refused(LOST.format("vanished")) from error
        if not found:
            raise Unanswered("the connection ended too early")
        return found

    def _from_url(self, file: DataFile, begin: int, end: int) -> bytearray:
        found, is_pinned = bytearray(), file.version.startswith(OID)
        with self.get(file.url, is_pinned, Range=f"bytes={begin}-{end - 1}") as response:
            ranged = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if response.status_code == 416:
                raise Refused(CHANGED)
            if ranged is None or ranged["begin"] != str(begin):
                raise Unanswered(NO_RANGE)
            size = int(ranged["size"])
            if size != file.size or not (
                is_pinned or _version_of_response(response, size) == file.version
            ):
                raise Refused(CHANGED)
            try:
                for piece in response.iter_raw():
                    found += piece[: end - begin - len(found)]
            except httpx2.TransportError:
                if not found:
                    raise
        return found

    @contextmanager
    def get(self, url: str, of_hub: bool = False, **headers: str) -> Iterator[httpx2.Response]:
        """An open response, of a success or of a range that the file lacks.

        Raises an error of httpx2, Unanswered or Refused.
        """
        token = token_headers() if of_hub else {}
        asked = {"Accept-Encoding": "identity", **headers, **token}
        with self._client.stream("GET", url, headers=asked) as response:
            if response.status_code == 401 and of_hub and token_headers() != token:
                raise Unanswered("the token was replaced")
            if response.status_code != 416:
                response.raise_for_status()
            yield response

    @cached_property
    def _client(self) -> httpx2.Client:
        """A pool of connections."""
        limits = httpx2.Limits(max_connections=64, max_keepalive_connections=64)
        timeout = waiting.TIMEOUT_SECONDS
        return httpx2.Client(timeout=timeout, follow_redirects=True, limits=limits)

    def stat(self, url: str) -> tuple[int, str]:
        """Size and version of the file behind a URL. Raises DataError if it sends no ranges."""
        tries = count(1)

        def ask() -> tuple[int, str]:
            with self.get(url, Range="bytes=0-0") as response:
                ranged = CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
                if ranged is None:
                    is_last = next(tries) == TRIES_FOR_RANGE
                    raise Refused(NO_RANGES) if is_last else Unanswered(NO_RANGE)
                size = int(ranged["size"])
                return size, _version_of_response(response, size)

        return self.waiting.until_answered(url, ask)

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
        if "_client" in self.__dict__:
            self._client.close()


def token_headers() -> dict[str, str]:
    """The user's token for the Hub. It is read for each request, because tokens expire.

    Raises Refused if the Hub is not to be reached.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    if constants.HF_HUB_OFFLINE:
        raise Refused("is not requested, because HF_HUB_OFFLINE is set. Unset it.")
    return build_hf_headers()


def _version_of_response(response: httpx2.Response, size: int) -> str:
    headers = response.headers
    return headers.get("ETag") or f"{size}-{headers.get('Last-Modified', '')}"


def _from_store(file: DataFile, begin: int, end: int) -> bytes:
    """A range, by fsspec. The version is compared before each is read."""
    system, path = fsspec.core.url_to_fs(file.url)
    system.invalidate_cache(path)  # otherwise it may answer with what it has listed
    if version_of(system.info(path)) != file.version:
        raise Refused(CHANGED)
    return bytes(system.cat_file(path, start=begin, end=end))


def version_of(info: dict[str, Any]) -> str:
    """A string that changes when the file does, from what fsspec knows about it."""
    named = ("ETag", "etag", "md5", "mtime", "LastModified", "last_modified", "created")
    found = next((info[name] for name in named if info.get(name) is not None), "")
    if isinstance(found, datetime):  # some file systems list seconds, and stat dates
        found = found.timestamp()
    return f"{info.get('size')}-{found}"


def _from_disk(source: str, file: DataFile, begin: int, end: int) -> bytes:
    try:
        with open(file.url, "rb") as opened:
            found = os.fstat(opened.fileno())
            if f"{found.st_size}-{found.st_mtime_ns}" != file.version:
                raise Refused(CHANGED)
            opened.seek(begin)
            return opened.read(end - begin)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable_file(source, Path(file.url), error) from error


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
