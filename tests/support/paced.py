"""A run that goes no further than the test reads what it says."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import runs

PAGE_BYTES = 4096
"""The smallest pipe there is: room for some forty lines of progress."""


@contextmanager
def paced(words: list[str], **changes: str) -> Iterator[tuple[subprocess.Popen, Iterator[str]]]:
    """A command and the lines of its output. It waits where a page of them is not read."""
    with runs.started(words, **changes) as process:
        assert process.stdout is not None
        fcntl.fcntl(process.stdout.fileno(), fcntl.F_SETPIPE_SZ, PAGE_BYTES)
        # Without a buffer, which would read ahead.
        with open(os.dup(process.stdout.fileno()), "rb", buffering=0) as output:
            yield process, (line.decode() for line in output)


def read_until(lines: Iterator[str], part: str) -> list[str]:
    """The lines up to the first with that part. Fails where the run ends before."""
    read = []
    for line in lines:
        read.append(line)
        if part in line:
            return read
    raise AssertionError(f"no line has {part!r}:\n{''.join(read)}")
