"""Tokens on disk: a flat file, of which only the windows that are used are read into memory.

A prepared text and a window of a stream have the same format, in this order:

    tokens    numbers of the smallest unsigned type that holds the vocabulary
    ends      int64: for each document, the number of tokens up to its end
    targets   int64, of conversations: pairs of the first and the last + 1 of consecutive targets
    facts     JSON: the type of the tokens, the length of each array, and what the writer adds
    length    of the facts in bytes, as int64
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.errors import TextLost
from data.order import BlockOrder

NUMBER = np.dtype("<i8")
NO_NUMBERS = np.zeros(0, dtype=np.int64)


class TokenRows(NamedTuple):
    """Consecutive tokens, where documents end among them, and which are targets."""

    tokens: NDArray
    ends: NDArray[np.int64]
    """For each document that ends here, the number of tokens up to its end."""
    targets: NDArray[np.int64] = NO_NUMBERS
    """Of conversations: bounds (2N,) of consecutive targets."""

    @property
    def target_count(self) -> int:
        """How many of the tokens are targets: all of them, but in conversations."""
        bounds = self.targets
        return int((bounds[1::2] - bounds[::2]).sum()) if len(bounds) else len(self.tokens)


def write_tokens(
    path: Path,
    parts: Iterable[TokenRows],
    dtype: np.dtype,
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write a file, part by part, and flush it to the disk. `facts` are JSON, read last."""
    count, ends, targets = 0, [NO_NUMBERS], [NO_NUMBERS]
    with open(path, "wb") as file:
        for part in parts:
            file.write(np.ascontiguousarray(part.tokens, dtype).data)
            ends.append(part.ends + count)
            targets.append(part.targets + count)
            count += len(part.tokens)
        arrays = [np.concatenate(numbers) for numbers in (ends, targets)]
        lengths = [count, *map(len, arrays)]
        content = json.dumps({**facts, "dtype": dtype.str, "lengths": lengths}).encode()
        for array in arrays:
            file.write(array.astype(NUMBER).tobytes())
        file.write(content + len(content).to_bytes(NUMBER.itemsize, "little"))
        file.flush()
        os.fsync(file.fileno())


class TokenFile:
    """A file of tokens, of which a slice reads some. It stays readable after it was removed.

    It is read, not memory-mapped: a mapped file that is truncated kills the process (SIGBUS). A
    read takes no longer than a copy from the map, and uses the same page cache.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be opened, and ValueError if it is not whole."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        try:
            end = os.fstat(self._descriptor).st_size - NUMBER.itemsize
            begin = end - int(self._read(max(0, end), 1, NUMBER)[0])
            if not 0 <= begin < end:
                raise ValueError("the length of its facts is not valid")
            facts = self._read(begin, end - begin, np.dtype(np.uint8)).tobytes()
            self.facts: dict[str, Any] = json.loads(facts)
            self.dtype = np.dtype(self.facts.pop("dtype"))
            self._lengths = [int(length) for length in self.facts.pop("lengths")]
            tokens, *numbers = self._lengths
            if tokens * self.dtype.itemsize + sum(numbers) * NUMBER.itemsize != begin:
                raise ValueError("its arrays have other lengths")
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error

    def __len__(self) -> int:
        return self._lengths[0]

    def __getitem__(self, part: slice) -> NDArray:
        start, stop, _ = part.indices(len(self))
        return self._read(start * self.dtype.itemsize, max(0, stop - start), self.dtype)

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """How many tokens there are up to the end of each document."""
        return self._read(len(self) * self.dtype.itemsize, self._lengths[1], NUMBER)

    @cached_property
    def targets(self) -> NDArray[np.int64]:
        """Of conversations: bounds (2N,) of consecutive targets."""
        offset = len(self) * self.dtype.itemsize + self._lengths[1] * NUMBER.itemsize
        return self._read(offset, self._lengths[2], NUMBER)

    def _read(self, offset: int, count: int, dtype: np.dtype) -> NDArray:
        """Read `count` numbers at a byte offset. Raises TextLost beyond the end of the file."""
        size = count * dtype.itemsize
        content = os.pread(self._descriptor, size, offset)
        while len(content) < size:  # one read returns at most 2 GB
            more = os.pread(self._descriptor, size - len(content), offset + len(content))
            if not more:
                raise TextLost(
                    f"the prepared text {self.path} became shorter while it was read. "
                    "The next start prepares it again."
                )
            content += more
        return np.frombuffer(content, dtype)


def positions_of(length: int, firsts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions (length,) that begin again with 0 at each of `firsts`, in ascending order."""
    bounds = np.concatenate(([0], firsts, [length]))
    return np.arange(length) - np.repeat(bounds[:-1], np.diff(bounds))


def ends_within(ends: NDArray[np.int64], start: int, length: int) -> NDArray[np.int64]:
    """The places among tokens start..start+length, but the first, at which a document begins."""
    first, last = np.searchsorted(ends, (start + 1, start + length))
    return ends[first:last] - start


Span = tuple[TokenFile, int, int]
"""Tokens of a file: the first, and their number."""


class TokenStream:
    """Tokens start..stop of a file, or of an array, which are read window by window."""

    def __init__(
        self,
        tokens: TokenFile | NDArray,
        start: int = 0,
        stop: int | None = None,
        ends: NDArray[np.int64] | None = None,
    ) -> None:
        """`ends`: where documents of the file end, if windows say where documents begin."""
        self.tokens = tokens
        self.start = start
        self.stop = len(tokens) if stop is None else stop
        self.ends = ends
        self.masks = ends is not None
        """Whether windows say where documents begin."""
        assert 0 <= self.start <= self.stop <= len(tokens)

    def __len__(self) -> int:
        return self.stop - self.start

    def order(self, block_size: int, seed: int, global_batch_size: int) -> BlockOrder:
        """The order in which its windows are trained on."""
        return BlockOrder(len(self), block_size, seed)

    def window(self, start: int, length: int) -> NDArray:
        """Tokens start..start+length. Raises IndexError beyond the end."""
        position = self.start + start
        if start < 0 or position + length > self.stop:
            raise IndexError(f"window {start}..{start + length} of a stream of {len(self)} tokens")
        return self.tokens[position : position + length]

    def block(self, start: int, most: int) -> tuple[NDArray, NDArray[np.int64]]:
        """At most so many tokens from `start`, and where documents begin, if they are masked."""
        tokens = self.window(start, min(most, len(self) - start))
        if self.ends is None:
            return tokens, NO_NUMBERS
        return tokens, ends_within(self.ends, self.start + start, len(tokens))
