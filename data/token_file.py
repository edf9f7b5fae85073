"""Tokens on disk: Arrow files, of which only windows are read into memory.

A prepared text and a window of a stream have the same format, which `datasets` opens too. Each row
is a document, or a part of one:

    tokens          list of integers of the smallest unsigned type that holds the vocabulary
    ends_document   whether the document ends with this row
    trained         of a conversation: list of 1 for each token that is a target, 0 for any other
    targets         of a conversation: how many targets it has
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data.errors import TextLost

NO_NUMBERS = np.zeros(0, dtype=np.int64)
PIECE_TOKENS = 1 << 20
"""Read at once: memory that is used again, where a whole text would be new pages."""


@dataclass(frozen=True)
class TokenRows:
    """Consecutive tokens, and where documents end among them."""

    tokens: NDArray
    ends: NDArray[np.int64]
    """For each document that ends here, the number of tokens up to its end."""
    trained: NDArray[np.uint8] | None = None
    """Of conversations: 1 for each token that is a target, 0 for any other."""
    targets: NDArray[np.int64] | None = None
    """Of conversations: how many targets each one has."""


def joined(parts: Sequence[TokenRows]) -> TokenRows:
    """Consecutive parts as one."""
    starts = np.cumsum([0, *(len(part.tokens) for part in parts)])
    ends = [part.ends + start for part, start in zip(parts, starts, strict=False)]
    trained = [part.trained for part in parts if part.trained is not None]
    targets = [part.targets for part in parts if part.targets is not None]
    return TokenRows(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate(ends),
        np.concatenate(trained) if trained else None,
        np.concatenate(targets) if targets else None,
    )


def write_tokens(
    sink: Any,
    parts: Iterable[TokenRows],
    dtype: np.dtype,
    has_targets: bool = False,
    metadata: Mapping[bytes, bytes] | None = None,
) -> None:
    """Write a file: each part becomes a record batch. `sink` is a path or a stream of pyarrow."""
    columns: dict[str, pa.DataType] = {  # large lists: a window may hold more than 2^31 tokens
        "tokens": pa.large_list(pa.from_numpy_dtype(dtype)),
        "ends_document": pa.bool_(),
    }
    if has_targets:
        columns |= {"trained": pa.large_list(pa.uint8()), "targets": pa.int64()}
    schema = pa.schema(list(columns.items()), metadata=metadata)
    with pa.ipc.new_stream(sink, schema) as writer:
        for part in parts:
            writer.write_batch(pa.RecordBatch.from_arrays(_arrays(part), schema=schema))


def _arrays(rows: TokenRows) -> list[pa.Array]:
    """The columns of a record batch. They share the memory of the numpy arrays."""
    count = len(rows.tokens)
    is_cut = count > (int(rows.ends[-1]) if len(rows.ends) else 0)
    bounds = np.full(1 + len(rows.ends) + is_cut, count, dtype=np.int64)
    bounds[0], bounds[1 : 1 + len(rows.ends)] = 0, rows.ends
    ends_document = (np.arange(len(bounds) - 1) < len(rows.ends)).astype(np.uint8)
    arrays = [_lists(bounds, rows.tokens), _array(ends_document).cast(pa.bool_())]
    if rows.trained is not None and rows.targets is not None:
        arrays += [_lists(bounds, rows.trained), _array(rows.targets)]
    return arrays


def _lists(bounds: NDArray[np.int64], values: NDArray) -> pa.Array:
    return pa.LargeListArray.from_arrays(_array(bounds), _array(values))


def _array(values: NDArray) -> pa.Array:
    # pa.array would import pandas.
    kind, buffer = pa.from_numpy_dtype(values.dtype), pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(kind, len(values), [None, buffer])


class TokenFile:
    """A file of tokens, open while it is in use.

    It is read, not memory-mapped: a mapped file that is truncated kills the process (SIGBUS). A
    read takes no longer than a copy from the map, and uses the same page cache.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be opened."""
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

    def schema(self) -> pa.Schema:
        """The columns, and the metadata of the file. Raises ValueError if it is damaged."""
        with self._mapped() as mapped:
            return mapped.table.schema

    def lists(self, column: str = "tokens") -> list[TokensInFile]:
        """The values of all lists of a column, by record batch; none is read into memory.

        Raises OSError if the file cannot be read, ValueError if it is damaged.
        """
        found = []
        with self._mapped() as mapped:
            for batch in mapped.table[column].chunks:
                values = np.from_dlpack(batch.flatten())  # its to_numpy would import pandas
                offset = values.__array_interface__["data"][0] - mapped.address
                if len(values) and not 0 <= offset <= mapped.size - values.nbytes:
                    raise ValueError("its lists are not consecutive")
                found.append(TokensInFile(self, offset, len(values), values.dtype))
        return found

    def ends(self) -> NDArray[np.int64]:
        """How many tokens there are up to the end of each document. Raises as `lists`."""
        ends, begin = [NO_NUMBERS], 0
        with self._mapped() as mapped:
            for batch in mapped.table.to_batches():
                offsets = np.from_dlpack(batch["tokens"].offsets)
                bounds = offsets - offsets[0] + begin
                flags = np.from_dlpack(batch["ends_document"].cast(pa.uint8()))
                ends.append(bounds[1:][flags == 1])
                begin = int(bounds[-1])
        return np.concatenate(ends)

    def numbers(self, column: str) -> NDArray[np.int64]:
        """A column of numbers. Raises as `lists`."""
        with self._mapped() as mapped:
            chunks = mapped.table[column].chunks
            return np.concatenate([NO_NUMBERS, *(np.from_dlpack(chunk) for chunk in chunks)])

    @contextmanager
    def _mapped(self) -> Iterator[Mapped]:
        """The file in memory, whose pages are read when they are used."""
        try:
            mapped = pa.memory_map(str(self.path))
            address, size = mapped.read_buffer(1).address, mapped.size()
            mapped.seek(0)
            with pa.ipc.open_stream(mapped) as batches:
                table = batches.read_all()
            table.validate(full=True)  # a damaged offset could point anywhere
            yield Mapped(table, address, size)
        except Exception as error:  # of many types, where a file is damaged
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ValueError(str(error)) from error


class Mapped(NamedTuple):
    """A file that is mapped into memory."""

    table: pa.Table
    address: int
    size: int
    """Bytes."""


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

    def pieces(self) -> Iterator[NDArray]:
        """All of them, piece by piece."""
        for start in range(0, self.count, PIECE_TOKENS):
            yield self[start : start + PIECE_TOKENS]


def positions_of(length: int, firsts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions (length,) that begin again with 0 at each of `firsts`, in ascending order."""
    bounds = np.concatenate(([0], firsts, [length]))
    return np.arange(length) - np.repeat(bounds[:-1], np.diff(bounds))


