"""The disk cache of a stream: a token file for each window, shared by the processes of a machine.

Whichever process needs a file first makes it, the others wait for it. Its size is bounded: what was
not used for longest is removed first, and what a process holds is never removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from common.shared_files import NO_LOCKS, acquire, file_lock, remove_abandoned, temporary_name
from data.round_trip import RoundTrip
from data.token_file import TokenFile, TokenRows, write_tokens

SUFFIX = ".tokens"
LOCKS = 64
"""How many files may be made at once; a name decides its lock."""
UNUSED_SECONDS = 60 * 60
"""On a file system without locks, a file counts as unused after this time."""


FACTS, DIGEST = b"facts", b"sha256"
"""Entries of a file's metadata."""


@dataclass(frozen=True)
class EncodedRows:
    """The rows of a window as tokens, which a file of the cache holds."""

    tokens: NDArray
    ends: NDArray[np.int64]
    """The token after each row."""
    text_bytes: int
    left_out: tuple[str, ...] = ()
    """What of the window cannot be read and why, one entry each."""
    trip: RoundTrip = field(default_factory=RoundTrip)
    """What of their text the tokens do not hold."""

    @cached_property
    def size(self) -> int:
        """Bytes of the file."""
        sink = pa.MockOutputStream()
        self._write(sink)
        return int(sink.size())

    def write(self, path: Path) -> None:
        """Write the file, and flush it to the disk."""
        with open(path, "wb") as opened:
            self._write(opened)
            opened.flush()
            os.fsync(opened.fileno())

    def _write(self, sink: Any) -> None:
        metadata = {FACTS: self._facts, DIGEST: self._digest}
        rows = TokenRows(self.tokens, self.ends)
        write_tokens(sink, [rows], self.tokens.dtype, metadata=metadata)

    @cached_property
    def _facts(self) -> bytes:
        return json.dumps([self.text_bytes, self.left_out, astuple(self.trip)]).encode()

    @cached_property
    def _digest(self) -> bytes:
        return _digest_of(self._facts, self.ends, [self.tokens])


def _digest_of(facts: bytes, ends: NDArray[np.int64], tokens: Iterable[NDArray]) -> bytes:
    digest = hashlib.sha256(facts + b"\0" + ends.tobytes())
    for piece in tokens:
        digest.update(np.ascontiguousarray(piece).data)
    return digest.hexdigest().encode()


class HeldFile:
    """A verified file that no process removes from the cache until `release` is called."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        """Raises OSError if there is none, ValueError if it is damaged or being removed."""
        self._file = TokenFile(path)
        self._lock()
        (self.tokens,) = self._file.lists()
        self.ends = self._file.ends()
        found = self._file.schema().metadata or {}
        facts = found.get(FACTS, b"")
        digest = _digest_of(facts, self.ends, self.tokens.pieces())
        if self.tokens.dtype != dtype or digest != found.get(DIGEST):
            raise ValueError(f"{path} does not match its hash")
        self.text_bytes, self.left_out, trip = json.loads(facts)
        self.trip = RoundTrip(*trip)
        os.utime(path)  # the cache removes what was not used for longest

    def __len__(self) -> int:
        return len(self.tokens)

    def release(self) -> None:
        """Let the file be removed."""
        with suppress(OSError):
            fcntl.flock(self._file.descriptor, fcntl.LOCK_UN)

    def place(self, row: int, token: int) -> int:
        """The offset of a token of a row; -1 if there is none."""
        if row >= len(self.ends):
            return -1
        offset = (int(self.ends[row - 1]) if row else 0) + token
        return offset if offset < self.ends[row] else -1

    def row(self, offset: int) -> tuple[int, int]:
        """The row of a token, and its place in the row."""
        row = int(np.searchsorted(self.ends, offset, side="right"))
        return row, offset - int(self.ends[row - 1]) if row else offset

    def _lock(self) -> None:
        path, descriptor = self._file.path, self._file.descriptor
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise ValueError(f"{path} is being removed") from error
        if path.stat().st_ino != os.fstat(descriptor).st_ino:
            raise ValueError(f"{path} was removed before it was locked")


class TokenCache:
    """The files in a folder, of at most so many bytes."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """Raises OSError if the folder cannot be made."""
        self.folder = folder
        self.most_bytes = most_bytes
        self._threads: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        """Locks by name of the lock file. Threads of this process wait here without polling."""
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """Where a file of this name is."""
        return self.folder / f"{name}{SUFFIX}"

    def hold(self, name: str, dtype: np.dtype, make: Callable[[], EncodedRows]) -> HeldFile:
        """Open a file; it is made first if the cache has not got it, or it is damaged.

        Raises OSError if it cannot be written, and what `make` raises.
        """
        while True:
            self.prepare(name, make)
            with suppress(FileNotFoundError):  # another process has removed it
                try:
                    return HeldFile(self.path(name), dtype)
                except ValueError:
                    self.path(name).unlink(missing_ok=True)

    def prepare(self, name: str, make: Callable[[], EncodedRows]) -> None:
        """Make a file, unless the cache has it or another process makes it. Raises as `hold`."""
        path = self.path(name)
        if path.exists():
            return
        with self._locked(f".{zlib.crc32(name.encode()) % LOCKS:02}.lock") as has_lock:
            if path.exists():
                return
            remove_abandoned(path, has_lock)
            self._write(path, make())

    def _write(self, path: Path, encoded: EncodedRows) -> None:
        temporary = temporary_name(path)
        with self._locked(".room.lock"):  # otherwise two processes could both use the same room
            try:
                self._make_room(encoded.size)
                encoded.write(temporary)
                temporary.rename(path)
            finally:
                temporary.unlink(missing_ok=True)

    @contextmanager
    def _locked(self, name: str) -> Iterator[bool]:
        """Hold a lock of the folder; yields whether its file system has locks."""
        with self._threads[name]:
            lock = file_lock(self.folder / name)
            has_lock = acquire(lock)
            try:
                yield has_lock
            finally:
                lock.release()

    def _make_room(self, size: int) -> None:
        """Remove what was not used for longest, until so many bytes more are within the bound."""
        files = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            with suppress(OSError):  # another process may remove it
                stat = path.stat()
                files.append((stat.st_mtime, stat.st_size, path))
        total = size + sum(file_size for _, file_size, _ in files)
        for used, file_size, path in sorted(files):
            if total <= self.most_bytes:
                return
            if _remove_unheld(path, used):
                total -= file_size


def _remove_unheld(path: Path, used: float) -> bool:
    """Remove a file, unless a process holds it."""
    try:
        descriptor = os.open(path, os.O_RDWR)  # NFS locks nothing that was opened for reading
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError as error:
        if error.errno not in NO_LOCKS or time.time() - used < UNUSED_SECONDS:
            return False
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
    return True
