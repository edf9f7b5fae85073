"""The order in which a run reads its streams: each source is one long sequence of blocks.

The stream of a source is all windows of all epochs, one after another, cut into blocks. Where a
block begins depends on how many tokens the windows before it have, which nobody knows without
reading them: so a snapshot has a cursor for each source, and a start reads one window of each.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from common.retries import in_background
from data.errors import DataError
from data.streaming.windows import StreamSource, WindowId
from data.token_file import Span

WINDOWS_AHEAD = 4
"""How many windows of each source are prepared after the present one."""


@dataclass(frozen=True)
class Cursor:
    """Where the next block of a source begins, counted from 0."""

    epoch: int = 0
    window: int = 0
    row: int = 0
    """In the window's shuffled order."""
    token: int = 0
    """Token of the row."""
    blocks: int = 0
    """How many blocks the source has had."""


class Walk:
    """One source, block after block."""

    def __init__(self, source: StreamSource, start: Cursor) -> None:
        """Raises DataError if the source has no such place, and as reading does."""
        self._source, self._blocks = source, start.blocks
        self._reads_ahead, self._ahead = False, threading.Lock()
        if not self._has(start):
            raise DataError(
                f"data.source={source.listing.name} has no row {start.row} with a token "
                f"{start.token} in window {start.window} of epoch {start.epoch}, where the "
                "snapshot ends: the data or the tokenizer has changed. Restore it, or give the "
                "new run another run.name."
            )
        self._skip_ended()

    def _open(self, window: WindowId) -> None:
        self._window, self._offset = window, 0
        self._file = self._source.open(window)
        self._begins = np.append(0, self._file.ends)
        if self._reads_ahead:
            in_background(self._prepare_ahead)

    def _has(self, start: Cursor) -> bool:
        """Move to a cursor; returns whether there is such a place."""
        if start.window >= len(self._source.windows(start.epoch)):
            return False
        self._open((start.epoch, start.window))
        if start.row + start.token == 0:  # an empty first window has no row 0
            return True
        if start.row >= len(self._file.ends):
            return False
        self._offset = int(self._begins[start.row]) + start.token
        return self._offset < self._file.ends[start.row]

    def block(self, left: int) -> list[Span]:
        """The next block, of so many tokens, and the one after it: perhaps in later windows."""
        spans: list[Span] = []
        self._blocks += 1
        while left:
            file, first = self._file, self._offset
            count = min(left, len(file) - first)
            self._offset += count
            left -= count
            self._skip_ended()
            has_next = left == 0 and file is self._file
            spans.append((file, first, count + has_next))
        return spans if has_next else [*spans, (self._file, self._offset, 1)]

    @property
    def cursor(self) -> Cursor:
        """Where the next block begins."""
        row = int(np.searchsorted(self._file.ends, self._offset, side="right"))
        return Cursor(*self._window, row, self._offset - int(self._begins[row]), self._blocks)

    def _skip_ended(self) -> None:
        """Move to the next window that has tokens, if the present one has no more."""
        empty = 0
        while self._offset == len(self._file):
            empty += len(self._file) == 0
            if empty > len(self._source.windows(self._window[0])):
                raise DataError(
                    f"data.source={self._source.listing.name} has no row to train on: all are "
                    "empty, or held out. Use more text, or a smaller data.val_fraction."
                )
            self._open(self._source.after(self._window))

    def read_ahead(self) -> None:
        """Prepare the windows after the present one in the background, from now on.

        Reading waits for the network or the disk, and tokenizers encode without the interpreter's
        lock, so it does not slow down the steps. Whoever needs a window that fails tries again, and
        reports what is wrong with it.
        """
        self._reads_ahead = True
        in_background(self._prepare_ahead)

    def _prepare_ahead(self) -> None:
        window = self._window
        for _ in range(WINDOWS_AHEAD):
            window = self._source.after(window)
            with self._ahead:  # not twice, also on a disk without locks
                self._source.open(window)
