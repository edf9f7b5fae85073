"""Errors of texts: user mistakes, and failures that a restart can resolve."""

from __future__ import annotations

from pathlib import Path


class DataError(ValueError):
    """A text that cannot be used. The message names the key, the value and the remedy."""


class BrokenText(DataError):
    """A text whose content cannot be read."""


class BadRow(ValueError):
    """A row that is no document. The message is the reason; the reader adds file and row."""

    def __init__(self, reason: str, remedy: str = "Repair the file, or remove the row") -> None:
        super().__init__(reason)
        self.remedy = remedy


class TextUnreachable(DataError):
    """A network or server failure. A later start may succeed."""


class TextLost(DataError):
    """A prepared text, or the cache of a stream, was damaged while it was read.

    The next start makes it again.
    """


class Damaged(DataError):
    """A prepared text that is not whole."""


def cache_error(cache_dir: Path, error: OSError) -> DataError:
    """The error for a `data.cache_dir` that cannot be read or written."""
    where = f" ({error.filename})" if error.filename else ""
    return DataError(
        f"data.cache_dir={cache_dir} cannot be used: {error.strerror or error}{where}. Free some "
        "space there (one to four bytes a character), or name a folder that you may write."
    )
