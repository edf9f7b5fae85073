"""Rows of conversations: one conversation in a row, or several that do not see each other.

Letters in shapes: B sequences of one batch, T block_size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from data.order import RowOrder
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


def evenly(items: range, at_most: int | None) -> list[int]:
    """All items or, if there are more than `at_most`, the same ones each time, evenly spaced."""
    count = len(items) if at_most is None else min(len(items), at_most)
    return [items[i * len(items) // count] for i in range(count)]


class DocumentRows(Dataset):
    """Rows of conversations, by number.

    A row holds one conversation and is padded, or with `pack` as many as fit; positions then begin
    again with each. Which conversations share a row depends on their lengths alone. None is longer
    than a row.

    An item of a loader is a row and its weight: in training the inverse of the mean number of
    targets of the rows of its step, see `RowOrder`; in an evaluation 1.
    """

    def __init__(self, documents: Documents, block_size: int, ignored: int, pack: bool) -> None:
        self.documents = documents
        self.block_size = block_size
        self.ignored = ignored
        self.pack = pack
        starts = np.concatenate(([0], documents.ends[:-1])).astype(np.int64)
        lengths = documents.ends - starts - 1  # of the inputs: the last token is only a target
        rows = best_fit(lengths, block_size) if pack else np.arange(len(lengths))
        order = np.argsort(rows, kind="stable")
        self.starts, self.lengths = starts[order], lengths[order]
        counts = np.bincount(rows) if len(rows) else np.zeros(0, dtype=np.int64)
        self.bounds = np.concatenate(([0], np.cumsum(counts)))
        """The first conversation of each row, and the number of conversations."""
        self.targets = np.bincount(rows, weights=documents.counts).astype(np.int64)
        """Number of targets of each row."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def target_count(self) -> int:
        """How many tokens are predicted."""
        return int(self.targets.sum())

    def order(self, seed: int, global_batch_size: int) -> RowOrder:
        """The order in which they are trained on."""
        return RowOrder(self.targets, seed, global_batch_size)

    def in_order(self, at_most: int | None) -> list[tuple[int, float]]:
        """All rows for an evaluation, or the same `at_most` of them each time, evenly spaced."""
        return [(row, 1.0) for row in evenly(range(len(self)), at_most)]

    def __getitems__(
        self, items: list[tuple[int, float] | None]
    ) -> tuple[tuple[Tensor, ...], float]:
        """Inputs and targets, each int64 (B, T), with positions (B, T) if packed, and their share.

        The share is the number of targets of a row, relative to the mean of the step.
        """
        shape = len(items), self.block_size
        inputs = np.zeros(shape, dtype=np.int64)
        targets = np.full(shape, self.ignored, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        share = 0.0
        for row, item in enumerate(items):
            at = 0
            if item is not None:
                number, weight = item
                share += float(self.targets[number]) * weight / len(items)
                for document in range(self.bounds[number], self.bounds[number + 1]):
                    start, length = int(self.starts[document]), int(self.lengths[document])
                    stop = at + length
                    inputs[row, at:stop], targets[row, at:stop] = self._document(start, length)
                    positions[row, at:stop] = np.arange(length)
                    at = stop
            positions[row, at:] = np.arange(self.block_size - at)
        batch = (inputs, targets, positions) if self.pack else (inputs, targets)
        return tuple(map(torch.from_numpy, batch)), share

    def _document(self, start: int, length: int) -> tuple[NDArray, NDArray]:
        """The inputs and the targets of a conversation, each (length,)."""
        window = self.documents.tokens.window(start, length + 1)
        targets = window[1:].astype(np.int64)
        targets[~self.documents.are_targets(start + 1, length)] = self.ignored
        return window[:-1], targets


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
