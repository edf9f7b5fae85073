"""The windows of a stream as files of tokens, which the processes of a machine share.

Whichever process needs a file first makes it, and the others wait for it. A file that is open stays
readable after it was removed, so nothing is locked while it is in use.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from common.shared_files import acquire, file_lock, remove_abandoned, temporary_name
from data.token_file import TokenFile

SUFFIX = ".tokens"
LOCKS = 64
"""How many files may be made at once; a name decides its lock."""


class TokenCache:
    """The files in a folder, of at most so many bytes; the least recently used go first."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """Raises OSError if the folder cannot be made."""
        self.folder, self.most_bytes = folder, most_bytes
        self._room = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)

    def open(self, name: str, write: Callable[[Path], None]) -> TokenFile:
        """Open a file, which `write` makes first if it is absent or damaged.

        Raises OSError if it cannot be written, and what `write` raises.
        """
        path = self.folder / f"{name}{SUFFIX}"
        if file := _opened(path):
            return file
        lock = file_lock(self.folder / f".{zlib.crc32(name.encode()) % LOCKS:02}.lock")
        has_lock = acquire(lock)
        try:
            if file := _opened(path):  # another process has made it
                return file
            remove_abandoned(path, has_lock)
            return self._made(path, write)
        finally:
            lock.release()

    def _made(self, path: Path, write: Callable[[Path], None]) -> TokenFile:
        temporary = temporary_name(path)
        try:
            write(temporary)
            file = TokenFile(temporary)  # before anybody can remove it
            with self._room:
                self._make_room(temporary.stat().st_size)
                temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
        file.path = path
        return file

    def _make_room(self, size: int) -> None:
        files = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            with suppress(OSError):  # another process may remove it
                stat = path.stat()
                files.append((stat.st_mtime, stat.st_size, path))
        total = size + sum(file_size for _, file_size, _ in files)
        for _, file_size, path in sorted(files):
            if total <= self.most_bytes:
                return
            path.unlink(missing_ok=True)
            total -= file_size


def _opened(path: Path) -> TokenFile | None:
    """An existing file, which now is the most recently used; None if it is absent or damaged."""
    with suppress(FileNotFoundError, ValueError):
        file = TokenFile(path)
        os.utime(path)
        return file
    return None
