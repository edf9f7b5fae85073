"""Standard output and error of a run, which must never end it."""

from __future__ import annotations

import io
import os
import select
import sys
from contextlib import suppress
from typing import Any

from tqdm import tqdm

from data.printable import printable, redact_urls


class LossyFile(io.FileIO):
    """A file descriptor that drops what it cannot write, and tries again with what comes next.

    A full disk, or a reader or a terminal that is gone, must not end a run.
    """

    def write(self, content: Any, /) -> int:
        try:
            while (written := super().write(content)) is None:  # set to non-blocking, and full
                select.select([], [self], [])
        except OSError:
            return len(content)
        return written


def make_output_lossy() -> None:
    """Put sys.stdout and sys.stderr on `LossyFile`s, whole lines at once, in any encoding."""
    nothing = os.open(os.devnull, os.O_RDWR)
    while nothing <= 2:  # closed by who started this process: a file would take its number, and
        nothing = os.open(os.devnull, os.O_RDWR)  # what libraries write to it would go there
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            descriptor, encoding = nothing, "utf-8"
        else:
            descriptor, encoding = stream.fileno(), stream.encoding
            with suppress(OSError):
                stream.flush()
        lossy = io.TextIOWrapper(
            io.BufferedWriter(LossyFile(descriptor, "w", closefd=False)),
            encoding=encoding,
            errors="backslashreplace",  # a character that the terminal lacks
            line_buffering=True,
        )
        lossy.replaced = stream  # type: ignore[attr-defined]  # or its end would close the file
        setattr(sys, name, lossy)


def shown(text: str) -> str:
    """Lines as they may be shown: control characters escaped, addresses without their secrets."""
    return printable(redact_urls(text), multiline=True)


def say_error(text: str) -> None:
    """Print on stderr, above the progress bar if there is one."""
    tqdm.write(shown(text), file=sys.stderr)
    sys.stderr.flush()


def write_now(text: str, seconds: float) -> None:
    """Write to stderr if it accepts that in time: its terminal or reader may be gone, or stopped.

    `print` would not do: the main thread may hold the stream while it waits for that reader.
    """
    with suppress(OSError, ValueError, AttributeError):
        number = sys.stderr.fileno()
        if select.select([], [number], [], seconds)[1]:
            os.write(number, text.encode())
