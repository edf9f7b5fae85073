"""Build an entry of a cache once, although several processes and machines need it.

It is written under a temporary name and renamed, so that it is whole or absent.
"""

from __future__ import annotations

import errno
import glob
import platform
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from data.locks import acquire, file_lock

ABANDONED_SECONDS = 24 * 60 * 60
"""Files that another machine has not changed for this long are considered abandoned."""


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
    try:
        temporary.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        if is_ready():  # another process was first
            return
        damaged = temporary_name(target)
        target.rename(damaged)
        temporary.rename(target)
        _remove(damaged)


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
