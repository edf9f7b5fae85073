"""File locks between processes and machines that share a folder, if its file system has locks."""

from __future__ import annotations

import errno
from pathlib import Path

from filelock import FileLock, Timeout

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of file systems without locks, such as Lustre and NFS on some clusters."""

BRIEF_SECONDS, BRIEF_POLL_SECONDS = 0.1, 0.001
"""filelock polls every 50 ms, far longer than most locks are held. Until so many seconds have
passed it polls more often; a longer wait must not load a shared disk."""


def file_lock(path: Path) -> FileLock:
    """A lock that the system releases when its process ends, in any way."""
    # Without filelock's marker files: the marker of a killed process would lock out other machines.
    return FileLock(path, fallback_to_soft=False)


def acquire(lock: FileLock, seconds: float = -1) -> bool:
    """Acquire a lock; wait at most `seconds`, or without limit if negative.

    Returns False if the file system has no locks. Raises filelock.Timeout if another process still
    has the lock, and OSError if its file cannot be written.
    """
    brief = min(seconds, BRIEF_SECONDS) if seconds >= 0 else BRIEF_SECONDS
    try:
        try:
            lock.acquire(timeout=brief, poll_interval=BRIEF_POLL_SECONDS)
        except Timeout:
            if seconds == brief:
                raise
            lock.acquire(timeout=max(-1, seconds - brief))
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True
