"""What a loader needs of a text, whether it is prepared or streamed."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Order(Protocol):
    """Which item of a loader each training sequence of a run is; they count from 0."""

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

    def sequences(self, block_size: int) -> Sequences:
        """What a loader reads: blocks of so many tokens."""

    @property
    def in_words(self) -> list[str]:
        """The sources and their sizes, a line each."""
