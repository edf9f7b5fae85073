"""A text of conversations, and which of them share a row."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data.token_file import TokenFile, TokenStream


@dataclass(frozen=True)
class Documents:
    """A part of a text of conversations, which are trained on one by one."""

    tokens: TokenStream
    ends: NDArray[np.int64]
    """The first token after each conversation, in ascending order."""
    targets: NDArray[np.int64]
    """Bounds (2N,) of consecutive targets."""

    @classmethod
    def of(cls, file: TokenFile, begin: int, stop: int) -> Documents:
        """The conversations of tokens begin..stop of a file."""

        def own(places: NDArray[np.int64]) -> NDArray[np.int64]:
            first, last = np.searchsorted(places, (begin, stop), side="right")
            return places[first:last] - begin

        return cls(TokenStream(file, begin, stop), own(file.ends), own(file.targets))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def counts(self) -> NDArray[np.int64]:
        """The number of targets of each conversation, at least one."""
        firsts = self.targets[::2]
        document, lengths = np.searchsorted(self.ends, firsts, "right"), self.targets[1::2] - firsts
        counts = np.bincount(document, weights=lengths, minlength=len(self.ends))
        return counts.astype(np.int64)

    def are_targets(self, start: int, length: int) -> NDArray[np.bool_]:
        """Whether each of tokens start..start+length is a target."""
        places = np.arange(start, start + length)
        return np.searchsorted(self.targets, places, side="right") % 2 == 1


def best_fit(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The row of each length: the longest first, each into the row in which it leaves least space.

    Best-fit decreasing (Johnson, 1973). No length exceeds `capacity`.
    """
    row_of = np.empty(len(lengths), dtype=np.int64)
    rows_by_space: defaultdict[int, list[int]] = defaultdict(list)
    spaces: list[int] = []  # that some row has, in ascending order
    rows = 0
    longest_first = np.argsort(-lengths, kind="stable")
    for number, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        at = bisect_left(spaces, length)
        if at == len(spaces):
            row, space, rows = rows, capacity, rows + 1
        else:
            space = spaces[at]
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                del spaces[at]
        row_of[number] = row
        if space > length:
            if not rows_by_space[space - length]:
                insort(spaces, space - length)
            rows_by_space[space - length].append(row)
    return row_of
