"""The order in which a run reads its streams: each source is one long sequence of blocks.

The stream of a source is all windows of all epochs, one after another, cut into blocks. Where a
block begins depends on how many tokens the windows before it have, which nobody knows without
reading them: so a snapshot has a cursor for each source, and a start reads one window of each.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from data.errors import DataError
from data.streaming.windows import StreamSource
from data.token_file import TokenFile

Span = tuple[TokenFile, int, int]
"""Tokens of a window: its file, the first token, their number."""
Block = tuple[Span, ...]
"""An item of the loader: the spans with the tokens of a block and the one after it."""
WindowId = tuple[int, int]
"""Epoch, and window in the epoch."""

PREFETCH = "prefetch"
"""The name of the thread that prepares windows."""


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


def following(window: WindowId, windows: int) -> WindowId:
    """The next window, in an epoch of this many."""
    epoch, number = window
    return (epoch, number + 1) if number + 1 < windows else (epoch + 1, 0)


class ReadAhead:
    """A thread that prepares the windows of all sources before they are needed.

    Reading waits for the network or the disk, and tokenizers encode without the interpreter's lock,
    so it does not slow down the steps. One process of each machine has it: encoding uses all cores.
    """

    def __init__(self, windows: int) -> None:
        """Prepare so many windows after the present one of each source; none with 0."""
        self._windows = windows
        self._queue: SimpleQueue[tuple[StreamSource, WindowId]] = SimpleQueue()
        self._asked: dict[int, WindowId] = {}
        self._thread: threading.Thread | None = None

    def ask(self, source: StreamSource, window: WindowId) -> None:
        """Prepare a window."""
        if not self._windows:
            return
        if self._thread is None:
            # A daemon: the end of a run waits for no window.
            self._thread = threading.Thread(target=self._prepare, name=PREFETCH, daemon=True)
            self._thread.start()
        self._queue.put((source, window))

    def reached(self, source: StreamSource, window: WindowId) -> None:
        """Prepare the windows after one that the run has reached; it reaches one after another."""
        asked = self._asked.get(source.number)
        for _ in range(self._windows if asked is None else 1):
            asked = following(asked or window, len(source.windows((asked or window)[0])))
            self._asked[source.number] = asked
            self.ask(source, asked)

    def _prepare(self) -> None:
        while True:
            source, window = self._queue.get()
            # Whoever needs the window tries again, and reports what is wrong with it.
            with suppress(Exception):
                source.open(*window)


class Walk:
    """One source, block after block."""

    def __init__(self, source: StreamSource, start: Cursor, ahead: ReadAhead) -> None:
        self._source, self._ahead = source, ahead
        self._place: WindowId = start.epoch, start.window
        self._blocks = start.blocks
        self._start: Cursor | None = start
        self._offset = 0

    def take(self, count: int, block_size: int) -> list[Block]:
        """The next blocks. Raises DataError if the source has no tokens, and as reading does."""
        if self._start is not None and count:
            self._resume(self._start)
            self._start = None
        self._blocks += count
        return [self._block(block_size) for _ in range(count)]

    def _block(self, left: int) -> Block:
        """The next block, of so many tokens, and the one after it: perhaps in later windows."""
        spans: list[Span] = []
        while left:
            file, first = self._file, self._offset
            count = min(left, len(file) - first)
            self._offset += count
            left -= count
            self._skip_ended()
            has_next = left == 0 and file is self._file
            spans.append((file, first, count + has_next))
        return tuple(spans) if has_next else (*spans, (self._file, self._offset, 1))

    @property
    def cursor(self) -> Cursor:
        """Where the next block begins."""
        if self._start is not None:
            return self._start
        ends = self._file.ends
        row = int(np.searchsorted(ends, self._offset, side="right"))
        token = self._offset - (int(ends[row - 1]) if row else 0)
        return Cursor(*self._place, row, token, self._blocks)

    def _resume(self, start: Cursor) -> None:
        if not self._move_to(start):
            raise DataError(
                f"data.source={self._source.listing.name} has no row {start.row} with a token "
                f"{start.token} in window {start.window} of epoch {start.epoch}, where the "
                "snapshot ends: the data or the tokenizer has changed. Restore it, or give the "
                "new run another run.name."
            )
        self._skip_ended()

    def _move_to(self, start: Cursor) -> bool:
        """Open the window of a cursor; returns whether it has the cursor's token."""
        if start.window >= len(self._source.windows(start.epoch)):
            return False
        self._open()
        if start.row + start.token == 0:  # an empty first window has no row 0
            return True
        begins = np.concatenate(([0], self._file.ends))
        self._offset = int(begins[: start.row + 1][-1]) + start.token
        return start.row + 1 < len(begins) and self._offset < begins[start.row + 1]

    def _skip_ended(self) -> None:
        """Move to the next window that has tokens, if the present one has no more."""
        empty = 0
        while self._offset == len(self._file):
            empty += len(self._file) == 0
            windows = len(self._source.windows(self._place[0]))
            if empty > windows:
                raise DataError(
                    f"data.source={self._source.listing.name} has no row to train on: all are "
                    "empty, or held out. Use more text, or a smaller data.val_fraction."
                )
            self._place, self._offset = following(self._place, windows), 0
            self._open()

    def _open(self) -> None:
        self._file = self._source.open(*self._place)
        self._ahead.reached(self._source, self._place)  # what comes next must not delay this one
