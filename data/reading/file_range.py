"""A remote file as Python's files are, for readers that seek."""

from __future__ import annotations

import io

from data.reading.access import Access
from data.reading.groups import StreamFile


class FileRange(io.RawIOBase):
    """A file of which one range is in memory. What is outside is read when it is needed."""

    def __init__(self, access: Access, source: str, file: StreamFile, ahead: int = 0) -> None:
        """`ahead`: how many bytes to read at least where some are needed."""
        super().__init__()
        self._access, self._source, self._file, self._ahead = access, source, file, ahead
        self._begin, self._bytes = 0, memoryview(b"")
        self._at = 0

    def load(self, begin: int, end: int) -> None:
        """Replace the range in memory."""
        self._bytes = memoryview(b"")
        self._bytes = memoryview(self._access.read(self._source, self._file, begin, end))
        self._begin = begin

    def reopened(self) -> FileRange:
        """The same file at its beginning, with the same range in memory."""
        again = FileRange(self._access, self._source, self._file, self._ahead)
        again._begin, again._bytes = self._begin, self._bytes
        return again

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        self._at = start + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._file.size
        first, last = self._at, end if size < 0 else max(self._at, min(self._at + size, end))
        if not self._begin <= first <= last <= self._begin + len(self._bytes):
            self.load(first, max(last, first + self._ahead))
        found = bytes(self._bytes[first - self._begin : last - self._begin])
        self._at += len(found)
        return found
