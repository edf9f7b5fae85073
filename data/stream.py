"""Tokens on disk as one long array, of which only windows are read into memory."""

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
    """A file of tokens, open while it is in use.

    It is read, not memory-mapped: a mapped file that is truncated kills the process (SIGBUS). A
    read takes no longer than a copy from the map, and uses the same page cache.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)

    def read(self, offset: int, count: int, dtype: np.dtype) -> NDArray:
        """Read `count` numbers at a byte offset. Raises TextLost beyond the end of the file."""
        size = count * dtype.itemsize
        content = os.pread(self.descriptor, size, offset)
        while len(content) < size:  # one read returns at most 2 GB
            more = os.pread(self.descriptor, size - len(content), offset + len(content))
            if not more:
                raise TextLost(
                    f"the prepared text {self.path} became shorter while it was read. "
                    "The next start prepares it again."
                )
            content += more
        return np.frombuffer(content, dtype)


class TokensInFile:
    """Consecutive numbers in a file; indexing with a slice reads them."""

    def __init__(self, file: TokenFile, offset: int, count: int, dtype: np.dtype) -> None:
        self.file = file
        self.offset = offset
        self.count = count
        self.dtype = dtype

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, part: slice) -> NDArray:
        start, stop, _ = part.indices(self.count)
        offset = self.offset + start * self.dtype.itemsize
        return self.file.read(offset, max(0, stop - start), self.dtype)


class TokenStream:
    """Tokens start..stop of consecutive arrays, read window by window.

    The arrays are parts of an Arrow file and stay on the disk, so a stream needs no memory of its
    own. A process that receives a pickled stream (a loader's worker) gets the path and the bounds,
    and opens the file itself.
    """

    def __init__(
        self,
        chunks: Sequence[NDArray | TokensInFile],
        start: int = 0,
        stop: int | None = None,
        path: Path | None = None,
        column: str = "tokens",
    ) -> None:
        self.chunks = chunks
        self.bounds = np.cumsum([0, *(len(chunk) for chunk in chunks)])
        self.start = start
        self.stop = int(self.bounds[-1]) if stop is None else stop
        self.path = path
        self.column = column
        assert 0 <= self.start <= self.stop <= self.bounds[-1]

    @classmethod
    def from_arrow(cls, path: Path, column: str = "tokens") -> TokenStream:
        """The concatenation of all lists of a column.

        The file has Arrow's streaming format, as `datasets` writes it. Raises OSError, or an error
        of pyarrow, if it is not valid.
        """
        file = TokenFile(path)
        # Mapped only to find the offsets of the lists; the tokens themselves are not read.
        mapped = pa.memory_map(str(path))
        size = mapped.size()
        begin = mapped.read_buffer(1).address
        mapped.seek(0)
        with pa.ipc.open_stream(mapped) as lists:
            table = lists.read_all()
        table.validate(full=True)  # a damaged offset could point anywhere
        chunks = []
        for piece in table.column(column).chunks:
            tokens = np.from_dlpack(piece.flatten())  # its to_numpy would import pandas
            offset = tokens.__array_interface__["data"][0] - begin
            if len(tokens) and not 0 <= offset <= size - tokens.nbytes:
                raise ValueError("its lists are not consecutive")
            chunks.append(TokensInFile(file, offset, len(tokens), tokens.dtype))
        return cls(chunks, path=path, column=column)

    def __reduce__(self) -> tuple[Callable, tuple[Any, ...]]:
        if self.path is None:
            return TokenStream, (self.chunks, self.start, self.stop)
        return _reopened, (self.path, self.column, self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> TokenStream:
        """The stream of tokens start..stop of this one; it shares the arrays."""
        first, last = self.start + start, self.start + stop
        return TokenStream(self.chunks, first, last, self.path, self.column)

    def window(self, start: int, length: int) -> NDArray:
        """Tokens start..start+length as a new array. Raises IndexError beyond the end."""
        if start < 0 or start + length > len(self):
            raise IndexError(f"window {start}..{start + length} of a stream of {len(self)} tokens")
        position = self.start + start
        first = int(np.searchsorted(self.bounds, position, side="right")) - 1
        parts = []
        while length > 0:
            offset = position - int(self.bounds[first])
            part = self.chunks[first][offset : offset + length]
            parts.append(part)
            position += len(part)
            length -= len(part)
            first += 1
        return np.concatenate(parts)


def _reopened(path: Path, column: str, start: int, stop: int) -> TokenStream:
    return TokenStream.from_arrow(path, column).part(start, stop)


def column_names(path: Path) -> list[str]:
    """The columns of a file that `TokenStream.from_arrow` reads; raises as it does."""
    with pa.ipc.open_stream(pa.memory_map(str(path))) as lists:
        names: list[str] = lists.schema.names
    return names
