"""Files that processes and machines share: locks, and entries of a cache.

An entry is written under a temporary name and renamed, so that it is whole or absent.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import platform
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of file systems without locks, such as Lustre and NFS on some clusters."""
ABANDONED_SECONDS = 24 * 60 * 60
"""Files that another machine has not changed for this long are considered abandoned."""
DIGEST_BYTES = 32


def file_lock(path: Path) -> FileLock:
    """A lock that the system releases when its process ends, however it ends."""
    # No marker files: the marker of a killed process would lock out other machines.
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


def make_once(target: Path, make: Callable[[Path], None], is_ready: Callable[[], bool]) -> None:
    """Call `make` to fill a folder, and rename it to `target`, unless another process is first.

    `is_ready` returns whether `target` exists and is whole; if it is not whole, it is replaced. If
    the file system has no locks, every process makes the folder, and all use the first one.

    Raises OSError if the folder cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = file_lock(target.with_name(f".{target.name}.lock"))
    has_lock = acquire(lock)
    try:
        if is_ready():
            return
        remove_abandoned(target, has_lock)
        temporary = temporary_name(target)
        temporary.mkdir()
        try:
            make(temporary)
            _move_to_target(temporary, target, is_ready)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    finally:
        lock.release()


def _move_to_target(temporary: Path, target: Path, is_ready: Callable[[], bool]) -> None:
    if os.path.lexists(target) and not is_ready():  # it is damaged, or a link to nothing
        _remove(target.rename(temporary_name(target)))
    try:
        temporary.rename(target)
    except OSError:
        if not is_ready():  # or another process was first
            raise


def temporary_name(target: Path) -> Path:
    """A name in the folder of `target` that no other process uses."""
    return target.with_name(f".{target.name}.{platform.node()}.{uuid.uuid4().hex}.tmp")


def remove_abandoned(target: Path, has_lock: bool) -> None:
    """Remove what killed processes left under temporary names of `target`.

    With the lock, files of this machine are removed at once. Files of other machines are removed
    after `ABANDONED_SECONDS`, because the lock may be local to this machine.
    """
    mine = f".{target.name}.{platform.node()}."
    for path in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        with suppress(OSError):  # another process may have removed or finished it
            old = time.time() - path.stat().st_mtime > ABANDONED_SECONDS
            if old or (has_lock and path.name.startswith(mine)):
                _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def digest_of(*parts: str) -> str:
    """A file name for what these parts identify."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def write_cached(path: Path, content: bytes) -> None:
    """Write a file with its hash. Errors do not matter: a later start requests it again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(path)
        temporary.write_bytes(hashlib.sha256(content).digest() + content)
        temporary.rename(path)


def read_cached(path: Path) -> bytes | None:
    """Read what `write_cached` wrote; None if it is missing or damaged."""
    with suppress(OSError):
        whole = path.read_bytes()
        digest, content = whole[:DIGEST_BYTES], whole[DIGEST_BYTES:]
        if hashlib.sha256(content).digest() == digest:
            return content
    return None
