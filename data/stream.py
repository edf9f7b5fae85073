"""Tokens on disk as one long array that is never copied into memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


class TokenStream:
    """Tokens start..stop of consecutive arrays, read by windows.

    The arrays are views of memory-mapped Arrow files, so a stream costs no memory of its own: pages
    are the system's, shared by all processes of a machine, and given back when memory is short.
    """

    def __init__(self, chunks: Sequence[NDArray], start: int = 0, stop: int | None = None) -> None:
        self.chunks = chunks
        self.bounds = np.cumsum([0, *(len(chunk) for chunk in chunks)])
        self.start = start
        self.stop = int(self.bounds[-1]) if stop is None else stop
        assert 0 <= self.start <= self.stop <= self.bounds[-1]

    @classmethod
    def from_arrow(cls, path: Path, column: str = "tokens") -> TokenStream:
        """All lists of a column, one after the other, as views of the mapped file.

        The file is of Arrow's streaming format, as `datasets` writes it.
        """
        with pa.ipc.open_stream(pa.memory_map(str(path))) as file:
            pieces = file.read_all().column(column).chunks
        return cls([piece.flatten().to_numpy(zero_copy_only=True) for piece in pieces])

    def __len__(self) -> int:
        return self.stop - self.start

    def part(self, start: int, stop: int) -> TokenStream:
        """The stream of tokens start..stop of this one, with the same arrays behind it."""
        return TokenStream(self.chunks, self.start + start, self.start + stop)

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
