"""The disk cache of a stream: files of tokens, shared by the processes of a machine.

Whichever process needs a file first makes it, the others wait for it. Its size is bounded: what was
not used for longest is removed first, and what a process holds is never removed.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from data.shared_files import NO_LOCKS, acquire, file_lock, remove_abandoned, temporary_name
from data.streaming.token_file import EncodedRows, HeldFile

SUFFIX = ".tokens"
LOCKS = 64
"""How many files may be made at once; a name decides its lock."""
UNUSED_SECONDS = 60 * 60
"""After which a file counts as unused on a file system without locks."""


class TokenCache:
    """The files in a folder, of at most so many bytes."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """Raises OSError if the folder cannot be made."""
        self.folder = folder
        self.most_bytes = most_bytes
        self._threads: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        """By the name of a lock file: threads of this process wait here, which needs no polling."""
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
