"""How a snapshot's folder is read: its names, and each file once, for its hash and its numbers."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from snapshot.errors import SnapshotError

HASHED_AT_ONCE = 8 << 20
"""Bytes: few enough for any machine, and so many that a busy interpreter is seldom waited for."""
OF_THE_SYSTEM = re.compile(
    r"\.DS_Store|\._.+|Thumbs\.db|desktop\.ini|\.nfs[0-9a-f]+", re.IGNORECASE
)
"""Files that file managers and NFS put anywhere, and that nobody reads here."""


class Inspection(Protocol):
    """Looks at a file's content while it is read for its hash."""

    fault: str | None
    """What is wrong with it, once all of it has been seen."""

    def update(self, part: memoryview) -> None:
        """Look at the next part, which is gone afterwards."""


Inspect = Callable[[Path], Inspection | None]
"""What looks at a file; None where nothing does."""


def not_inspected(_: Path) -> Inspection | None:
    """Look at no file's content."""
    return None


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """What may not be read, or cannot be, is a fault of the snapshot: raises SnapshotError."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise SnapshotError(f"{where} cannot be read: {error.strerror or error}") from error


def visible(path: Path) -> Path:
    """The path itself. Raises SnapshotError where nobody may look whether anything is there."""
    with readable(path), suppress(FileNotFoundError, NotADirectoryError):
        path.stat()
    return path


def names_in(folder: Path) -> set[str]:
    """The names in a snapshot's folder, without what the system's own tools leave anywhere.

    Raises SnapshotError where it may not be read.
    """
    with readable(folder):
        names = {path.name for path in folder.iterdir()}
    return {name for name in names if OF_THE_SYSTEM.fullmatch(name) is None}


def sha256_of(path: Path, inspection: Inspection | None = None) -> str:
    """The hash of a file, which `inspection` sees at the same time. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as opened:
        whole = os.fstat(opened.fileno()).st_size
        part = memoryview(bytearray(min(whole, HASHED_AT_ONCE)))
        while size := opened.readinto(part):
            digest.update(part[:size])
            if inspection is not None:
                inspection.update(part[:size])
    return digest.hexdigest()


def check_file(path: Path, digest: str, inspect: Inspect, where: str) -> None:
    """Raise SnapshotError for a file of another hash, and for what `inspect` finds in a right one.

    `where` names the snapshot. Raises OSError too.
    """
    inspection = inspect(path)
    if sha256_of(path, inspection) != digest:
        raise SnapshotError(f"{where} is damaged: the content of {path.name} has changed")
    if inspection is not None and inspection.fault is not None:
        raise SnapshotError(inspection.fault)
