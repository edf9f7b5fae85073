"""One data set of a stream: its windows as files of tokens, made when they are needed."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from data.encode import encoded, in_order
from data.errors import TextLost, cache_error
from data.order import permuted
from data.pieces import pieces_of, utf8_bytes
from data.reading.groups import Group, GroupText, LeftOut, Listing
from data.round_trip import RoundTrip
from data.streaming.cache import TokenCache
from data.streaming.shuffle import (
    epoch_windows,
    group_keys,
    has_held_out_rows,
    held_out_keys,
    held_out_rows,
    row_keys,
    shuffled,
)
from data.streaming.token_file import EncodedRows, HeldFile
from data.tokenizer import Tokenizer

FORMAT = 1
"""Of a text's fingerprint; increase it when a data set would have other rows or another order."""
CACHE_FORMAT = 4
"""Part of the names of files in the cache; increase it when they would hold something else."""
READS_AT_ONCE = 8
"""Groups of a window, each a request or several: a network answers them in parallel."""
EPOCHS_IN_MEMORY = 2
"""The order of groups of the present epoch, and of the next for what is read ahead."""


@dataclass(frozen=True)
class StreamSettings:
    """What all sources of a stream share."""

    tokenizer: Tokenizer
    seed: int
    held_out_share: float
    window_bytes: int
    cache: TokenCache
    threads: int
    """How many encode characters; subwords are encoded on all cores, about so many."""
    skip_broken: bool = False
    """Whether `read` leaves out what is broken."""
    left_out: Callable[[str, LeftOut], None] | None = None
    """Called with a source's name and what of it was left out, when a file of it is opened."""


class StreamSource:
    """A data set, number `number` of its mix."""

    def __init__(
        self,
        listing: Listing,
        number: int,
        read: Callable[[Group], GroupText],
        settings: StreamSettings,
        held_out_groups: float = 1.0,
    ) -> None:
        """`read` reads the rows of a group, from any thread.

        Held-out rows are in a share `held_out_groups` of the groups.
        """
        self.listing = listing
        self.number = number
        self.settings = settings
        self.held_out_groups = held_out_groups
        self._read = read
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
            raise TextLost(str(cache_error(self.settings.cache.folder.parent, error))) from error

    def prepare(self, epoch: int, window: int) -> None:
        """Make the file of a window, unless it is there."""
        name = self.name(epoch, window)
        self.settings.cache.prepare(name, lambda: self.encode(epoch, window))

    def encode(self, epoch: int, window: int) -> EncodedRows:
        """Read a window, and encode its rows in their order. Raises DataError as reading does."""
        seed = self.settings.seed
        left_out: list[LeftOut] = []
        texts = self._texts(self.windows(epoch)[window], left_out, held_out=False)
        order = shuffled(len(texts), row_keys(seed, self.number, epoch, window))
        return self._encoded([texts[row] for row in order], left_out)

    def hold_held_out(self, enough_bytes: int) -> HeldFile:
        """Open the file of the first held-out rows, until there are so many bytes.

        Raises DataError as reading does, OSError if the cache cannot be used.
        """
        name = f"{self._held_out_key}-held-out-{enough_bytes}"
        return self._held(name, lambda: self._held_out(enough_bytes))

    def _held(self, name: str, make: Callable[[], EncodedRows]) -> HeldFile:
        settings = self.settings
        held = settings.cache.hold(name, settings.tokenizer.dtype, make)
        # Every process opens the same files in the same order, whoever has made them.
        if settings.left_out is not None:
            settings.left_out(self.listing.name, held.left_out)
        return held

    def _held_out(self, enough_bytes: int) -> EncodedRows:
        texts: list[str] = []
        left_out: list[LeftOut] = []
        left = enough_bytes
        groups = self._groups_with_held_out_rows()
        while left > 0 and (chosen := self._enough(groups, left)):
            for text in self._texts(chosen, left_out, held_out=True):
                if left > 0:
                    texts.append(text)
                    left -= utf8_bytes(text)
        return self._encoded(texts, left_out)

    def _groups_with_held_out_rows(self) -> Iterator[int]:
        """Their indices, in an order that is the same in all runs."""
        groups = self.listing.groups
        for index in permuted(np.arange(len(groups)), len(groups), held_out_keys()):
            if has_held_out_rows(self.listing, groups[index], self.held_out_groups):
                yield index

    def _enough(self, groups: Iterator[int], left: int) -> list[int]:
        """The next groups, about as many as have `left` bytes of held-out rows."""
        chosen: list[int] = []
        expected = 0.0
        for group in groups:
            chosen.append(group)
            text_bytes = self.listing.groups[group].bytes
            expected += text_bytes * self.settings.held_out_share / self.held_out_groups
            if expected >= left:
                break
        return chosen

    def _windows(self, epoch: int) -> list[NDArray[np.int64]]:
        keys = group_keys(self.settings.seed, self.number, epoch)
        return epoch_windows(self.listing, keys, self.settings.window_bytes)

    def _texts(self, groups: Iterable[int], left_out: list[LeftOut], held_out: bool) -> list[str]:
        """The rows of groups that are held out, or those that are not; `left_out` is added to."""
        chosen = [self.listing.groups[group] for group in groups]
        texts: list[str] = []
        for group, found in zip(chosen, in_order(self._read, chosen, READS_AT_ONCE), strict=True):
            left_out.append(found.left_out)
            rows = np.array(found.rows, dtype=np.int64)
            share = self.settings.held_out_share
            mask = held_out_rows(self.listing, group, rows, share, self.held_out_groups)
            texts += [found.texts[row] for row in np.flatnonzero(mask == held_out).tolist()]
        return texts

    def _encoded(self, texts: Sequence[str], left_out: Sequence[LeftOut]) -> EncodedRows:
        tokenizer, threads = self.settings.tokenizer, self.settings.threads
        tokens = [np.zeros(0, dtype=tokenizer.dtype)]
        ends = [np.zeros(0, dtype=np.int64)]
        count = text_bytes = 0
        trip = RoundTrip()
        for part in encoded(pieces_of(texts), tokenizer, sys.maxsize, threads):
            tokens.append(part.tokens)
            ends.append(part.ends + count)
            count += len(part.tokens)
            text_bytes += part.text_bytes
            trip += part.trip
        all_left_out = sum(left_out, LeftOut())
        ids = np.concatenate(tokens)
        return EncodedRows(ids, np.concatenate(ends), text_bytes, all_left_out, trip)

    @cached_property
    def _held_out_key(self) -> str:
        tokenizer, share = self.settings.tokenizer.identity, self.settings.held_out_share
        digest = hashlib.sha256(tokenizer)
        digest.update(f"{CACHE_FORMAT}\0{self.listing.fingerprint}\0{share!r}".encode())
        digest.update(f"\0{self.settings.skip_broken}".encode())
        if self.held_out_groups < 1:
            digest.update(f"\0{self.held_out_groups!r}".encode())
        for file in self.listing.files:
            digest.update(f"\0{file.version}".encode())
        return digest.hexdigest()[:16]

    @cached_property
    def _key(self) -> str:
        settings = self.settings
        place = f"{self._held_out_key}\0{self.number}\0{settings.seed}\0{settings.window_bytes}"
        return hashlib.sha256(place.encode()).hexdigest()[:16]
