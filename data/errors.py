"""Errors of texts: user mistakes, and failures that a restart can resolve."""

from __future__ import annotations

import errno
from pathlib import Path


class DataError(ValueError):
    """A text that cannot be used. The message names the key, the value and the remedy."""


class UnknownCharacter(DataError):
    """A character that a vocabulary of characters lacks."""


class BrokenText(DataError):
    """A text whose content cannot be read; if it was downloaded, the download is useless."""


class BadRow(ValueError):
    """A row that is no document. The message is the reason; the reader adds file and row."""

    def __init__(self, reason: str, remedy: str = "Repair the file, or remove the row") -> None:
        super().__init__(reason)
        self.remedy = remedy


class TextUnreachable(DataError):
    """A network or server failure. A later start may succeed."""


class Stopped(DataError):
    """A wait ended because what reads was closed."""


class TextLost(DataError):
    """A prepared text, or the cache of a stream, was damaged while it was read.

    The next start makes it again.
    """


def cache_error(cache_dir: Path, error: OSError) -> DataError:
    """The error for a `data.cache_dir` that cannot be read or written."""
    where = f" ({error.filename})" if error.filename else ""
    reason = f"{error.strerror or error}{where}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "Free some space (one to four bytes a character) or name another folder."
    else:
        remedy = "Name another folder, which you may read and write."
    return DataError(f"data.cache_dir={cache_dir} cannot be used: {reason}. {remedy}")
