"""A file of the stream's cache: the tokens of a window, and where its rows end.

It holds five numbers (int64: rows, tokens, bytes of the text, bytes of a token, bytes of a list),
the SHA-256 of what follows, the ends of the rows (int64), the tokens, and the list: what of the
window was left out, and what of its text the tokens do not hold, as JSON.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.reading.groups import LeftOut
from data.round_trip import RoundTrip
from data.shared_files import NO_LOCKS
from data.stream import TokenFile, TokensInFile

NUMBERS = 5
DIGEST_BYTES = 32
HEADER_BYTES = 8 * NUMBERS + DIGEST_BYTES
PIECE_BYTES = 1 << 20
"""Hashed at once: memory that is used again, where a window of its own would be new pages."""


@dataclass(frozen=True)
class EncodedRows:
    """Consecutive rows as tokens."""

    tokens: NDArray
    ends: NDArray[np.int64]
    """The token after each row."""
    text_bytes: int
    left_out: LeftOut = field(default_factory=LeftOut)
    """What of the rows of the window is not among them."""
    trip: RoundTrip = field(default_factory=RoundTrip)
    """What of their text the tokens do not hold."""

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return HEADER_BYTES + self.ends.nbytes + self.tokens.nbytes + len(self._list)

    @property
    def _list(self) -> bytes:
        return json.dumps([astuple(self.left_out), astuple(self.trip)]).encode()

    def write(self, path: Path) -> None:
        """Write the file, and flush it to the disk."""
        parts = self.ends.tobytes(), self.tokens.tobytes(), self._list
        sizes = self.text_bytes, self.tokens.itemsize, len(parts[-1])
        numbers = len(self.ends), len(self.tokens), *sizes
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        with open(path, "wb") as opened:
            opened.write(np.array(numbers, dtype=np.int64).tobytes() + digest.digest())
            opened.writelines(parts)
            opened.flush()
            os.fsync(opened.fileno())


def tokens_in(file: TokenFile, dtype: np.dtype) -> TokensInFile:
    """The tokens of a file, which are read when they are used. Raises TextLost if it is cut."""
    rows, tokens, *_ = file.read(0, NUMBERS, np.dtype(np.int64)).tolist()
    return TokensInFile(file, HEADER_BYTES + 8 * rows, tokens, dtype)


class HeldFile:
    """A verified file that no process removes from the cache until `release` is called."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        """Raises OSError if there is none, ValueError if it is damaged or being removed."""
        self._file = TokenFile(path)
        self._lock(path)
        self._verify(path, dtype)
        rows, tokens, self.text_bytes, _, size = self._numbers()
        self.tokens = tokens_in(self._file, dtype)
        end = HEADER_BYTES + 8 * rows + dtype.itemsize * tokens
        listed = self._file.read(end, size, np.dtype(np.uint8))
        (rows_read, without_text, broken), trip = json.loads(listed.tobytes())
        self.trip = RoundTrip(*trip)
        self.left_out = LeftOut(rows_read, without_text, tuple(broken))
        self.ends = self._file.read(HEADER_BYTES, rows, np.dtype(np.int64))
        os.utime(path)  # the cache removes what was not used for longest

    def __len__(self) -> int:
        return len(self.tokens)

    def release(self) -> None:
        """Let the file be removed."""
        # Closing it would not suffice: workers that were forked hold the same lock.
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

    def _numbers(self) -> list[int]:
        numbers: list[int] = self._file.read(0, NUMBERS, np.dtype(np.int64)).tolist()
        return numbers

    def _lock(self, path: Path) -> None:
        try:
            fcntl.flock(self._file.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise ValueError(f"{path} is being removed") from error

    def _verify(self, path: Path, dtype: np.dtype) -> None:
        size = os.fstat(self._file.descriptor).st_size
        if size < HEADER_BYTES or path.stat().st_ino != os.fstat(self._file.descriptor).st_ino:
            raise ValueError(f"{path} is too short, or was removed before it was locked")
        rows, tokens, _, itemsize, listed = self._numbers()
        said = HEADER_BYTES + 8 * rows + itemsize * tokens + listed
        if itemsize != dtype.itemsize or size != said:
            raise ValueError(f"{path} has another size than its header says")
        digest, byte = hashlib.sha256(), np.dtype(np.uint8)
        for first in range(HEADER_BYTES, size, PIECE_BYTES):
            digest.update(self._file.read(first, min(PIECE_BYTES, size - first), byte).data)
        if digest.digest() != self._file.read(8 * NUMBERS, DIGEST_BYTES, byte).tobytes():
            raise ValueError(f"{path} does not match its hash")
