"""File locks between processes and machines that share a folder, if its file system has locks."""

from __future__ import annotations

import errno
from pathlib import Path

from filelock import FileLock

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of file systems without locks, such as Lustre and NFS on some clusters."""


def file_lock(path: Path) -> FileLock:
    """A lock that the system releases when its process ends, in any way."""
    # Without filelock's marker files: the marker of a killed process would lock out other machines.
    return FileLock(path, fallback_to_soft=False)


def acquire(lock: FileLock, seconds: float = -1) -> bool:
    """Acquire a lock; wait at most `seconds`, or without limit if negative.

    Returns False if the file system has no locks. Raises filelock.Timeout if another process still
    has the lock, and OSError if its file cannot be written.
    """
    try:
        lock.acquire(timeout=seconds)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True
