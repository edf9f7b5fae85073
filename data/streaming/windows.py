"""One data set of a stream: which rows its windows have, and these windows as tokens.

Each epoch permutes the groups; consecutive groups of the permutation form windows, and the rows of
a window are shuffled. All of that is a pure function of the listing, the seed and the position, so
what a window holds never depends on where a run has started. A window is encoded when it is needed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.chunks import ROWS_AT_ONCE, rows_of, utf8_bytes
from data.columns import MASKED
from data.errors import TextLost, cache_error
from data.order import GROUPS, ROWS, mixed, permuted, random_words
from data.prepared import FORMAT
from data.reading.groups import Group, Listing
from data.streaming.cache import TokenCache
from data.token_file import TokenFile, TokenRows, write_tokens
from data.tokenizer import Tokenizer

READS_AT_ONCE = 8
"""Groups of a window, each a request or several: a network answers them in parallel."""
EPOCHS_IN_MEMORY = 2
"""The order of groups of the present epoch, and of the next for what is read ahead."""


@dataclass(frozen=True)
class Part:
    """A source of a mix."""

    source: str
    weight: float = 1.0
    text_column: str | None = None


def parts_of(data: Any) -> Sequence[Any]:
    """The sources of a streamed text, by the keys `data.*`: each as `Part` has it."""
    return data.mix or [Part(data.source)]


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Data sets that are mixed, and how they are read."""

    data: Any
    """The keys `data.*`."""
    listings: Sequence[Listing]
    held_out: Sequence[Listing] = ()
    """Data sets of which all rows are held out, one for each in `listings`; or none."""
    tokenizer: Tokenizer
    seed: int

    # What affects time and space, but no row.
    read: Callable[[Listing, Group], list[str]]
    """Reads the texts of a group, from any thread; without those that are broken, if `data.*` says
    so."""
    cache_dir: Path
    windows_ahead: int = 0
    """How many windows of each source this process prepares ahead of the present one."""
    say: Callable[[str], None] | None = None
    """Receives progress lines."""

    @property
    def weights(self) -> list[float]:
        """The weights of the data sets."""
        return [part.weight for part in parts_of(self.data)]

    @property
    def masks(self) -> bool:
        """Whether blocks say where documents begin."""
        return self.data.documents == MASKED

    @property
    def held_out_share(self) -> float:
        """The share of the text of `listings` that is held out."""
        return 0.0 if self.held_out else self.data.val_fraction


class StreamSource:
    """A data set of a stream, number `number` of its mix."""

    def __init__(
        self,
        listing: Listing,
        number: int,
        stream: Stream,
        cache: TokenCache,
        held_out: NDArray[np.float64],
    ) -> None:
        """`held_out`: which part of each group is held out, see `held_out_parts`."""
        self.listing, self.number, self.held_out = listing, number, held_out
        self._stream, self._cache = stream, cache
        self.windows = lru_cache(EPOCHS_IN_MEMORY)(self._windows)
        """The windows of an epoch, each the indices of its groups."""

    @property
    def text_bytes(self) -> int:
        """About how many bytes of text an epoch has, held out rows included."""
        return sum(group.bytes for group in self.listing.groups)

    def open(self, epoch: int, window: int) -> TokenFile:
        """Open the file of a window, which is made if it is not there.

        Raises DataError as reading does, and TextLost if the cache can no longer be used.
        """
        name = f"{self._window_key}-{epoch:04}-{window:06}"
        try:
            return self._cache.open(name, partial(self._write, epoch, window))
        except OSError as error:
            raise TextLost(str(cache_error(self._stream.cache_dir, error))) from error

    def texts(self, epoch: int, window: int) -> list[str]:
        """The rows of a window in their order. Raises DataError."""
        texts = self._read(self.windows(epoch)[window], held_out=False)
        keys = random_words(ROWS, self._stream.seed, self.number, epoch, window)
        order = permuted(np.arange(len(texts)), len(texts), keys)
        return [texts[row] for row in order.tolist()]

    def held_out_texts(self, enough_bytes: int) -> list[str]:
        """The first held-out rows, until there are so many bytes.

        Groups are read as long as what was expected of the ones before is not enough.
        """
        texts: list[str] = []
        order, left = in_order_of_hashes(self.listing), enough_bytes
        groups = order[self.held_out[order] > 0]
        expected = np.cumsum(_sizes(self.listing)[groups] * self.held_out[groups])
        first = 0
        while left > 0 and first < len(groups):
            before = expected[first - 1] if first else 0
            last = int(np.searchsorted(expected, before + left)) + 1
            for text in self._read(groups[first:last], held_out=True):
                if left > 0:
                    texts.append(text)
                    left -= utf8_bytes(text)
            first = last
        return texts

    def _write(self, epoch: int, window: int, path: Path) -> None:
        tokenizer = self._stream.tokenizer
        rows = texts_as_tokens(self.texts(epoch, window), tokenizer)
        write_tokens(path, rows, tokenizer.dtype)

    def _windows(self, epoch: int) -> list[NDArray[np.int64]]:
        keys = random_words(GROUPS, self._stream.seed, self.number, epoch, 0)
        trained = np.flatnonzero(self.held_out < 1)
        return epoch_windows(self.listing, trained, keys, self._stream.data.window_bytes)

    def _read(self, groups: NDArray[np.int64], held_out: bool) -> list[str]:
        """The rows of groups that are held out, or those that are not."""
        chosen = [self.listing.groups[group] for group in groups.tolist()]
        texts: list[str] = []
        with ThreadPoolExecutor(READS_AT_ONCE) as pool:
            read = pool.map(partial(self._stream.read, self.listing), chosen)
            for part, of_group in zip(self.held_out[groups], read, strict=True):
                cut = math.ceil(part * len(of_group))
                texts += of_group[:cut] if held_out else of_group[cut:]
        return texts

    @cached_property
    def held_out_key(self) -> str:
        """What the held-out rows follow from."""
        digest = hashlib.sha256(self._stream.tokenizer.identity)
        digest.update(f"{FORMAT}\0{self.listing.fingerprint}".encode())
        digest.update(f"\0{self._stream.data.skip_broken}".encode())
        digest.update(self.held_out.tobytes())
        for file in self.listing.files:
            digest.update(f"\0{file.version}".encode())
        return digest.hexdigest()[:16]

    @cached_property
    def _window_key(self) -> str:
        seed, window_bytes = self._stream.seed, self._stream.data.window_bytes
        place = f"{self.held_out_key}\0{self.number}\0{seed}\0{window_bytes}"
        return hashlib.sha256(place.encode()).hexdigest()[:16]


