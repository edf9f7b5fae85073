"""Prepares the windows that a run will need, in threads of its own.

Reading waits for the network or the disk, and tokenizers encode without the interpreter's lock, so
threads do not slow down the steps as Python code would.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from queue import SimpleQueue

from data.streaming.walk import WindowId, following
from data.streaming.windows import StreamSource

PREFETCH = "prefetch"
"""The name of its threads."""
THREADS = 2
"""While one encodes a window, another one reads the next. Each has a window in memory."""
MOST_AHEAD = 64
"""Windows of each source: of a short text these are epochs, each with an order of its own."""


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
