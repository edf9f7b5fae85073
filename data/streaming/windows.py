"""One data set of a stream: which rows its windows have, and these windows as tokens.

Each epoch permutes the groups; consecutive groups of the permutation form windows, and the rows of
a window are shuffled. All of that is a pure function of the listing, the seed and the position, so
what a window holds never depends on where a run has started. A window is encoded when it is needed.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.encode import encoded, in_order
from data.errors import TextLost, cache_error
from data.order import GROUPS, ROWS, mixed, permuted, random_words
from data.pieces import pieces_of, utf8_bytes
from data.prepared import FORMAT
from data.reading.groups import Group, GroupText, Listing
from data.round_trip import round_trip
from data.streaming.cache import EncodedRows, HeldFile, TokenCache
from data.token_file import NO_NUMBERS, TokenRows, joined
from data.tokenizer import Tokenizer

READS_AT_ONCE = 8
"""Groups of a window, each a request or several: a network answers them in parallel."""
EPOCHS_IN_MEMORY = 2
"""The order of groups of the present epoch, and of the next for what is read ahead."""


@dataclass(frozen=True)
class StreamDefinition:
    """What decides the rows of a stream and their order, on whatever machine it is read."""

    listings: Sequence[Listing]
    """The data sets that are mixed."""
    weights: Sequence[float]
    tokenizer: Tokenizer
    seed: int
    val_fraction: float
    """The share of text that is held out (for validation), unless `held_out` names data sets."""
    window_bytes: int
    held_out_bytes: int
    """How much held-out text is evaluated; each data set has its share of it."""
    held_out: Sequence[Listing] = ()
    """Data sets of which all rows are held out, one for each in `listings`; or none."""
    skip_broken: bool = False
    """Whether rows that cannot be read are left out."""
    masks: bool = False
    """Whether blocks say by positions where documents begin."""

    @property
    def held_out_share(self) -> float:
        """The share of the text of `listings` that is held out."""
        return 0.0 if self.held_out else self.val_fraction


@dataclass(frozen=True)
class StreamReading:
    """How a process reads a stream: it affects time and space, but no row."""

    read: Callable[[Listing, Group], GroupText]
    """Reads the rows of a group, from any thread; with `skip_broken` without those it cannot."""
    cache_dir: Path
    cache_bytes: int
    prefetch_bytes: int
    threads: int = 1
    """How many encode characters; subwords are encoded on all cores, about so many."""
    turn: tuple[int, int] = (0, 1)
    """The number of this process on its machine, and how many share the work there."""
    left_out: Callable[[str, Sequence[str]], None] | None = None
    """Called with a data set's name and what of it cannot be read, when a window is opened."""
    say: Callable[[str], None] | None = None
    """Receives progress lines."""


