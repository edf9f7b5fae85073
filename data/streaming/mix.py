"""Which source each block of a run is from: a function of the seed and the block's number.

Blocks come in rounds. In each, every source has its exact number of blocks, in an order that is a
permutation of the round. So how many blocks a source has had before any block needs no history.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from data.order import permuted, random_words
from data.streaming.shuffle import BLOCKS

WHOLE = 10_000
"""Weights hold to such a part of the whole, so those of four decimals hold exactly."""
SHORTEST_ROUND = 100
"""Blocks; short rounds keep every part of a run near the weights, and each costs a little time."""


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
