"""The order of a streamed data set: pure functions of its listing, the seed and the position.

Each epoch permutes the groups; consecutive groups of the permutation form windows, and the rows of
a window are shuffled. So what a window holds never depends on where a run has started.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from data.order import mixed, permuted, random_words
from data.streaming.groups import Group, Listing

GROUPS, ROWS, BLOCKS, HELD_OUT = 0, 1, 2, 3
"""What random numbers are for: the first of the numbers that they are a function of. All have the
same number of them, because numpy ignores zeros at their end."""
LINES_OF_A_GROUP = np.uint64(1 << 40)
"""More than any group has, so that rows of different groups of a file have different numbers."""


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


def held_out_rows(
    listing: Listing, group: Group, rows: NDArray[np.int64], share: float
) -> NDArray[np.bool_]:
    """Which rows (n,) of a group are held out: about a `share` of them, by the hash of their names.

    A row's name is its file's, and its number in the file. So the same rows are held out in every
    run, whatever its seed, and wherever the files lie.
    """
    name = listing.files[group.file].name.encode()
    file = np.frombuffer(hashlib.blake2b(name, digest_size=8).digest(), dtype=np.uint64)
    numbers = rows.astype(np.uint64)
    if group.first_row is None:
        numbers = numbers + np.uint64(group.index) * LINES_OF_A_GROUP
    else:
        numbers = numbers + np.uint64(group.first_row)
    fractions = (mixed(file ^ mixed(numbers)) >> np.uint64(11)) * 2.0**-53
    return fractions < share


def shuffled(count: int, keys: NDArray[np.uint64]) -> list[int]:
    """The numbers 0..count in another order."""
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