class StreamSource:
    """A data set of a stream, number `number` of its mix."""

    def __init__(
        self,
        listing: Listing,
        number: int,
        definition: StreamDefinition,
        reading: StreamReading,
        cache: TokenCache,
        held_out: NDArray[np.float64],
    ) -> None:
        """`held_out`: which part of each group is held out, see `held_out_parts`."""
        self.listing = listing
        self.number = number
        self.definition = definition
        self.cache = cache
        self.held_out = held_out
        self._reading = reading
        self.windows = lru_cache(EPOCHS_IN_MEMORY)(self._windows)
        """The windows of an epoch, each the indices of its groups."""

    @property
    def text_bytes(self) -> int:
        """About how many bytes of text an epoch has, held out rows included."""
        return sum(group.bytes for group in self.listing.groups)

    def name(self, epoch: int, window: int) -> str:
        """The name of a window's file."""
        return f"{self._key}-{epoch:04}-{window:06}"

    def hold(self, epoch: int, window: int) -> HeldFile:
        """Open the file of a window, which is made if it is not there.

        Raises DataError as reading does, and TextLost if the cache can no longer be used.
        """
        try:
            return self._held(self.name(epoch, window), lambda: self.encode(epoch, window))
        except OSError as error:
            raise TextLost(str(cache_error(self._reading.cache_dir, error))) from error

    def prepare(self, epoch: int, window: int) -> None:
        """Make the file of a window, unless it is there."""
        self.cache.prepare(self.name(epoch, window), lambda: self.encode(epoch, window))

    def encode(self, epoch: int, window: int) -> EncodedRows:
        """Read a window, and encode its rows in their order. Raises DataError as reading does."""
        left_out: list[str] = []
        texts = self._texts(self.windows(epoch)[window].tolist(), left_out, held_out=False)
        keys = random_words(ROWS, self.definition.seed, self.number, epoch, window)
        order = permuted(np.arange(len(texts)), len(texts), keys)
        return self._encoded([texts[row] for row in order.tolist()], left_out)

    def hold_held_out(self, enough_bytes: int) -> HeldFile:
        """Open the file of the first held-out rows, until there are so many bytes.

        Raises DataError as reading does, OSError if the cache cannot be used.
        """
        name = f"{self._held_out_key}-held-out-{enough_bytes}"
        return self._held(name, lambda: self._held_out(enough_bytes))

    def _held(self, name: str, make: Callable[[], EncodedRows]) -> HeldFile:
        held = self.cache.hold(name, self.definition.tokenizer.dtype, make)
        # Every process opens the same files in the same order, whoever has made them.
        if self._reading.left_out is not None:
            self._reading.left_out(self.listing.name, held.left_out)
        return held

    def _held_out(self, enough_bytes: int) -> EncodedRows:
        texts: list[str] = []
        left_out: list[str] = []
        left = enough_bytes
        order = in_order_of_hashes(self.listing)
        groups = iter(order[self.held_out[order] > 0].tolist())
        while left > 0 and (chosen := self._enough(groups, left)):
            for text in self._texts(chosen, left_out, held_out=True):
                if left > 0:
                    texts.append(text)
                    left -= utf8_bytes(text)
        trip = round_trip(texts, self.definition.tokenizer)
        return replace(self._encoded(texts, left_out), trip=trip)

    def _enough(self, groups: Iterator[int], left: int) -> list[int]:
        """The next groups, about as many as have `left` bytes of held-out rows."""
        chosen: list[int] = []
        expected = 0.0
        for group in groups:
            chosen.append(group)
            expected += self.listing.groups[group].bytes * self.held_out[group]
            if expected >= left:
                break
        return chosen

    def _windows(self, epoch: int) -> list[NDArray[np.int64]]:
        keys = random_words(GROUPS, self.definition.seed, self.number, epoch, 0)
        trained = np.flatnonzero(self.held_out < 1)
        return epoch_windows(self.listing, trained, keys, self.definition.window_bytes)

    def _texts(self, groups: Sequence[int], left_out: list[str], held_out: bool) -> list[str]:
        """The rows of groups that are held out, or those that are not; `left_out` is added to."""
        chosen = [self.listing.groups[group] for group in groups]
        texts: list[str] = []
        read = in_order(partial(self._reading.read, self.listing), chosen, READS_AT_ONCE)
        for part, found in zip(self.held_out[groups], read, strict=True):
            left_out += [found.broken] if found.broken else []
            cut = math.ceil(part * len(found.texts))
            texts += found.texts[:cut] if held_out else found.texts[cut:]
        return texts

    def _encoded(self, texts: Sequence[str], left_out: Sequence[str]) -> EncodedRows:
        tokenizer, threads = self.definition.tokenizer, self._reading.threads
        parts = list(encoded(pieces_of(texts), tokenizer, sys.maxsize, threads))
        rows = joined([TokenRows(np.zeros(0, dtype=tokenizer.dtype), NO_NUMBERS), *parts])
        return EncodedRows(
            rows.tokens,
            rows.ends,
            text_bytes=sum(part.text_bytes for part in parts),
            left_out=tuple(left_out),
        )

    @cached_property
    def _held_out_key(self) -> str:
        digest = hashlib.sha256(self.definition.tokenizer.identity)
        digest.update(f"{FORMAT}\0{self.listing.fingerprint}".encode())
        digest.update(f"\0{self.definition.skip_broken}".encode())
        digest.update(self.held_out.tobytes())
        for file in self.listing.files:
            digest.update(f"\0{file.version}".encode())
        return digest.hexdigest()[:16]

    @cached_property
    def _key(self) -> str:
        seed, window_bytes = self.definition.seed, self.definition.window_bytes
        place = f"{self._held_out_key}\0{self.number}\0{seed}\0{window_bytes}"
        return hashlib.sha256(place.encode()).hexdigest()[:16]


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