def texts_as_tokens(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[TokenRows]:
    """The tokens of documents, in order. Raises DataError if the tokenizer has none for one."""
    rows = rows_of((text, True) for text in texts)
    while batch := list(islice(rows, ROWS_AT_ONCE)):
        yield from tokenizer.encode_rows(batch)


def epoch_windows(
    listing: Listing, groups: NDArray[np.int64], keys: NDArray[np.uint64], window_bytes: int
) -> list[NDArray[np.int64]]:
    """The windows of an epoch, each the indices of its groups; each of `groups` is in one of them.

    A window begins with the first group that begins `window_bytes` or more after the window before
    in the permuted text, so a larger group is a window of its own.
    """
    order = groups[permuted(np.arange(len(groups)), len(groups), keys)]
    sizes = _sizes(listing)[order]
    begins = np.cumsum(sizes) - sizes
    return np.split(order, np.flatnonzero(np.diff(begins // window_bytes)) + 1)


def held_out_parts(listings: Sequence[Listing], share: float) -> list[NDArray[np.float64]]:
    """Which part of the rows of each group is held out, by data set: of its text a `share`.

    Whole groups are held out in the order of their hashes, and of the last one its first rows. A
    group's hash is that of its file's name, and of its number in the file. So the same rows are
    held out in every run, whatever its seed, and wherever the files lie. A group of two data sets
    is held out in both as far as in either.
    """
    most: dict[tuple[str, int], float] = {}
    names = [
        [(listing.files[group.file].name, group.index) for group in listing.groups]
        for listing in listings
    ]
    for listing, of_listing in zip(listings, names, strict=True):
        order = in_order_of_hashes(listing)
        sizes = _sizes(listing)[order]
        left = share * sizes.sum() - (np.cumsum(sizes) - sizes)
        # A group without rows has no part: it is held out or not.
        parts = np.where(sizes > 0, (left / np.maximum(sizes, 1)).clip(0, 1), left > 0)
        for group, part in zip(order.tolist(), parts.tolist(), strict=True):
            most[of_listing[group]] = max(part, most.get(of_listing[group], 0.0))
    return [np.array([most[name] for name in of_listing]) for of_listing in names]


def in_order_of_hashes(listing: Listing) -> NDArray[np.int64]:
    """The indices of the groups, in the order in which they are held out."""
    hashes = [hashlib.blake2b(file.name.encode(), digest_size=8) for file in listing.files]
    files = np.array([int.from_bytes(one.digest(), "little") for one in hashes], dtype=np.uint64)
    of_files = np.array([group.file for group in listing.groups], dtype=np.int64)
    numbers = np.array([group.index for group in listing.groups], dtype=np.uint64)
    return np.argsort(mixed(files[of_files] ^ mixed(numbers)), kind="stable")


def _sizes(listing: Listing) -> NDArray[np.int64]:
    return np.array([group.bytes for group in listing.groups], dtype=np.int64)
