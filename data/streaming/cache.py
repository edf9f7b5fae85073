"""The windows of a stream as files of tokens, which the processes of a machine share.

Whichever process needs one first makes it, and the others wait for it. A file that is open stays
readable after it was removed, so nothing is locked while it is in use.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from common.shared_files import make_once
from data.token_file import TokenFile

TOKENS = "tokens.bin"


class TokenCache:
    """Folders of a file each, of at most so many bytes; the least recently used go first."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder, self.most_bytes = folder, most_bytes

    def open(self, name: str, write: Callable[[Path], None]) -> TokenFile:
        """Open a file, which `write` makes first if it is absent or damaged.

        Raises OSError if it cannot be written, and what `write` raises.
        """
        entry = self.folder / name
        if (file := _opened(entry)) is None:
            make_once(
                entry,
                lambda building: write(building / TOKENS),
                lambda: _opened(entry) is not None,
            )
            file = TokenFile(entry / TOKENS)  # before anybody can remove it
            self._make_room()
        return file

    def _make_room(self) -> None:
        total = 0
        for used, size, entry in sorted(map(_use_of, self.folder.glob("[!.]*")), reverse=True):
            total += size
            if used and total > self.most_bytes:
                shutil.rmtree(entry, ignore_errors=True)
                entry.with_name(f".{entry.name}.lock").unlink(missing_ok=True)


def _opened(entry: Path) -> TokenFile | None:
    """An existing file, which now is the most recently used; None if it is absent or damaged."""
    with suppress(FileNotFoundError, NotADirectoryError, ValueError):
        file = TokenFile(entry / TOKENS)
        os.utime(entry)
        return file
    return None


def _use_of(entry: Path) -> tuple[float, int, Path]:
    """When an entry was used last, and its size; nothing if another process removes it."""
    with suppress(OSError):
        return entry.stat().st_mtime, (entry / TOKENS).stat().st_size, entry
    return 0.0, 0, entry
