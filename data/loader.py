"""Batches of windows, for training (endless, in the run's order) and for evaluation (each once).

Letters in shapes: B sequences of one batch, T block_size.

Both samplers yield the windows of one micro-batch for all processes together; accelerate gives each
process its share (`split_batches=True`). So the order never depends on how many there are.
"""

from __future__ import annotations

import atexit
import multiprocessing
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data.order import BlockOrder
from data.stream import TokenStream

SEQUENCES_AHEAD = 512
"""How many places in the order are worked out together."""
NO_WINDOW = -1
"""Fills up a batch of evaluation: a row whose targets do not count."""


class Windows(Dataset):
    """Pairs of inputs and targets (T,), by the window's first token; `ignored` marks no target."""

    def __init__(self, tokens: TokenStream, block_size: int, ignored: int) -> None:
        self.tokens = tokens
        self.block_size = block_size
        self.ignored = ignored

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitems__(self, starts: list[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each int64 (B, T), of the windows that begin at `starts`."""
        inputs = np.zeros((len(starts), self.block_size), dtype=np.int64)
        targets = np.full((len(starts), self.block_size), self.ignored, dtype=np.int64)
        for row, start in enumerate(starts):
            if start == NO_WINDOW:
                continue
            length = min(self.block_size, len(self.tokens) - start - 1)
            window = self.tokens.window(start, length + 1)
            inputs[row, :length] = window[:-1]
            targets[row, :length] = window[1:]
        return torch.from_numpy(inputs), torch.from_numpy(targets)


class StepBatches:
    """Endless micro-batches from step `first_step` on; starting late costs nothing extra.

    Step s, counted from 1, takes sequences (s-1)*G .. s*G of the order, G being the global batch.
    """

    def __init__(
        self, order: BlockOrder, global_batch_size: int, batch_size: int, first_step: int
    ) -> None:
        assert global_batch_size % batch_size == 0
        self.order = order
        self.batch_size = batch_size  # read by accelerate, to split
        self.first_sequence = (first_step - 1) * global_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        # Many at once cost little more than one, and as much at any step.
        ahead = self.batch_size * max(1, SEQUENCES_AHEAD // self.batch_size)
        sequence = self.first_sequence
        while True:
            starts = self.order.starts(sequence, ahead).tolist()
            for first in range(0, ahead, self.batch_size):
                yield starts[first : first + self.batch_size]
            sequence += ahead


class HeldOutBatches:
    """Each of the given windows once; the last batch is filled up with `NO_WINDOW`."""

    def __init__(self, starts: list[int], batch_size: int) -> None:
        self.batch_size = batch_size
        filled = starts + [NO_WINDOW] * (-len(starts) % batch_size)
        self.batches = [filled[i : i + batch_size] for i in range(0, len(filled), batch_size)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


def held_out_starts(tokens: int, block_size: int, at_most: int | None) -> list[int]:
    """First tokens of the evaluation's windows: consecutive, to the end of the text.

    Where there are more than `at_most`, that many of them, evenly spread: always the same ones.
    """
    blocks = -(-(tokens - 1) // block_size)  # the last one may be short
    taken = blocks if at_most is None else min(blocks, at_most)
    return [(i * blocks // taken) * block_size for i in range(taken)]


def window_loader(
    windows: Windows,
    batches: StepBatches | HeldOutBatches,
    workers: int = 0,
    pinned: bool = False,
) -> DataLoader:
    """A loader of (inputs, targets), each int64 (B, T). It draws from no global generator.

    `pinned` puts them into page-locked memory, from which a GPU fetches them while it computes.
    """
    if workers:
        atexit.register(_end_workers)
    return DataLoader(
        windows,
        batch_sampler=batches,
        collate_fn=_as_it_is,
        num_workers=workers,
        pin_memory=pinned,
        generator=torch.Generator(),  # else creating an iterator moves the dropout's generator
        worker_init_fn=_leave_signals_to_the_run,
    )


def _leave_signals_to_the_run(worker: int) -> None:
    """A worker ends when the run does.

    A Ctrl-C, a scheduler's signals and the end of a terminal reach every process; the run then
    finishes its step, and needs its workers for it. Forked, they would also write into the run's
    own wake-up pipe.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _end_workers() -> None:
    """End the workers of a process that is about to exit.

    An error's traceback can still hold their loader. Python then sends them SIGTERM, which they
    ignore, and would wait for them for ever.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler takes their end for an error
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def _as_it_is(batch: Any) -> Any:  # torch says: of a list of rows
    return batch
