"""The order of a run's training blocks: a pure function of (seed, epoch, position).

Nothing is stored, and no batches are skipped: the window at any position of any epoch is computed
directly. The permutation of the blocks is evaluated per index and needs no memory, whatever the
size of the corpus: a Feistel network over the indices (Luby & Rackoff, 1988), with cycle walking
for sizes that are not a power of two (Black & Rogaway, 2002).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6
GROUPS, ROWS, BLOCKS = 0, 1, 2
"""What random numbers are for: the first of the numbers that they are a function of. All have the
same number of them, because numpy ignores zeros at their end."""


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix 64-bit numbers, one to one (SplitMix64's finaliser, Steele et al., 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permuted(indices: NDArray[np.int64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """`indices` under a permutation of range(size), which `keys` (ROUNDS,) select."""
    bits = max(2, (size - 1).bit_length())
    widths = (bits // 2, bits - bits // 2)  # of the right and the left half; they swap each round

    def network(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        right_bits, left_bits = widths
        left, right = values >> np.uint64(right_bits), values & np.uint64((1 << right_bits) - 1)
        for key in keys:
            mask = np.uint64((1 << left_bits) - 1)
            left, right = right, left ^ (mixed(right + key) & mask)
            right_bits, left_bits = left_bits, right_bits
        return (left << np.uint64(right_bits)) | right

    values = network(indices.astype(np.uint64))
    while (outside := values >= size).any():  # cycle walking: apply it until the value is in range
        values[outside] = network(values[outside])
    return values.astype(np.int64)


def random_words(*numbers: int, count: int = ROUNDS) -> NDArray[np.uint64]:
    """Random words (count,) that are a function of some numbers; by default keys of `permuted`."""
    return np.random.SeedSequence(numbers).generate_state(count, np.uint64).astype(np.uint64)


def shuffled(
    first: int, count: int, size: int, keys_of: Callable[[int], NDArray[np.uint64]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Round and place in the round, each (count,), of sequences first..first+count of a run.

    A round has each place below `size` once; `keys_of` its number selects their order.
    """
    rounds, places = np.divmod(np.arange(first, first + count, dtype=np.int64), size)
    for number in np.unique(rounds):
        chosen = rounds == number
        places[chosen] = permuted(places[chosen], size, keys_of(int(number)))
    return rounds, places


class BlockOrder:
    """Maps training sequence i of a run, counted from 0 over all epochs, to a window of the text.

    Every epoch has the same number of blocks and shifts their boundaries by its own offset, so that
    no character is always at the edge of a block.
    """

    def __init__(self, tokens: int, block_size: int, seed: int) -> None:
        assert tokens > block_size, "a window is one block and the token after it"
        self.block_size = block_size
        self.seed = seed
        # One block fewer than fit, so that every offset has the same number.
        self.blocks_per_epoch = max(1, tokens // block_size - 1)
        self.largest_offset = min(block_size - 1, tokens - 1 - self.blocks_per_epoch * block_size)

    def epoch_of(self, sequence: int) -> int:
        """The epoch, counted from 0, that a sequence number belongs to."""
        return sequence // self.blocks_per_epoch

    def items(self, first: int, count: int) -> list[int]:
        """The items of a loader for sequences first..first+count: the first tokens of windows."""
        keys_of = partial(random_words, self.seed)
        epochs, blocks = shuffled(first, count, self.blocks_per_epoch, keys_of)
        starts = blocks * self.block_size
        for epoch in np.unique(epochs):
            word = random_words(self.seed, int(epoch), count=ROUNDS + 1)[ROUNDS]
            starts[epochs == epoch] += int(word % np.uint64(self.largest_offset + 1))
        items: list[int] = starts.tolist()
        return items


class RowOrder:
    """Maps training sequence i of a run, counted from 0 over all epochs, to a row of documents."""

    def __init__(self, targets: NDArray[np.int64], seed: int, global_batch_size: int) -> None:
        """`targets` (rows,): how many targets each row has, at least one."""
        self.targets = targets
        self.seed = seed
        self.global_batch_size = global_batch_size

    def epoch_of(self, sequence: int) -> int:
        """The epoch, counted from 0, that a sequence number belongs to."""
        return sequence // len(self.targets)

    def items(self, first: int, count: int) -> list[tuple[int, float]]:
        """The items of a loader for the sequences of whole steps: rows, each with a weight.

        The weight is the inverse of the mean number of targets of the step's rows. So a batch with
        more targets than the mean has a larger share of the step, and every target weighs the same.
        """
        assert first % self.global_batch_size == 0 == count % self.global_batch_size
        _, rows = shuffled(first, count, len(self.targets), partial(random_words, self.seed))
        means = self.targets[rows].reshape(-1, self.global_batch_size).mean(axis=1)
        weights = np.repeat(1 / means, self.global_batch_size)
        return list(zip(rows.tolist(), weights.tolist(), strict=True))


WHOLE = 10_000
"""The resolution of weights: four decimals are exact."""
SHORTEST_ROUND = 100
"""In blocks. Short rounds keep every part of a run near the weights; each costs a little time."""


class Mix:
    """Maps training block i of a run to one of several sources, which have weights.

    Blocks come in rounds. In each, every source has its exact number of blocks, in an order that is
    a permutation of the round. So how many blocks a source has had before any block needs no
    history.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """Weights are above 0 and need not add up to 1."""
        self.seed = seed
        shares = np.array(shares_of(weights))
        shares //= np.gcd.reduce(shares)
        self.blocks = shares * -(-SHORTEST_ROUND // shares.sum())
        """Blocks of each source in a round."""
        self._ends = np.cumsum(self.blocks)
        self._round = int(self._ends[-1])

    def sources(self, first: int, count: int) -> NDArray[np.int64]:
        """The sources (count,) of blocks first..first+count, counted from 0."""
        _, places = shuffled(first, count, self._round, self._keys_of)
        return np.searchsorted(self._ends, places, side="right")

    def counts(self, block: int) -> list[int]:
        """Number of blocks of each source before a block."""
        rounds, place = divmod(block, self._round)
        begun = np.bincount(self.sources(block - place, place), minlength=len(self.blocks))
        counts: list[int] = (rounds * self.blocks + begun).tolist()
        return counts

    def _keys_of(self, number: int) -> NDArray[np.uint64]:
        return random_words(BLOCKS, self.seed, number, 0, 0)


def shares_of(weights: Sequence[float]) -> list[int]:
    """The shares of weights in `WHOLE` parts, rounded by largest remainders.

    A weight below half a part has none.
    """
    exact = np.array(weights, dtype=np.float64) / sum(weights) * WHOLE
    shares = np.floor(exact + 1e-9).astype(np.int64)  # 0.29 x 10,000 is a little less than 2,900
    left = WHOLE - int(shares.sum())
    shares[np.argsort(shares - exact, kind="stable")[:left]] += 1
    parts: list[int] = shares.tolist()
    return parts
