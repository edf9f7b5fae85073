"""Batches of windows: endless for training, in the run's order; each once for evaluation.

Letters in shapes: B sequences of one batch, T block_size.

Both samplers yield the windows of a global micro-batch, that is, of one micro-batch of all
processes; accelerate gives each process its part (`split_batches=True`). So the order does not
depend on the number of processes.
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
"""How many positions of the order are computed at once."""
NO_WINDOW = -1
"""Pads a batch of the evaluation: a row whose targets do not count."""


class Windows(Dataset):
    """Pairs of inputs and targets (T,), by the window's first token. `ignored` pads targets."""

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
    """Endless global micro-batches from step `first_step`. A late start costs nothing extra.

    Step s, counted from 1, takes sequences (s-1)*G .. s*G of the order, G being the global batch.
    """

    def __init__(
        self, order: BlockOrder, global_batch_size: int, batch_size: int, first_step: int
    ) -> None:
        assert global_batch_size % batch_size == 0
        self.order = order
        self.batch_size = batch_size  # accelerate reads it to split batches
        self.first_sequence = (first_step - 1) * global_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        # Many positions at once cost little more than one.
        ahead = self.batch_size * max(1, SEQUENCES_AHEAD // self.batch_size)
        sequence = self.first_sequence
        while True:
            starts = self.order.starts(sequence, ahead).tolist()
            for first in range(0, ahead, self.batch_size):
                yield starts[first : first + self.batch_size]
            sequence += ahead


class HeldOutBatches:
    """Each of the given windows once; the last batch is padded with `NO_WINDOW`."""

    def __init__(self, starts: list[int], batch_size: int) -> None:
        self.batch_size = batch_size
        padded = starts + [NO_WINDOW] * (-len(starts) % batch_size)
        self.batches = [padded[i : i + batch_size] for i in range(0, len(padded), batch_size)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


def held_out_starts(tokens: int, block_size: int, at_most: int | None) -> list[int]:
    """First tokens of the evaluation's windows: consecutive blocks, to the end of the text.

    If there are more than `at_most` blocks, the same `at_most` of them each time, evenly spaced.
    """
    blocks = -(-(tokens - 1) // block_size)  # the last one may be short
    count = blocks if at_most is None else min(blocks, at_most)
    return [(i * blocks // count) * block_size for i in range(count)]


def window_loader(
    windows: Windows,
    batches: StepBatches | HeldOutBatches,
    workers: int = 0,
    pinned: bool = False,
) -> DataLoader:
    """A loader of (inputs, targets), each int64 (B, T). It does not use the global generator.

    `pinned` puts them into page-locked memory, for asynchronous copies to a GPU.
    """
    if workers:
        atexit.register(_end_workers)
    return DataLoader(
        windows,
        batch_sampler=batches,
        collate_fn=_unchanged,
        num_workers=workers,
        pin_memory=pinned,
        # Its own generator: a new iterator would advance the global one, which dropout uses.
        generator=torch.Generator(),
        worker_init_fn=_ignore_signals,
    )


def _ignore_signals(worker: int) -> None:
    """Make a worker ignore signals: the main process ends its workers.

    Ctrl-C, a scheduler's signals and a closed terminal reach every process; the run then finishes
    its step, for which it needs its workers. Forked workers would also write to the wake-up pipe
    of the run.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _end_workers() -> None:
    """Kill the workers of a process that is about to exit.

    The traceback of an error may still reference their loader. Python would then send them SIGTERM,
    which they ignore, and wait for them forever.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler treats their end as an error
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def _unchanged(batch: Any) -> Any:  # torch types it as a list of rows
    return batch
