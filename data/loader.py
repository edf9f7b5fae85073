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

from data.documents import DocumentRows, Documents, evenly
from data.errors import DataError
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

    def order(self, seed: int, global_batch_size: int) -> Order:
        """The order in which they are trained on."""
        return self.text.order(self.block_size, seed, global_batch_size)

    @property
    def target_count(self) -> int:
        """How many tokens of a prepared text are predicted: nothing predicts the first one."""
        return len(self.text) - 1  # type: ignore[arg-type]

    def in_order(self, at_most: int | None) -> list[int]:
        """The items of an evaluation: consecutive blocks to the end of a text, or some of them."""
        blocks = range(0, self.target_count, self.block_size)  # the last one may be short
        return evenly(blocks, at_most)

    def __getitems__(self, items: list[Any]) -> tuple[tuple[Tensor, ...], float]:
        """Inputs and targets, each int64 (B, T), and positions (B, T) of a masked text.

        Their share is that of the rows that are no padding: in training every window has the same
        number of targets.
        """
        shape = len(items), self.block_size
        inputs = np.zeros(shape, dtype=np.int64)
        targets = np.full(shape, self.ignored, dtype=np.int64)
        positions = np.tile(np.arange(self.block_size), (len(items), 1))
        windows = 0
        for row, item in enumerate(items):
            if item is None:
                continue
            tokens, begins = self.text.block(item, self.block_size + 1)
            length = len(tokens) - 1
            inputs[row, :length], targets[row, :length] = tokens[:-1], tokens[1:]
            if self.text.masks:
                positions[row] = positions_of(self.block_size, begins[begins < self.block_size])
            windows += 1
        batch = (inputs, targets, positions) if self.text.masks else (inputs, targets)
        return tuple(map(torch.from_numpy, batch)), windows / len(items)


def windows_of(
    text: Text | Documents, block_size: int, ignored: int, pack: bool
) -> Windows | DocumentRows:
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

    def __init__(
        self, windows: Windows | DocumentRows, at_most: int | None, batch_size: int
    ) -> None:
        self.batch_size = batch_size
        items: list[Any] = list(windows.in_order(at_most))
        padded = items + [None] * (-len(items) % batch_size)
        self.batches = [padded[i : i + batch_size] for i in range(0, len(padded), batch_size)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.batches)


def window_loader(
    windows: Windows | DocumentRows, batches: StepBatches | HeldOutBatches, pinned: bool = False
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
