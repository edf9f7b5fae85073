"""Rows of documents: one document in a row, or several that do not see each other.

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

from data.order import NO_ROW, RowOrder
from data.token_file import TokenStream


@dataclass(frozen=True)
class Documents:
    """A part of a text in which documents are trained on one by one."""

    tokens: TokenStream
    ends: NDArray[np.int64]
    """The first token after each document, in ascending order."""
    trained: TokenStream | None = None
    """Conversations only: 1 for each target token, 0 for any other."""
    targets: NDArray[np.int64] | None = None
    """Conversations only: the number of targets of each."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def usable(self) -> int:
        """Number of documents with a target."""
        return int((np.diff(self.ends, prepend=0) > 1).sum())

    @property
    def predicted(self) -> int:
        """How many tokens are predicted where documents are texts: all but the first of each."""
        return int((np.diff(self.ends, prepend=0) - 1).clip(0).sum())


class DocumentRows(Dataset):
    """Rows of documents, by number.

    A document that is longer than a row is cut into consecutive pieces; a conversation never is. A
    row holds one piece and is padded, or with `pack` as many pieces as fit; positions then begin
    again with each. Which pieces share a row depends on their lengths alone.

    An item of a loader is a row and its weight: in training the inverse of the mean number of
    targets of the rows of its step, see `RowOrder`; in an evaluation 1.
    """

    nothing = NO_ROW

    def __init__(self, documents: Documents, block_size: int, ignored: int, pack: bool) -> None:
        self.documents = documents
        self.block_size = block_size
        self.ignored = ignored
        self.pack = pack
        starts, lengths, targets = _pieces(documents, block_size)
        rows = best_fit(lengths, block_size) if pack else np.arange(len(lengths))
        order = np.argsort(rows, kind="stable")
        self.starts, self.lengths = starts[order], lengths[order]
        counts = np.bincount(rows) if len(rows) else np.zeros(0, dtype=np.int64)
        self.bounds = np.concatenate(([0], np.cumsum(counts)))
        """The first piece of each row, and the number of pieces."""
        self.targets = np.bincount(rows, weights=targets).astype(np.int64)
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
        count = len(self) if at_most is None else min(len(self), at_most)
        return [(i * len(self) // count, 1.0) for i in range(count)]

    def __getitems__(self, items: list[tuple[int, float]]) -> tuple[tuple[Tensor, ...], float]:
        """Inputs and targets, each int64 (B, T), with positions (B, T) if packed, and their share.

        The share is the number of targets of a row, relative to the mean of the step.
        """
        shape = len(items), self.block_size
        inputs = np.zeros(shape, dtype=np.int64)
        targets = np.full(shape, self.ignored, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        share = 0.0
        for row, (number, weight) in enumerate(items):
            at = 0
            if (number, weight) != NO_ROW:
                share += float(self.targets[number]) * weight / len(items)
                for piece in range(self.bounds[number], self.bounds[number + 1]):
                    start, length = int(self.starts[piece]), int(self.lengths[piece])
                    stop = at + length
                    inputs[row, at:stop], targets[row, at:stop] = self._piece(start, length)
                    positions[row, at:stop] = np.arange(length)
                    at = stop
            positions[row, at:] = np.arange(self.block_size - at)
        batch = (inputs, targets, positions) if self.pack else (inputs, targets)
        return tuple(map(torch.from_numpy, batch)), share

    def _piece(self, start: int, length: int) -> tuple[NDArray, NDArray]:
        """The inputs and the targets of a piece, each (length,)."""
        window = self.documents.tokens.window(start, length + 1)
        targets = window[1:].astype(np.int64)
        if self.documents.trained is not None:
            targets[self.documents.trained.window(start + 1, length) == 0] = self.ignored
        return window[:-1], targets


def _pieces(
    documents: Documents, block_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """First tokens, lengths and numbers of targets of all pieces; a length is that of the inputs.

    Nothing predicts the first token of a document, so one of a single token has no piece.
    """
    begins = np.concatenate(([0], documents.ends[:-1])).astype(np.int64)
    inputs = np.maximum(documents.ends - begins - 1, 0)
    if documents.targets is not None:
        return begins, inputs, documents.targets
    counts = -(-inputs // block_size)
    of = np.repeat(np.arange(len(inputs)), counts)
    number = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = number * block_size
    lengths = np.minimum(block_size, inputs[of] - offsets)
    return begins[of] + offsets, lengths, lengths


def best_fit(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The row of each piece: the longest first, each into the row in which it leaves least space.

    Best-fit decreasing (Johnson, 1973). No length exceeds `capacity`.
    """
    row_of = np.empty(len(lengths), dtype=np.int64)
    rows_by_space: defaultdict[int, list[int]] = defaultdict(list)
    spaces: list[int] = []  # that some row has, in ascending order
    rows = 0
    longest_first = np.argsort(-lengths, kind="stable")
    for piece, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        at = bisect_left(spaces, length)
        if at == len(spaces):
            row, space, rows = rows, capacity, rows + 1
        else:
            space = spaces[at]
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                del spaces[at]
        row_of[piece] = row
        if space > length:
            if not rows_by_space[space - length]:
                insort(spaces, space - length)
            rows_by_space[space - length].append(row)
    return row_of
