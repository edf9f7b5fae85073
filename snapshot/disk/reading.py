"""Reading a snapshot folder: its file names, and each file once, for its hash and its numbers."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from snapshot.errors import SnapshotError

CHUNK_BYTES = 8 << 20
"""Small enough for any machine; large enough that hashing seldom waits for the interpreter lock."""
SYSTEM_FILES = re.compile(r"\.DS_Store|\._.+|Thumbs\.db|desktop\.ini|\.nfs[0-9a-f]+", re.IGNORECASE)
"""Files that file managers and NFS create in any folder; they are ignored."""


class Inspector(Protocol):
    """Checks a file's content while the file is read for its hash."""

    fault: str | None
    """What is wrong with the file; final after the last `update`."""

    def update(self, part: memoryview) -> None:
        """Check the next part; the memory is reused afterwards."""


InspectorFor = Callable[[Path], Inspector | None]
"""Returns the inspector of a file; None for a file that needs none."""


def no_inspector(_: Path) -> Inspector | None:
    """An `InspectorFor` that checks no content."""
    return None


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn OSError into SnapshotError: a file that cannot be read is a fault of the snapshot."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise SnapshotError(f"{where} cannot be read: {error.strerror or error}") from error


def visible(path: Path) -> Path:
    """`path` itself. Raises SnapshotError if permissions hide whether it exists."""
    with readable(path), suppress(FileNotFoundError, NotADirectoryError):
        path.stat()
    return path


def names_in(folder: Path) -> set[str]:
    """The file names in a snapshot folder, without `SYSTEM_FILES`.

    Raises SnapshotError if the folder cannot be read.
    """
    with readable(folder):
        names = {path.name for path in folder.iterdir()}
    return {name for name in names if SYSTEM_FILES.fullmatch(name) is None}


def sha256_of(path: Path, inspector: Inspector | None = None) -> str:
    """The hash of a file, whose content is passed to `inspector` as well. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as opened:
        file_size = os.fstat(opened.fileno()).st_size
        part = memoryview(bytearray(min(file_size, CHUNK_BYTES)))
        while size := opened.readinto(part):
            digest.update(part[:size])
            if inspector is not None:
                inspector.update(part[:size])
    return digest.hexdigest()


def check_file(path: Path, digest: str, inspector_for: InspectorFor, snapshot: str) -> None:
    """Raise SnapshotError if the hash of a file differs, or if its inspector finds a fault.

    `snapshot` names the snapshot in messages. Raises OSError too.
    """
    inspector = inspector_for(path)
    if sha256_of(path, inspector) != digest:
        raise SnapshotError(f"{snapshot} is damaged: the content of {path.name} has changed")
    if inspector is not None and inspector.fault is not None:
        raise SnapshotError(inspector.fault)
