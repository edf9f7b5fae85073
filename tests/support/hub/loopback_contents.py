"""The contents of a repo of the loopback Hub: each once, in a file named by its SHA-256.

Nothing large is ever held in memory. Every method may be called from several threads.
"""

from __future__ import annotations

import hashlib
import os
import threading
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

BLOCK_BYTES = 1 << 20


class Refusal(Exception):
    """The Hub does not do it: the answer's status, its words, and the code that types the error."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class Contents:
    """Contents below a folder. A large one counts as there only when it was uploaded as such."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._incoming = folder / "contents", folder / "incoming"
        for place in (self._folder, self._incoming):
            place.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._large: set[str] = set()

    def path(self, sha256: str) -> Path:
        """Where a content lies, if it is there."""
        return self._folder / sha256

    def size_of_large(self, sha256: str) -> int | None:
        """The size of an uploaded content; None where it was not uploaded."""
        with self._lock:
            return self.path(sha256).stat().st_size if sha256 in self._large else None

    def bytes_of_large(self) -> int:
        """What is stored of uploaded contents, needed or not."""
        with self._lock:
            return sum(self.path(sha256).stat().st_size for sha256 in self._large)

    def forget(self, sha256: str) -> None:
        """Delete an uploaded content, whichever commits have it."""
        with self._lock:
            if sha256 in self._large:
                self._large.remove(sha256)
                self.path(sha256).unlink()

    def keep(self, content: bytes) -> str:
        """Keep a small content; its SHA-256."""
        sha256 = hashlib.sha256(content).hexdigest()
        if not self.path(sha256).exists():
            self._write([content], hashlib.sha256()).replace(self.path(sha256))
        return sha256

    def receive(self, sha256: str, blocks: Iterable[bytes]) -> None:
        """Keep a large content as it comes in. Raises Refusal where its name is another's."""
        found = hashlib.sha256()
        partial = self._write(blocks, found)
        if found.hexdigest() != sha256:
            partial.unlink()
            raise Refusal(400, f"The content is not that of {sha256}", "BadDigest")
        with self._lock:
            partial.replace(self.path(sha256))
            self._large.add(sha256)

    def _write(self, blocks: Iterable[bytes], found: hashlib._Hash) -> Path:
        partial = self._incoming / uuid.uuid4().hex
        try:
            with partial.open("wb") as file:
                for block in blocks:
                    found.update(block)
                    file.write(block)
        except BaseException:
            partial.unlink()
            raise
        return partial


def blocks_of(path: Path, start: int = 0, size: int | None = None) -> Iterator[bytes]:
    """A stretch of a file, a block at a time; to its end without a size."""
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size - start if size is None else size
        file.seek(start)
        while left > 0 and (block := file.read(min(left, BLOCK_BYTES))):
            left -= len(block)
            yield block


def git_oid(content: bytes) -> str:
    """The name git gives to a content."""
    blob = b"blob %d\0%b" % (len(content), content)
    return hashlib.sha1(blob, usedforsecurity=False).hexdigest()


def pointer(sha256: str, size: int) -> bytes:
    """What stands in git for a large content."""
    return (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    )
