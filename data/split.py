"""How the sequences of a step are divided among processes and their micro-batches.

Any number of processes takes any global batch. Where it cannot be divided equally, parts differ by
one sequence, and the smaller ones are padded with a row whose targets do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Split:
    """The division of a step: `accumulation` global micro-batches of `parts` parts each."""

    sequences: int
    """Of a step: the global batch."""
    parts: int = 1
    """Parts of a global micro-batch, one for each process or group of processes that shares."""
    accumulation: int = 1
    """Micro-batches of each process in a step."""

    @classmethod
    def of(cls, sequences: int, micro_batch_size: int | None, parts: int) -> Split:
        """The split with the fewest padding rows, and of several the one with fewest micro-batches.

        `micro_batch_size` is the most rows of a part; None takes all at once. A part has at least
        half as many: smaller ones would pad less, but take more than twice as many passes.
        """
        share = -(-sequences // parts)  # rows of a process, with padding
        most = share if micro_batch_size is None else min(micro_batch_size, share)
        sizes = range(most, (most - 1) // 2, -1)
        size = min(sizes, key=lambda size: -(-share // size) * size)  # the first of the smallest
        return cls(sequences, parts, -(-share // size))

    @property
    def micro_batch(self) -> int:
        """Rows of a part, padding included."""
        return -(-self.sequences // (self.accumulation * self.parts))

    @property
    def global_micro_batch(self) -> int:
        """Rows that all processes compute at once, padding included."""
        return self.micro_batch * self.parts

    @property
    def rows(self) -> int:
        """Rows of a step, padding included."""
        return self.global_micro_batch * self.accumulation

    @property
    def padding(self) -> int:
        """Rows of a step whose targets do not count."""
        return self.rows - self.sequences

    @property
    def factor(self) -> float:
        """By how much the mean over all rows of a step is too small, as padding adds nothing."""
        return self.rows / self.sequences

    def micro_batches(self, items: Sequence[Any]) -> Iterator[list[Any]]:
        """The items of a step in global micro-batches, whose parts are padded with None."""
        count = self.accumulation * self.parts
        least, larger = divmod(self.sequences, count)
        batch: list[Any] = []
        first = 0
        for part in range(count):
            end = first + least + (part < larger)
            batch += items[first:end]
            batch += [None] * (self.micro_batch - (end - first))
            first = end
            if (part + 1) % self.parts == 0:
                yield batch
                batch = []
