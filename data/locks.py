"""Locks between processes of all machines that share a folder, where its file system has locks."""

from __future__ import annotations

import errno
from pathlib import Path

from filelock import FileLock

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
"""What file systems without locks answer, such as some clusters' Lustre and NFS."""


def file_lock(path: Path) -> FileLock:
    """A lock that the system releases when the process that holds it ends, however it ends."""
    # Not filelock's marker file: what a killed process leaves of it keeps other machines out.
    return FileLock(path, fallback_to_soft=False)


def acquire(lock: FileLock, seconds: float = -1) -> bool:
    """Wait for the lock, without a limit if `seconds` is negative. False where there are no locks.

    Raises filelock.Timeout when another process still has it, and OSError where its file cannot be
    written.
    """
    try:
        lock.acquire(timeout=seconds)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True
