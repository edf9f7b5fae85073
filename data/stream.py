"""Tokens on disk as one long array that is never copied into memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data.errors import TextLost


class TokenFile:
    """A file of tokens, open for as long as it is used.

    It is read, not mapped: a mapped file that becomes shorter ends the process with SIGBUS. A read
    takes no longer than a copy out of the map, and its pages are the system's all the same.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)

    def read(self, offset: int, count: int, dtype: np.dtype) -> NDArray:
        """So many numbers from a byte of the file on. Raises TextLost past its end."""
        wanted = count * dtype.itemsize
        content = os.pread(self.descriptor, wanted, offset)
        while len(content) < wanted:  # the system gives at most 2 GB at once
            more = os.pread(self.descriptor, wanted - len(content), offset + len(content))
            if not more:
                raise TextLost(
                    f"the prepared text {self.path} became shorter while it was read. "
                    "The next start prepares it anew."
                )
            content += more
        return np.frombuffer(content, dtype)


class TokensInFile:
    """Consecutive numbers of a file, of which a slice is read when it is asked for."""

    def __init__(self, file: TokenFile, offset: int, count: int, dtype: np.dtype) -> None:
        self.file = file
        self.offset = offset
        self.count = count
        self.dtype = dtype

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, part: slice) -> NDArray:
        start, stop, _ = part.indices(self.count)
        at = self.offset + start * self.dtype.itemsize
        return self.file.read(at, max(0, stop - start), self.dtype)


class TokenStream:
    """Tokens start..stop of consecutive arrays, read by windows.

    The arrays are parts of an Arrow file that stay on the disk, so a stream costs no memory of its
    own. A process that is started with a stream (a loader's worker) is given the path and bounds,
    and opens the file itself.
    """

    def __init__(
        self,
        chunks: Sequence[NDArray | TokensInFile],
        start: int = 0,
        stop: int | None = None,
        path: Path | None = None,
    ) -> None:
        self.chunks = chunks
        self.bounds = np.cumsum([0, *(len(chunk) for chunk in chunks)])
        self.start = start
        self.stop = int(self.bounds[-1]) if stop is None else stop
        self.path = path
        assert 0 <= self.start <= self.stop <= self.bounds[-1]

    @classmethod
    def from_arrow(cls, path: Path, column: str = "tokens") -> TokenStream:
        """All lists of a column, one after the other.

        The file is of Arrow's streaming format, as `datasets` writes it. Raises OSError, or one of
        pyarrow's errors, where it is not.
        """
        file = TokenFile(path)
        # Mapped for a moment, for where the lists are: of the tokens themselves nothing is read.
        mapped = pa.memory_map(str(path))
        size = mapped.size()
        begin = mapped.read_buffer(1).address
        mapped.seek(0)
        with pa.ipc.open_stream(mapped) as lists:
            table = lists.read_all()
        table.validate(full=True)  # else a damaged offset leads anywhere
        chunks = []
        for piece in table.column(column).chunks:
            tokens = piece.flatten().to_numpy(zero_copy_only=True)
            offset = tokens.__array_interface__["data"][0] - begin
            if len(tokens) and not 0 <= offset <= size - tokens.nbytes:
                raise ValueError("its lists are not one after the other")
            chunks.append(TokensInFile(file, offset, len(tokens), tokens.dtype))
        return cls(chunks, path=path)

    def __reduce__(self) -> tuple[Callable, tuple[Any, ...]]:
        if self.path is None:
            return TokenStream, (self.chunks, self.start, self.stop)
        return _opened_again, (self.path, self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> TokenStream:
        """The stream of tokens start..stop of this one, with the same arrays behind it."""
        return TokenStream(self.chunks, self.start + start, self.start + stop, self.path)

    def window(self, start: int, length: int) -> NDArray:
        """Tokens start..start+length as an array of their own. Raises IndexError past the end."""
        if start < 0 or start + length > len(self):
            raise IndexError(f"window {start}..{start + length} of a stream of {len(self)} tokens")
        at = self.start + start
        first = int(np.searchsorted(self.bounds, at, side="right")) - 1
        parts = []
        while length > 0:
            offset = at - int(self.bounds[first])
            part = self.chunks[first][offset : offset + length]
            parts.append(part)
            at += len(part)
            length -= len(part)
            first += 1
        return np.concatenate(parts)


def _opened_again(path: Path, start: int, stop: int) -> TokenStream:
    return TokenStream.from_arrow(path).part(start, stop)
