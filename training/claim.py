"""One attempt at a time in a run's directory, which says how the last one ended."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from data.locks import acquired, file_lock
from snapshot.resume import snapshots_in
from training.config import ConfigError
from training.output import say_error

EXIT_CODE = "exit_code"
"""A file with the last attempt's exit code, because `accelerate launch` turns each into 1."""
SOON_SECONDS = 3.0
CLAIM_SECONDS = 30.0
"""How long to wait for a process that is just ending, with a snapshot to write first."""
_claims: list[FileLock] = []  # held until the process ends, where there are locks


def claim(run_dir: Path) -> None:
    """Make the run's directory and keep others out of it until this process ends.

    A launcher that is killed can leave workers behind, which would go on writing beside the next
    start's. Where the file system has no locks that is only said, and the run goes on.

    Raises ConfigError when another process has the directory, or nothing can be written.
    """
    lock = file_lock(run_dir / ".lock")
    try:
        snapshots_in(run_dir).mkdir(parents=True, exist_ok=True)
        if not _acquire(lock, run_dir):
            say_error(
                f"warning: run.dir={run_dir} is on a file system without locks: nothing keeps a "
                "second start out of it while this one trains."
            )
        _claims.append(lock)
        (run_dir / EXIT_CODE).unlink(missing_ok=True)
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


def note_exit(code: int) -> None:
    """Write down how this attempt ended, where it had a run's directory to itself."""
    for lock in _claims:
        with suppress(OSError):  # a full disk: the code itself still tells
            Path(lock.lock_file).with_name(EXIT_CODE).write_text(f"{code}\n")


def not_writable(run_dir: Path, error: OSError) -> ConfigError:
    """What to say when the disk does not take what a run writes at its start."""
    where = f" ({error.filename})" if error.filename else ""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "Make room." if full else "Name a folder in which you may write."
    return ConfigError(f"run.dir={run_dir} cannot be written: {error.strerror}{where}. {remedy}")
