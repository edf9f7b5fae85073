"""One data set of a stream: which rows its windows have, and these windows as tokens.

Each epoch permutes the groups; consecutive groups of the permutation form windows, and the rows of
a window are shuffled. All of that is a pure function of the listing, the seed and the position, so
what a window holds never depends on where a run has started. A window is encoded when it is needed.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.chunks import batches_of, utf8_bytes
from data.errors import TextLost, cache_error
from data.order import GROUPS, ROWS, mixed, permuted, random_words
from data.prepared import FORMAT
from data.reading.groups import Group, Listing
from data.streaming.cache import TokenCache
from data.token_file import TokenFile, TokenRows, write_tokens
from data.tokenizer import Tokenizer

WindowId = tuple[int, int]
"""Epoch, and window in the epoch."""

READS_AT_ONCE = 8
"""Groups of a window, each a request or several: a network answers them in parallel."""
EPOCHS_IN_MEMORY = 2
"""The order of groups of the present epoch, and of the next for what is read ahead."""


@dataclass(eq=False)
class StreamSource:
    """A data set of a stream."""

    listing: Listing
    number: int
    """In the mix."""
    held_out: NDArray[np.float64]
    """Which part of each group is held out, see `held_out_parts`."""
    data: Any
    """The keys `data.*`."""
    tokenizer: Tokenizer
    seed: int
    read: Callable[[Listing, Group], list[str]]
    """Reads the texts of a group, from any thread; without those that are broken, if `data.*` says
    so."""
    cache: TokenCache

    def __post_init__(self) -> None:
        self.windows = lru_cache(EPOCHS_IN_MEMORY)(self._windows)
        """The windows of an epoch, each the indices of its groups."""

    def key(self, *more: object) -> str:
        """A name for what follows from the rows of this data set and from more."""
        listing = self.listing
        versions = [file.version for file in listing.files]
        facts = (FORMAT, listing.fingerprint, self.data.skip_broken, versions, *more)
        rows = self.tokenizer.identity + self.held_out.tobytes() + repr(facts).encode()
        return hashlib.sha256(rows).hexdigest()[:32]

    def after(self, window: WindowId) -> WindowId:
        """The next window, perhaps of the next epoch."""
        epoch, number = window
        return (epoch, number + 1) if number + 1 < len(self.windows(epoch)) else (epoch + 1, 0)

    def open(self, window: WindowId) -> TokenFile:
        """Open the file of a window, which is made if it is not there.

        Raises DataError as reading does, and TextLost if the cache can no longer be used.
        """

        def write(path: Path) -> None:
            rows = texts_as_tokens(self.texts(window), self.tokenizer)
            write_tokens(path, rows, self.tokenizer.dtype)

        name = self.key(self.number, self.seed, self.data.window_bytes, window)
        try:
            return self.cache.open(name, write)
        except OSError as error:
            raise TextLost(str(cache_error(self.cache.folder.parent, error))) from error

    def texts(self, window: WindowId) -> list[str]:
        """The rows of a window in their order. Raises DataError."""
        epoch, number = window
        texts = self._read(self.windows(epoch)[number], held_out=False)
        keys = random_words(ROWS, self.seed, self.number, epoch, number)
        order = permuted(np.arange(len(texts)), len(texts), keys)
        return [texts[row] for row in order.tolist()]

    def held_out_texts(self, enough_bytes: int) -> list[str]:
        """The first held-out rows, until there are so many bytes."""
        texts: list[str] = []
        order = in_order_of_hashes(self.listing)
        groups = order[self.held_out[order] > 0]
        # More and more at once: a start reads no more than it needs, and waits for few requests.
        first, count = 0, 1
        while enough_bytes > 0 and first < len(groups):
            for text in self._read(groups[first : first + count], held_out=True):
                if enough_bytes > 0:
                    texts.append(text)
                    enough_bytes -= utf8_bytes(text)
            first, count = first + count, min(2 * count, READS_AT_ONCE)
        return texts

    def _windows(self, epoch: int) -> list[NDArray[np.int64]]:
        """Each group that is trained on is in one window.

        A window begins with the first group that begins `data.window_bytes` or more after the
        window before in the permuted text, so a larger group is a window of its own.
        """
        keys = random_words(GROUPS, self.seed, self.number, epoch, 0)
        trained = np.flatnonzero(self.held_out < 1)
        order = trained[permuted(np.arange(len(trained)), len(trained), keys)]
        sizes = _sizes(self.listing)[order]
        begins = np.cumsum(sizes) - sizes
        return np.split(order, np.flatnonzero(np.diff(begins // self.data.window_bytes)) + 1)

    def _read(self, groups: NDArray[np.int64], held_out: bool) -> list[str]:
        """The rows of groups that are held out, or those that are not."""
        chosen = [self.listing.groups[group] for group in groups.tolist()]
        texts: list[str] = []
        with ThreadPoolExecutor(READS_AT_ONCE) as pool:
            read = pool.map(partial(self.read, self.listing), chosen)
            for part, of_group in zip(self.held_out[groups], read, strict=True):
                cut = math.ceil(part * len(of_group))
                texts += of_group[:cut] if held_out else of_group[cut:]
        return texts


def texts_as_tokens(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[TokenRows]:
    """The tokens of documents, in order. Raises DataError if the tokenizer has none for one."""
    return map(tokenizer.encode_chunks, batches_of((text, True) for text in texts))


def held_out_parts(
    listings: Sequence[Listing], share: float, held_out: Sequence[Listing] = ()
) -> list[NDArray[np.float64]]:
    """Which part of the rows of each group is held out, by data set: of its text a `share`.

    Whole groups are held out in the order of their hashes, and of the last one its first rows. So
    the same rows are held out in every run, whatever its seed, and wherever the files lie. A group
    of two data sets, by any names, is held out in both as far as in either; one of the data sets
    `held_out` is so whole.
    """
    most: dict[tuple[str, int], float] = {}
    for listing in listings:
        order = in_order_of_hashes(listing)
        sizes = _sizes(listing)[order]
        left = share * sizes.sum() - (np.cumsum(sizes) - sizes)
        # A group without rows has no part: it is held out or not.
        parts = np.where(sizes > 0, (left / np.maximum(sizes, 1)).clip(0, 1), left > 0)
        contents = _contents(listing)
        for group, part in zip(order.tolist(), parts.tolist(), strict=True):
            most[contents[group]] = max(part, most.get(contents[group], 0.0))
    most |= {content: 1.0 for listing in held_out for content in _contents(listing)}
    return [np.array([most[content] for content in _contents(listing)]) for listing in listings]


def in_order_of_hashes(listing: Listing) -> NDArray[np.int64]:
    """The indices of the groups, in the order in which they are held out.

    A group's hash is that of its file's name, and of its number in the file.
    """
    hashes = [hashlib.blake2b(file.name.encode(), digest_size=8) for file in listing.files]
    files = np.array([int.from_bytes(one.digest(), "little") for one in hashes], dtype=np.uint64)
    of_files = np.array([group.file for group in listing.groups], dtype=np.int64)
    numbers = np.array([group.index for group in listing.groups], dtype=np.uint64)
    return np.argsort(mixed(files[of_files] ^ mixed(numbers)), kind="stable")


def _contents(listing: Listing) -> list[tuple[str, int]]:
    """What identifies each group on this machine, whatever the name of its file."""
    files = [os.path.realpath(file.path) for file in listing.files]
    return [(files[group.file], group.index) for group in listing.groups]


def _sizes(listing: Listing) -> NDArray[np.int64]:
    return np.array([group.bytes for group in listing.groups], dtype=np.int64)
