"""The errors of this room: those that are the user's to mend, and one that another start mends."""

from __future__ import annotations

import errno
from pathlib import Path


class DataError(ValueError):
    """A text that cannot be used. The message names the key, the value and the remedy."""


class BrokenText(DataError):
    """A text whose content cannot be read: where it was fetched, the download is of no use."""


class TextUnreachable(DataError):
    """A text behind a network or a server that does not answer. Another start may have it."""


class TextLost(DataError):
    """A prepared text that became shorter while it was read. The next start prepares it anew."""


def cache_error(cache_dir: Path, error: OSError) -> DataError:
    """What to say when `data.cache_dir` cannot be read or written."""
    where = f" ({error.filename})" if error.filename else ""
    reason = f"{error.strerror or error}{where}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "Free some room (one to four bytes a character) or name another folder."
    else:
        remedy = "Name another folder, in which you may read and write."
    return DataError(f"data.cache_dir={cache_dir} cannot be used: {reason}. {remedy}")
