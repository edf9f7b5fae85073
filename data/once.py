"""What several processes and machines that share a cache want at the same time, made once.

It is written under a name of its own and renamed, so that it is whole or absent.
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
"""After this time without a change, what another machine was writing is taken for abandoned."""


def make_once(target: Path, make: Callable[[Path], None], is_ready: Callable[[], bool]) -> None:
    """Have `make` write a folder, renamed to `target`, unless another process is first.

    `is_ready` tells whether `target` is there and whole; what is not whole is replaced. Where the
    file system has no locks, every process makes its own, and the first one's is used by all.

    Raises OSError where the folder cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = file_lock(target.with_name(f".{target.name}.lock"))
    alone = acquire(lock)
    try:
        if is_ready():
            return
        remove_abandoned(target, alone)
        own = temporary_name(target)
        own.mkdir()
        try:
            make(own)
            _put_in_place(own, target, is_ready)
        finally:
            shutil.rmtree(own, ignore_errors=True)
    finally:
        lock.release()


def _put_in_place(own: Path, target: Path, is_ready: Callable[[], bool]) -> None:
    try:
        own.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        if is_ready():  # another process was first
            return
        damaged = temporary_name(target)
        target.rename(damaged)
        own.rename(target)
        _remove(damaged)


def temporary_name(target: Path) -> Path:
    """A name beside `target` that no other process uses."""
    return target.with_name(f".{target.name}.{platform.node()}.{uuid.uuid4().hex}.tmp")


def remove_abandoned(target: Path, alone: bool) -> None:
    """Remove what killed processes left under the temporary names of `target`.

    What is this machine's goes at once if this process is known to be `alone` there; a lock may
    be the machine's only, so what is another machine's goes after `ABANDONED_SECONDS`.
    """
    mine = f".{target.name}.{platform.node()}."
    for path in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        with suppress(OSError):  # another process may have removed or finished it
            old = time.time() - path.stat().st_mtime > ABANDONED_SECONDS
            if old or (alone and path.name.startswith(mine)):
                _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
