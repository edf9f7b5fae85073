"""One attempt at a time in a run's directory, which holds the exit code of the last one."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from filelock import FileLock, Timeout

from config.schema import ConfigError
from data.locks import acquired, file_lock
from snapshot.resume import has_steps, snapshots_in
from training.distributed.environment import is_local_main_process
from training.reporting.output import say_error

EXIT_CODE, LOCK = "exit_code", ".lock"
"""The first is a file with the last attempt's exit code: `accelerate launch` turns each into 1."""
SOON_SECONDS = 3.0
CLAIM_SECONDS = 30.0
"""How long to wait for a process that is just ending, with a snapshot to write first."""


class _Attempt:
    """This process's part in the run's directory. There is one, until the process ends."""

    folder: Path | None = None
    """Where an exit code is left before there is a lock; None where another process leaves it."""
    lock: FileLock | None = None
    """Held until the process ends, where there are locks."""
    code_before: int | None = None
    code: int | None = None


_attempt = _Attempt()


def expect(run_dir: Path | None) -> None:
    """Say in which directory this process will leave an exit code, if it is there: None for none.

    That is the first process of each machine, because machines may have disks of their own.
    """
    _attempt.folder = run_dir if is_local_main_process() else None


def claim(run_dir: Path) -> None:
    """Make the run's directory and keep others out of it until this process ends.

    A launcher that is killed can leave workers behind, which would go on writing beside the next
    start's. Where the file system has no locks that is only said, and the run goes on.

    Raises ConfigError when another process has the directory, or nothing can be written.
    """
    # Where a link leads to, also when nothing is there any more.
    folder = Path(os.path.realpath(run_dir))
    lock = file_lock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not has_steps(folder):  # else that they are gone must be seen
            snapshots_in(folder).mkdir(exist_ok=True)
        if snapshots_in(folder).is_dir():  # what may not be written is said before any work
            TemporaryFile(dir=snapshots_in(folder)).close()
        if not _acquire(lock, run_dir):
            say_error(
                f"warning: run.dir={run_dir} is on a file system without locks: nothing keeps a "
                "second start out of it while this one trains."
            )
        _hold(lock)
    except Timeout as error:
        raise ConfigError(
            f"run.dir={run_dir} is in use: another process trains in it. Wait for it or stop it, "
            "or give this run another run.name."
        ) from error
    except OSError as error:
        raise not_writable(run_dir, error) from error


def _acquire(lock: FileLock, run_dir: Path) -> bool:
    try:
        return acquired(lock, SOON_SECONDS)
    except Timeout:
        say_error(f"waiting for another process to end: it has {run_dir}")
        return acquired(lock, CLAIM_SECONDS - SOON_SECONDS)


def claim_elsewhere(run_dir: Path) -> None:
    """As `claim`, for the first process of a machine that is not the main process's.

    On a disk that both share, the main process has the lock and leaves the exit code for both.
    """
    lock = file_lock(run_dir / LOCK)
    with suppress(OSError, Timeout):
        run_dir.mkdir(parents=True, exist_ok=True)
        if acquired(lock, 0):
            _hold(lock)


def _hold(lock: FileLock) -> None:
    _attempt.lock = lock
    path = _beside(lock)
    with suppress(OSError, ValueError):
        _attempt.code_before = int(path.read_text())
    path.unlink(missing_ok=True)


def code_before() -> int | None:
    """The exit code of the attempt before this one; None where it left none, as after a kill -9."""
    return _attempt.code_before


def note_exit(code: int) -> int:
    """Leave an exit code for whoever started this attempt; the first one that is noted counts.

    Returns that one. Nothing is written where another process trains in the directory, or where
    there is none yet.
    """
    if _attempt.code is None:
        _attempt.code = code
    with suppress(OSError, Timeout):  # a full disk: the code itself still tells
        if _attempt.lock is not None:
            _beside(_attempt.lock).write_text(f"{_attempt.code}\n")
        elif _attempt.folder is not None and _attempt.folder.is_dir():
            lock = file_lock(_attempt.folder / LOCK)
            acquired(lock, 0)
            _beside(lock).write_text(f"{_attempt.code}\n")
            lock.release()
    return _attempt.code


def _beside(lock: FileLock) -> Path:
    return Path(lock.lock_file).with_name(EXIT_CODE)


def not_writable(run_dir: Path, error: OSError) -> ConfigError:
    """What to say when the disk does not take what a run writes at its start."""
    where = f" ({error.filename})" if error.filename else ""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "Make room." if full else "Name a folder in which you may write."
    return ConfigError(f"run.dir={run_dir} cannot be written: {error.strerror}{where}. {remedy}")