def ends_within(ends: NDArray[np.int64], start: int, length: int) -> NDArray[np.int64]:
    """The places among tokens start..start+length, but the first, at which a document begins."""
    first, last = np.searchsorted(ends, (start + 1, start + length))
    return ends[first:last] - start


class TokenStream:
    """Tokens start..stop of consecutive arrays, read window by window.

    The arrays are parts of a token file and stay on the disk, so a stream needs no memory of its
    own.
    """

    def __init__(
        self,
        chunks: Sequence[NDArray | TokensInFile],
        start: int = 0,
        stop: int | None = None,
        ends: NDArray[np.int64] | None = None,
    ) -> None:
        """`ends`, from the beginning of the arrays, are where documents end, if windows say so."""
        self.chunks = chunks
        self.bounds = np.cumsum([0, *(len(chunk) for chunk in chunks)])
        self.start = start
        self.stop = int(self.bounds[-1]) if stop is None else stop
        self.ends = ends
        assert 0 <= self.start <= self.stop <= self.bounds[-1]

    @classmethod
    def from_arrow(cls, path: Path, column: str = "tokens") -> TokenStream:
        """All lists of a column, joined. Raises OSError, or ValueError if the file is damaged."""
        return cls(TokenFile(path).lists(column))

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def masks(self) -> bool:
        """Whether its windows say by positions where documents begin."""
        return self.ends is not None

    def part(self, start: int, stop: int) -> TokenStream:
        """The stream of tokens start..stop of this one; it shares the arrays."""
        first, last = self.start + start, self.start + stop
        return TokenStream(self.chunks, first, last, self.ends)

    def masked(self, ends: NDArray[np.int64]) -> TokenStream:
        """The same tokens, in whose windows positions begin again after each of `ends`."""
        return TokenStream(self.chunks, self.start, self.stop, ends)

    def positions(self, start: int, length: int) -> NDArray[np.int64]:
        """Positions (length,) of tokens start..start+length of a masked stream."""
        assert self.ends is not None
        return positions_of(length, ends_within(self.ends, self.start + start, length))

    def window(self, start: int, length: int) -> NDArray:
        """Tokens start..start+length as a new array. Raises IndexError beyond the end."""
        position = self.start + start
        if start < 0 or position + length > self.stop:
            raise IndexError(f"window {start}..{start + length} of a stream of {len(self)} tokens")
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

    def pieces(self) -> Iterator[NDArray]:
        """All of its tokens, piece by piece."""
        for start in range(0, len(self), PIECE_TOKENS):
            yield self.window(start, min(PIECE_TOKENS, len(self) - start))
