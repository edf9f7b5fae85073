"""Batches of windows or rows: endless for training, in the run's order; once for evaluation.

Letters in shapes: B sequences of one batch, T block_size.

Both samplers yield the items of a global micro-batch, that is, of one micro-batch of all
processes; accelerate gives each process its part (`split_batches=True`). So the order does not
depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol, cast, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data.documents import DocumentRows, Documents
from data.errors import DataError
from data.order import NO_WINDOW, BlockOrder
from data.split import Split
from data.token_file import TokenStream

SEQUENCES_AHEAD = 512
"""How many positions of the order are computed at once."""
CANNOT_MASK = (
    "data.documents=masked needs a model that keeps documents in a row apart, which this one does "
    "not (docs/conversations.md lists those that do). Use packed."
)


class Windows(Dataset):
    """Windows of a stream, by the first token. `ignored` pads targets."""

    nothing = NO_WINDOW

    def __init__(self, tokens: TokenStream, block_size: int, ignored: int) -> None:
        self.tokens = tokens
        self.block_size = block_size
        self.ignored = ignored

    def __len__(self) -> int:
        return len(self.tokens)

    def order(self, seed: int, global_batch_size: int) -> BlockOrder:
        """The order in which they are trained on."""
        return BlockOrder(len(self.tokens), self.block_size, seed)

    @property
    def target_count(self) -> int:
        """How many tokens are predicted: nothing predicts the first one."""
        return len(self.tokens) - 1

    def in_order(self, at_most: int | None) -> list[int]:
        """The items of an evaluation, evenly spaced as in `held_out_starts`."""
        return held_out_starts(len(self.tokens), self.block_size, at_most)

    def __getitems__(self, starts: list[int]) -> tuple[tuple[Tensor, ...], float]:
        """Inputs and targets, each int64 (B, T), of the windows that begin at `starts`.

        Those of a masked stream have positions, too. Their share is that of the rows that are no
        padding: in training every window has the same number of targets.
        """
        tokens = len(self.tokens)
        inputs = np.zeros((len(starts), self.block_size), dtype=np.int64)
        targets = np.full((len(starts), self.block_size), self.ignored, dtype=np.int64)
        positions = np.tile(np.arange(self.block_size), (len(starts), 1))
        masks = self.tokens.masks
        for row, start in enumerate(starts):
            if start == NO_WINDOW:
                continue
            length = min(self.block_size, tokens - start - 1)
            window = self.tokens.window(start, length + 1)
            inputs[row, :length] = window[:-1]
            targets[row, :length] = window[1:]
            if masks:
                positions[row, :length] = self.tokens.positions(start, length)
        batch = (inputs, targets, positions) if masks else (inputs, targets)
        share = sum(start != NO_WINDOW for start in starts) / len(starts)
        return tuple(map(torch.from_numpy, batch)), share


@overload
def windows_of(
    text: TokenStream | Documents, block_size: int, ignored: int, pack: bool
) -> Windows | DocumentRows: ...


@overload
def windows_of(
    text: TokenStream | Documents | EndlessText, block_size: int, ignored: int, pack: bool
) -> Sequences: ...


def windows_of(
    text: TokenStream | Documents | EndlessText, block_size: int, ignored: int, pack: bool
) -> Sequences:
    """What is trained on or evaluated: windows of a stream, rows of documents, or blocks.

    With `pack` the model keeps the documents of a row apart, by their positions. Raises DataError
    for a masked text without it.
    """
    if isinstance(text, Documents):
        return DocumentRows(text, block_size, ignored, pack)
    if text.masks and not pack:
        raise DataError(CANNOT_MASK)
    if isinstance(text, TokenStream):
        return Windows(text, block_size, ignored)
    return text.sequences(block_size, ignored)


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
                yield from self.split.micro_batches(items[first : first + size], self.order.nothing)
            sequence += ahead


class HeldOutBatches:
    """Each window or row once, or `at_most` of them; the last batch is padded with `nothing`."""

    factor = 1.0
    """An evaluation counts targets and does without shares."""

    def __init__(
        self, windows: Windows | DocumentRows, at_most: int | None, batch_size: int
    ) -> None:
        self.batch_size = batch_size
        items: list[Any] = list(windows.in_order(at_most))
        padded = items + [windows.nothing] * (-len(items) % batch_size)
        self.batches = [padded[i : i + batch_size] for i in range(0, len(padded), batch_size)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.batches)


def held_out_starts(tokens: int, block_size: int, at_most: int | None) -> list[int]:
    """First tokens of the evaluation's windows: consecutive blocks, to the end of the text.

    If there are more than `at_most` blocks, the same `at_most` of them each time, evenly spaced.
    """
    blocks = -(-(tokens - 1) // block_size)  # the last one may be short
    count = blocks if at_most is None else min(blocks, at_most)
    return [(i * blocks // count) * block_size for i in range(count)]


def window_loader(
    windows: Sequences, batches: StepBatches | HeldOutBatches, pinned: bool = False
) -> DataLoader:
    """A loader of pairs: inputs, targets and perhaps positions, each int64 (B, T), and their share.

    The mean loss over the targets of a batch, times its share, is what the batch adds to the mean
    over all targets of its step. The loader does not use the global generator. `pinned` puts the
    batches into page-locked memory, for asynchronous copies to a GPU.
    """
    return DataLoader(
        cast(Dataset, windows),
        batch_sampler=batches,
        collate_fn=partial(_weighed, factor=batches.factor),
        pin_memory=pinned,
        # Its own generator: a new iterator would advance the global one, which dropout uses.
        generator=torch.Generator(),
    )


def _weighed(batch: Any, factor: float) -> Any:  # torch types it as a list of rows
    """A batch with its share of the step, of which padding is no part."""
    rows, share = batch
    return rows, share * factor


class Order(Protocol):
    """Which item of a loader each training sequence of a run is; they count from 0."""

    nothing: Any
    """The item of a row whose targets do not count."""

    def items(self, first: int, count: int) -> list[Any]:
        """The items for sequences first..first+count, which are whole steps."""

    def epoch_of(self, sequence: int) -> int:
        """The epoch, counted from 0, that the last sequence of a step belongs to."""


class Sequences(Protocol):
    """What is trained on, by item."""

    def order(self, seed: int, global_batch_size: int) -> Order:
        """The order in which it is trained on."""

    def __getitems__(self, items: list[Any]) -> tuple[tuple[Tensor, ...], float]:
        """Inputs and targets, each int64 (B, T), perhaps with positions (B, T), and their share."""


class EndlessText(Protocol):
    """A text that is read while it is trained on."""

    def sequences(self, block_size: int, ignored: int) -> Sequences:
        """What a loader reads: blocks of so many tokens. `ignored` is the target of padding."""

    @property
    def masks(self) -> bool:
        """Whether the blocks say by positions where documents begin."""

    @property
    def in_words(self) -> list[str]:
        """The sources and their sizes, a line each."""
