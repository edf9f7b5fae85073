"""Batches of windows or rows: endless for training, in the run's order; once for evaluation.

Letters in shapes: B sequences of one batch, T block_size.

Both samplers yield the items of a global micro-batch, that is, of one micro-batch of all
processes; accelerate gives each process its part (`split_batches=True`). So the order does not
depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data.documents import Documents, best_fit
from data.errors import DataError
from data.order import RowOrder
from data.split import Split
from data.token_file import positions_of

SEQUENCES_AHEAD = 512
"""How many positions of the order are computed at once."""
CANNOT_MASK = (
    "data.documents=masked needs a model that keeps documents in a row apart, which this one does "
    "not (docs/conversations.md lists those that do). Use packed."
)


class Order(Protocol):
    """Which item of a loader each training sequence of a run is; they count from 0."""

    def items(self, first: int, count: int) -> list[Any]:
        """The items for sequences first..first+count, which are whole steps."""

    def epoch_of(self, sequence: int) -> int:
        """The epoch, counted from 0, that the last sequence of a step belongs to."""


class Text(Protocol):
    """A text, prepared or streamed, of which windows are read."""

    masks: bool
    """Whether windows say where documents begin."""

    def order(self, block_size: int, seed: int, global_batch_size: int) -> Order:
        """The order in which windows are trained on."""

    def block(self, item: Any, most: int) -> tuple[NDArray, NDArray[np.int64]]:
        """At most so many tokens of an item, and the places at which documents begin."""


class Windows(Dataset):
    """Windows of a text. `ignored` pads targets."""

    def __init__(self, text: Text, block_size: int, ignored: int) -> None:
        self.text = text
        self.block_size = block_size
        self.ignored = ignored
        self.has_positions = text.masks

    def order(self, seed: int, global_batch_size: int) -> Order:
        """The order in which they are trained on."""
        return self.text.order(self.block_size, seed, global_batch_size)

    @property
    def target_count(self) -> int:
        """How many tokens of a prepared text are predicted: nothing predicts the first one."""
        return len(self.text) - 1  # type: ignore[arg-type]

    def in_order(self, at_most: int | None) -> list[Any]:
        """The items of an evaluation: consecutive blocks to the end of a text, or some of them."""
        blocks = range(0, self.target_count, self.block_size)  # the last one may be short
        return evenly(blocks, at_most)

    def __getitems__(self, items: list[Any]) -> tuple[tuple[Tensor, ...], float]:
        """Inputs and targets, each int64 (B, T), perhaps positions (B, T), and their share.

        None is a row of padding. The share is the mean of what `fill` returns.
        """
        shape = len(items), self.block_size
        inputs = np.zeros(shape, dtype=np.int64)
        targets = np.full(shape, self.ignored, dtype=np.int64)
        positions = np.tile(np.arange(self.block_size), (len(items), 1))
        share = 0.0
        for row, item in enumerate(items):
            if item is not None:
                share += self.fill(item, inputs[row], targets[row], positions[row])
        batch = (inputs, targets, positions) if self.has_positions else (inputs, targets)
        return tuple(map(torch.from_numpy, batch)), share / len(items)

    def fill(self, item: Any, inputs: NDArray, targets: NDArray, positions: NDArray) -> float:
        """Fill a row, each (T,). Returns its number of targets, relative to the mean of the step.

        In training every window has the same number.
        """
        tokens, begins = self.text.block(item, self.block_size + 1)
        length = len(tokens) - 1
        inputs[:length], targets[:length] = tokens[:-1], tokens[1:]
        if self.has_positions:
            positions[:] = positions_of(self.block_size, begins[begins < self.block_size])
        return 1.0


class DocumentRows(Windows):
    """Rows of conversations, by number.

    A row holds one conversation and is padded, or with `pack` as many as fit; positions then begin
    again with each. Which conversations share a row depends on their lengths alone. None is longer
    than a row.

    An item is a row and its weight: in training the inverse of the mean number of targets of the
    rows of its step, see `RowOrder`; in an evaluation 1.
    """

    def __init__(self, documents: Documents, block_size: int, ignored: int, pack: bool) -> None:
        super().__init__(documents.tokens, block_size, ignored)
        self.documents = documents
        self.has_positions = pack
        starts = np.concatenate(([0], documents.ends[:-1])).astype(np.int64)
        lengths = documents.ends - starts - 1  # of the inputs: the last token is only a target
        rows = best_fit(lengths, block_size) if pack else np.arange(len(lengths))
        order = np.argsort(rows, kind="stable")
        self.starts, self.lengths = starts[order], lengths[order]
        self.bounds = np.concatenate(([0], np.cumsum(np.bincount(rows))))
        """The first conversation of each row, and the number of conversations."""
        self.targets = np.bincount(rows, weights=documents.counts).astype(np.int64)
        """Number of targets of each row."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def target_count(self) -> int:
        """How many tokens are predicted."""
        return int(self.targets.sum())

    def order(self, seed: int, global_batch_size: int) -> Order:
        """The order in which they are trained on."""
        return RowOrder(self.targets, seed, global_batch_size)

    def in_order(self, at_most: int | None) -> list[Any]:
        """All rows for an evaluation, or the same `at_most` of them each time, evenly spaced."""
        return [(row, 1.0) for row in evenly(range(len(self)), at_most)]

    def fill(self, item: Any, inputs: NDArray, targets: NDArray, positions: NDArray) -> float:
        """Fill a row with its conversations."""
        row, weight = item
        at = 0
        for document in range(self.bounds[row], self.bounds[row + 1]):
            start, length = int(self.starts[document]), int(self.lengths[document])
            tokens = self.documents.tokens.window(start, length + 1)
            trained = self.documents.are_targets(start + 1, length)
            part = slice(at, at + length)
            inputs[part], positions[part] = tokens[:-1], np.arange(length)
            targets[part][trained] = tokens[1:][trained]
            at += length
        positions[at:] = np.arange(self.block_size - at)
        return float(self.targets[row]) * weight


