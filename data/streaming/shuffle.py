"""The order of streamed data sets: pure functions of the listings, the seed and the position.

Each epoch permutes the groups; consecutive groups of the permutation form windows, and the rows of
a window are shuffled. So what a window holds never depends on where a run has started.

Blocks of several sources come in rounds. In each, every source has its exact number of blocks, in
an order that is a permutation of the round. So how many blocks a source has had before any block
needs no history.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from data.order import mixed, permuted, random_words
from data.reading.groups import Group, Listing

GROUPS, ROWS, BLOCKS, HELD_OUT = 0, 1, 2, 3
"""What random numbers are for: the first of the numbers that they are a function of. All have the
same number of them, because numpy ignores zeros at their end."""
LINES_OF_A_GROUP = np.uint64(1 << 40)
"""More rows than any group has, so that every row of a file has its own number."""

MOST_OF_A_GROUP = 0.02
"""A smaller share of held-out rows is taken from some of the groups, about so many rows of each:
to evaluate 2 MB, about 100 MB are read, however small the share."""
FEWEST_GROUPS = 16
"""About so many groups have held-out rows, of a text with more, so that they are from all over."""
WHOLE = 10_000
"""The resolution of weights: four decimals are exact."""
SHORTEST_ROUND = 100
"""In blocks. Short rounds keep every part of a run near the weights; each costs a little time."""


def epoch_windows(
    listing: Listing, keys: NDArray[np.uint64], window_bytes: int
) -> list[NDArray[np.int64]]:
    """The windows of an epoch, each the indices of its groups; all groups are in one of them.

    A window begins with the first group that begins `window_bytes` or more after the window before
    in the permuted text, so a larger group is a window of its own.
    """
    sizes = np.array([group.bytes for group in listing.groups], dtype=np.int64)
    order = permuted(np.arange(len(sizes)), len(sizes), keys)
    begins = np.cumsum(sizes[order]) - sizes[order]
    return np.split(order, np.flatnonzero(np.diff(begins // window_bytes)) + 1)


def held_out_groups(groups: int, share: float) -> float:
    """Which share of so many groups has held-out rows, if a `share` of all rows is held out."""
    return min(1.0, max(share / MOST_OF_A_GROUP, FEWEST_GROUPS / groups))


def has_held_out_rows(listing: Listing, group: Group, of_groups: float) -> bool:
    """Whether a group is among the share `of_groups` that has them, by the hash of its name."""
    if of_groups >= 1:
        return True
    fraction = _fractions(listing, group, np.array([np.iinfo(np.uint64).max - group.index]))[0]
    return bool(fraction < of_groups)


def held_out_rows(
    listing: Listing, group: Group, rows: NDArray[np.int64], share: float, of_groups: float = 1.0
) -> NDArray[np.bool_]:
    """Which rows (n,) of a group are held out: about a `share` of all, by the hash of their names.

    They are in a share `of_groups` of the groups. A row's name is its file's, and its number in the
    file. So the same rows are held out in every run, whatever its seed, and wherever the files lie.
    """
    if not has_held_out_rows(listing, group, of_groups):
        return np.zeros(len(rows), dtype=np.bool_)
    numbers = rows.astype(np.uint64)
    if group.first_row is None:
        numbers = numbers + np.uint64(group.index) * LINES_OF_A_GROUP
    else:
        numbers = numbers + np.uint64(group.first_row)
    return _fractions(listing, group, numbers) < share / of_groups


def _fractions(listing: Listing, group: Group, numbers: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Random numbers from 0 to 1, of a group's file and each of these numbers."""
    name = listing.files[group.file].name.encode()
    file = np.frombuffer(hashlib.blake2b(name, digest_size=8).digest(), dtype=np.uint64)
    return (mixed(file ^ mixed(numbers)) >> np.uint64(11)) * np.float64(2.0**-53)


def shuffled(count: int, keys: NDArray[np.uint64]) -> list[int]:
    """The numbers 0..count, permuted."""
    if count == 0:
        return []
    order: list[int] = permuted(np.arange(count), count, keys).tolist()
    return order


def group_keys(seed: int, source: int, epoch: int) -> NDArray[np.uint64]:
    """The keys of the order of groups; `source` is the number of the data set in the mix."""
    return random_words(GROUPS, seed, source, epoch, 0)


def row_keys(seed: int, source: int, epoch: int, window: int) -> NDArray[np.uint64]:
    """The keys of the order of rows in a window."""
    return random_words(ROWS, seed, source, epoch, window)


def held_out_keys() -> NDArray[np.uint64]:
    """The keys of the order in which groups are read for held-out rows, the same in all runs."""
    return random_words(HELD_OUT, 0, 0, 0, 0)


class Mix:
    """Sources with weights."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """Weights are above 0 and need not add up to 1."""
        self.seed = seed
        shares = np.array(shares_of(weights))
        shares //= np.gcd.reduce(shares)
        self.blocks = shares * -(-SHORTEST_ROUND // shares.sum())
        """How many blocks of a round each source has."""
        self._ends = np.cumsum(self.blocks)
        self._round = int(self._ends[-1])

    def sources(self, first: int, count: int) -> NDArray[np.int64]:
        """The sources (count,) of blocks first..first+count, counted from 0."""
        if len(self.blocks) == 1:
            return np.zeros(count, dtype=np.int64)
        rounds, places = np.divmod(np.arange(first, first + count), self._round)
        found = np.empty(count, dtype=np.int64)
        for number in np.unique(rounds):
            chosen = rounds == number
            found[chosen] = self._in_round(int(number), places[chosen])
        return found

    def counts(self, block: int) -> list[int]:
        """How many blocks of each source come before a block."""
        number, place = divmod(block, self._round)
        begun = np.bincount(self._in_round(number, np.arange(place)), minlength=len(self.blocks))
        counts: list[int] = (number * self.blocks + begun).tolist()
        return counts

    def _in_round(self, number: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        keys = random_words(BLOCKS, self.seed, number, 0, 0)
        return np.searchsorted(self._ends, permuted(places, self._round, keys), side="right")


def shares_of(weights: Sequence[float]) -> list[int]:
    """The shares of weights in `WHOLE` parts, rounded by largest remainders.

    A weight below half a part has none.
    """
    exact = np.array(weights, dtype=np.float64) / sum(weights) * WHOLE
    shares = np.floor(exact + 1e-9).astype(np.int64)  # 0.29 x 10,000 is a little less than 2,900
    left = WHOLE - int(shares.sum())
    shares[np.argsort(shares - exact, kind="stable")[:left]] += 1
    found: list[int] = shares.tolist()
    return found
