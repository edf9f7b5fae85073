"""The rows that the loop trains on, as they reach the model: B sequences of T tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from model.head import IGNORED
from training.distributed.sharing import data_parallel_size

PADDING = -1
"""In place of the digest of a row that only pads a batch: each process has as many."""
SHOWN = 4
"""Rows that are kept to be shown and checked."""


class Rows:
    """Records a digest of each row, by step, and the first rows as they are."""

    def __init__(self) -> None:
        self.first: list[tuple[list[int], list[int]]] = []
        """Inputs and targets of the first rows, each (T,)."""
        self.all_inputs: list[list[int]] = []
        """The inputs of every row of this process."""
        self._present: list[int] = []
        self._by_step: dict[int, list[int]] = {}

    def recorded(
        self, timed: Callable[[Iterable[Any]], Iterator[Any]]
    ) -> Callable[[Iterable[Any]], Iterator[Any]]:
        """`PhaseClock.timed`, which also records what it yields."""

        def both(batches: Iterable[Any]) -> Iterator[Any]:
            for batch in timed(batches):
                self._record(*batch[0][:2])
                yield batch

        return both

    def end_step(self, step: int) -> None:
        """The rows since the last call are those of a step."""
        self._by_step[step], self._present = self._present, []

    def of_all(self, accelerator: Accelerator) -> dict[int, list[str]]:
        """By step, the sorted digests of the rows of all processes. Every process must call this.

        Padding, whose targets do not count, is left out. Processes that share sequences or matrices
        have the same rows, which count once.
        """
        shared = accelerator.num_processes // data_parallel_size(accelerator)
        found = {}
        for step, mine in self._by_step.items():
            gathered: Tensor = accelerator.gather(torch.tensor(mine, device=accelerator.device))
            rows = [one for one in gathered.tolist() if one != PADDING]
            found[step] = sorted(f"{one:016x}" for one in rows)[::shared]
        return found

    def _record(self, inputs: Tensor, targets: Tensor) -> None:
        inputs, targets = inputs.cpu(), targets.cpu()
        for row, aim in zip(inputs, targets, strict=True):
            if not (aim != IGNORED).any():
                self._present.append(PADDING)
                continue
            both = torch.cat([row, aim]).numpy().tobytes()
            digest = hashlib.blake2b(both, digest_size=7).digest()  # fits a signed 64-bit number
            self._present.append(int.from_bytes(digest))
            self.all_inputs.append(row.tolist())
            if len(self.first) < SHOWN:
                self.first.append((row.tolist(), aim.tolist()))