def evenly(items: range, at_most: int | None) -> list[int]:
    """All items or, if there are more than `at_most`, the same ones each time, evenly spaced."""
    count = len(items) if at_most is None else min(len(items), at_most)
    return [items[i * len(items) // count] for i in range(count)]


def windows_of(text: Text | Documents, block_size: int, ignored: int, pack: bool) -> Windows:
    """What is trained on or evaluated: windows of a text, or rows of documents.

    With `pack` the model keeps the documents of a row apart, by their positions. Raises DataError
    for a masked text without it.
    """
    if isinstance(text, Documents):
        return DocumentRows(text, block_size, ignored, pack)
    if text.masks and not pack:
        raise DataError(CANNOT_MASK)
    return Windows(text, block_size, ignored)


class StepBatches:
    """Endless global micro-batches from step `first_step`. A late start costs nothing extra.

    Step s, counted from 1, takes sequences (s-1)*G .. s*G of the order, G being the global batch.
    """

    def __init__(self, order: Order, split: Split, first_step: int) -> None:
        self.order, self.split = order, split
        self.batch_size = split.global_micro_batch  # accelerate reads it to split batches
        self.factor = split.factor
        self.first_sequence = (first_step - 1) * split.sequences

    def __iter__(self) -> Iterator[list[Any]]:
        # Many positions at once cost little more than one.
        size = self.split.sequences
        ahead = max(1, SEQUENCES_AHEAD // size) * size
        sequence = self.first_sequence
        while True:
            items = self.order.items(sequence, ahead)
            for first in range(0, ahead, size):
                yield from self.split.micro_batches(items[first : first + size])
            sequence += ahead


class HeldOutBatches:
    """Each window or row once, or `at_most` of them; the last batch is padded with None."""

    factor = 1.0
    """An evaluation counts targets and does without shares."""

    def __init__(self, windows: Windows, at_most: int | None, batch_size: int) -> None:
        self.batch_size = batch_size
        items: list[Any] = list(windows.in_order(at_most))
        padded = items + [None] * (-len(items) % batch_size)
        self.batches = [padded[i : i + batch_size] for i in range(0, len(padded), batch_size)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.batches)


def window_loader(
    windows: Windows, batches: StepBatches | HeldOutBatches, pinned: bool = False
) -> DataLoader:
    """A loader of pairs: inputs, targets and perhaps positions, each int64 (B, T), and their share.

    The mean loss over the targets of a batch, times its share, is what the batch adds to the mean
    over all targets of its step. The loader does not use the global generator. `pinned` puts the
    batches into page-locked memory, for asynchronous copies to a GPU.
    """
    return DataLoader(
        windows,
        batch_sampler=batches,
        collate_fn=lambda batch: (batch[0], batch[1] * batches.factor),
        pin_memory=pinned,
        # Its own generator: a new iterator would advance the global one, which dropout uses.
        generator=torch.Generator(),
    )
