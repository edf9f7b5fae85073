"""The end of a file that grows with its run, so that reading it costs the same at any length."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

MOST_BYTES = 4 << 20
"""Thousands of events, or of samples."""


def newest_lines(path: Path) -> bytes:
    """The last lines of a file, as many as `MOST_BYTES` hold; none where it cannot be read."""
    with suppress(OSError), open(path, "rb") as opened:
        begin = max(0, opened.seek(0, 2) - MOST_BYTES)
        opened.seek(max(0, begin - 1))
        if begin:
            opened.readline(MOST_BYTES)  # the line that begins before
        return opened.read(MOST_BYTES)
    return b""
