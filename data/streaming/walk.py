"""The order in which a run reads its streams: each source is one long sequence of blocks.

The stream of a source is all windows of all epochs, one after another, cut into blocks. Where a
block begins depends on how many tokens the windows before it have, which nobody knows without
reading them: so a snapshot has a cursor for each source, and a start reads one window of each.

Threads prepare the windows that come next. Reading waits for the network or the disk, and
tokenizers encode without the interpreter's lock, so they do not slow down the steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from data.errors import DataError
from data.order import Mix
from data.streaming.cache import HeldFile
from data.streaming.windows import StreamSource

Span = tuple[str, int, int]
"""Tokens in the cache: file name, first token, count."""
Block = tuple[Span, ...]
"""An item of the loader: the spans with the tokens of a block and the one after it. Without any it
pads a batch: a row whose targets do not count."""
WindowId = tuple[int, int]
"""Epoch, and window in the epoch."""

PREFETCH = "prefetch"
"""The name of the threads that prepare windows."""
THREADS = 2
"""While one encodes a window, another one reads the next. Each has a window in memory."""
MOST_AHEAD = 64
"""Windows of each source: of a short text these are epochs, each with an order of its own."""


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

    def __init__(
        self,
        source: StreamSource,
        start: Cursor,
        reached: Callable[[StreamSource, WindowId], None],
    ) -> None:
        """`reached` is called with each window that has been opened."""
        self._source, self._reached = source, reached
        self._epoch, self._window, self._blocks = start.epoch, start.window, start.blocks
        self._start: Cursor | None = start
        self._offset = 0
        self._held: dict[WindowId, HeldFile] = {}

    def take(self, count: int, block_size: int) -> list[Block]:
        """The next blocks. Raises DataError if the source has no tokens, and as reading does."""
        if self._start is not None and count:
            self._resume(self._start)
            self._start = None
        blocks: list[Block] = []
        while left := count - len(blocks):
            # The block that ends with a file's last token is not among them: its target is in the
            # next file.
            whole = min(left, (len(self._file) - self._offset - 1) // block_size)
            if whole:
                begin, self._offset = self._offset, self._offset + whole * block_size
                begins = range(begin, self._offset, block_size)
                blocks += [((self._name, begin, block_size + 1),) for begin in begins]
            else:
                blocks.append(self._across_files(block_size))
        self._blocks += count
        return blocks

    def _across_files(self, block_size: int) -> Block:
        """A block whose last target, or more of it, is in a later window."""
        parts: list[Span] = []
        left = block_size
        while left:
            count = min(left, len(self._file) - self._offset)
            parts.append((self._name, self._offset, count))
            self._offset += count
            left -= count
            self._skip_ended()
        return (*parts, (self._name, self._offset, 1))

    @property
    def cursor(self) -> Cursor:
        """Where the next block begins."""
        if self._start is not None:
            return self._start
        row, token = self._file.row(self._offset)
        return Cursor(self._epoch, self._window, row, token, self._blocks)

    def release_before(self, cursor: Cursor) -> None:
        """Let the files of earlier windows be removed."""
        for window in [one for one in self._held if one < (cursor.epoch, cursor.window)]:
            self._held.pop(window).release()

    def _resume(self, start: Cursor) -> None:
        windows = len(self._source.windows(start.epoch))
        if start.window < windows:
            self._open()
            self._offset = self._file.place(start.row, start.token)
        if start.window >= windows or (self._offset < 0 and start.row + start.token > 0):
            raise DataError(
                f"data.source={self._source.listing.name} has no row {start.row} with a token "
                f"{start.token} in window {start.window} of epoch {start.epoch}, where the "
                "snapshot ends: the data or the tokenizer has changed. Restore it, or give the "
                "new run another run.name."
            )
        self._offset = max(0, self._offset)  # an empty first window has no row 0
        self._skip_ended()

    def _skip_ended(self) -> None:
        """Move to the next window that has tokens, if the present one has no more."""
        empty = 0
        while self._offset == len(self._file):
            empty += len(self._file) == 0
            windows = len(self._source.windows(self._epoch))
            if empty > windows:
                raise DataError(
                    f"data.source={self._source.listing.name} has no row to train on: all are "
                    "empty, or held out. Use more text, or a smaller data.val_fraction."
                )
            self._epoch, self._window = following((self._epoch, self._window), windows)
            self._offset = 0
            self._open()

    def _open(self) -> None:
        place = self._epoch, self._window
        if place not in self._held:
            self._held[place] = self._source.hold(*place)
        self._reached(self._source, place)  # after it: what comes next must not delay this one
        self._file, self._name = self._held[place], self._source.name(*place)


def following(window: WindowId, windows: int) -> WindowId:
    """The next window, in an epoch of this many."""
    epoch, number = window
    return (epoch, number + 1) if number + 1 < windows else (epoch + 1, 0)


class StreamOrder:
    """The blocks of a run in their order, and the cursors after each step.

    The loader asks for blocks some steps ahead, so the cursors of these steps are remembered.
    """

    nothing: Block = ()

    def __init__(
        self, walks: Sequence[Walk], mix: Mix, block_size: int, global_batch_size: int
    ) -> None:
        self._walks, self._mix = walks, mix
        self._block_size, self._global_batch_size = block_size, global_batch_size
        self._next = sum(walk.cursor.blocks for walk in walks)
        self._after: dict[int, list[Cursor]] = {}

    def items(self, first: int, count: int) -> list[Block]:
        """The items of a loader for the next blocks of the run, in whole steps.

        Raises DataError as reading does.
        """
        assert first == self._next, "blocks are taken one after another"
        blocks: list[Block] = []
        for sources in self._mix.sources(first, count).reshape(-1, self._global_batch_size):
            counts = np.bincount(sources, minlength=len(self._walks)).tolist()
            of_sources = [
                iter(walk.take(wanted, self._block_size))
                for walk, wanted in zip(self._walks, counts, strict=True)
            ]
            blocks += [next(of_sources[source]) for source in sources.tolist()]
            self._next += len(sources)
            step = self._next // self._global_batch_size
            self._after[step] = [walk.cursor for walk in self._walks]
        return blocks

    def epoch_of(self, sequence: int) -> int:
        """The lowest epoch of all sources after the step that ends with this sequence."""
        cursors = self._after[(sequence + 1) // self._global_batch_size]
        return min(cursor.epoch for cursor in cursors)

    def finish(self, step: int) -> list[Cursor]:
        """The cursors after a step that has been computed. Earlier windows are released."""
        cursors = self._after.pop(step)
        for walk, cursor in zip(self._walks, cursors, strict=True):
            walk.release_before(cursor)
        return cursors


class Prefetcher:
    """Reads ahead of every source. The processes of a machine take turns, window by window."""

    def __init__(self, ahead: int, turn: int, turns: int) -> None:
        """Prepare so many windows `ahead` of the present one, as process `turn` of `turns`."""
        self._ahead, self._turn, self._turns = ahead, turn, turns
        self._queue: SimpleQueue[tuple[StreamSource, WindowId]] = SimpleQueue()
        self._reached: dict[int, WindowId] = {}
        self._asked: dict[int, WindowId] = {}
        self._threads: list[threading.Thread] = []

    def begin(self, source: StreamSource, window: WindowId) -> None:
        """Ask for the window in which a run begins; those of several sources are read at once."""
        if not self._threads:
            self._start()
        self._queue.put((source, window))

    def reached(self, source: StreamSource, window: WindowId) -> None:
        """Ask for the windows after one that the run has reached; it reaches one after another."""
        self._reached[source.number] = window
        if not self._threads:
            self._start()
        asked = self._asked.get(source.number)
        for _ in range(self._ahead if asked is None else 1):
            asked = following(asked or window, len(source.windows((asked or window)[0])))
            self._asked[source.number] = asked
            if sum(asked) % self._turns == self._turn:
                self._queue.put((source, asked))

    def _start(self) -> None:
        # Daemons: the end of a run waits for no window.
        self._threads = [
            threading.Thread(target=self._prepare, name=PREFETCH, daemon=True)
            for _ in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def _prepare(self) -> None:
        while True:
            source, window = self._queue.get()
            if window > self._reached.get(source.number, (-1, 0)):
                # Whoever needs the window tries again, and reports what is wrong with it.
                with suppress(Exception):
                    source.prepare(*window)


def windows_ahead(prefetch_bytes: int, window_bytes: int, sources: int) -> int:
    """How many windows of each source are read ahead, at least one."""
    return min(MOST_AHEAD, max(1, prefetch_bytes // (window_bytes * sources)))
