"""One attempt at a time in a run's directory, which holds the exit code of the last one."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from os.path import samestat
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock

from filelock import FileLock, Timeout

from config.schema import ConfigError
from data.shared_files import acquire, file_lock
from snapshot.disk.files import TEMPORARY_PREFIX, snapshots_in
from snapshot.disk.pruning import remove_leftovers
from snapshot.start import has_steps
from training.distributed.environment import is_local_main_process
from training.reporting.console import say_error
from training.run.run_dir import EXIT_CODE, LOCK, exit_code_in, may_hold_code

NOTICE_SECONDS = 3.0
WAIT_SECONDS = 30.0
"""How long to wait for a process that is just ending, with a snapshot to write first."""


class RunLock:
    """Keeps other attempts out of a run's directory and leaves this attempt's exit code there.

    The lock is held until the process ends. The first process of each machine leaves an exit code,
    because machines may have disks of their own.
    """

    def __init__(self) -> None:
        self.code_before: int | None = None
        """Exit code of the attempt before this one; None where it left none, as after kill -9."""
        self._run_dir: Path | None = None
        """Where to leave an exit code before the lock is held; None: another process leaves it."""
        self._lock: FileLock | None = None
        self._file: os.stat_result | None = None
        """Identity of the lock's file, which moves with a rename of the directory."""
        self._made = False
        self._code: int | None = None
        self._noted = False
        # The thread that handles signals ends the process: never while the main thread writes.
        self._noting = Lock()

    def leave_code_in(self, run_dir: Path | None) -> None:
        """Choose the directory for this process's exit code, if it exists; None for none."""
        self._run_dir = run_dir if is_local_main_process() else None

    def acquire(self, run_dir: Path) -> None:
        """Make the run's directory and keep others out of it until this process ends.

        A launcher that is killed can leave workers behind, which would write into the directory of
        the next attempt. Where the file system has no locks, this warns and continues.

        Raises ConfigError when another process has the directory, or it is not writable.
        """
        # Where a link leads to, also when nothing is there any more.
        folder = Path(os.path.realpath(run_dir))
        lock = file_lock(folder / LOCK)
        try:
            self._made = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            if not has_steps(folder):  # otherwise the run must notice that its snapshots are gone
                snapshots_in(folder).mkdir(exist_ok=True)
            if snapshots_in(folder).is_dir():  # report before any work that it is not writable
                TemporaryFile(prefix=TEMPORARY_PREFIX, dir=snapshots_in(folder)).close()
            if not _acquired(lock, run_dir):
                say_error(
                    f"warning: run.dir={run_dir} is on a file system without locks: nothing keeps "
                    "a second attempt out of it while this one trains."
                )
            self._hold(lock)
        except Timeout as error:
            raise ConfigError(
                f"run.dir={run_dir} is in use: another process trains in it. Wait for it or stop "
                "it, or give this run another run.name."
            ) from error
        except OSError as error:
            raise not_writable(run_dir, error) from error

    def acquire_on_other_machine(self, run_dir: Path) -> None:
        """Acquire on behalf of a machine without the main process. Its first process calls this.

        On a disk that both share, the main process holds the lock and leaves the exit code of both.
        """
        lock = file_lock(run_dir / LOCK)
        with suppress(OSError, Timeout):
            self._made = not run_dir.exists()
            run_dir.mkdir(parents=True, exist_ok=True)
            if acquire(lock, 0):
                self._hold(lock)

    def remove_made(self) -> None:
        """Remove the directory if this attempt has made it and nothing is in it: it was refused."""
        if self._lock is None or not self._made:
            return
        folder = Path(self._lock.lock_file).parent
        files, snapshots = {folder / EXIT_CODE, folder / LOCK}, snapshots_in(folder)
        with suppress(OSError):
            if {*folder.iterdir()} <= {*files, snapshots}:
                remove_leftovers(snapshots)
                snapshots.rmdir()  # unless it holds a snapshot
                for path in files:
                    path.unlink(missing_ok=True)
                folder.rmdir()

    def release(self) -> None:
        """Let another attempt have the directory."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def note_exit(self, code: int) -> int:
        """Leave an exit code for whoever started this attempt, and return it.

        The first code that is noted counts, and is returned for each later one. Nothing is written
        where another process trains in the directory, or where there is no directory yet.
        """
        with self._noting:
            if self._code is None:
                self._code = code
            if not self._noted:
                with suppress(OSError, Timeout):  # on a full disk the process still has its code
                    self._write(f"{self._code}\n")
                    self._noted = True
        return self._code

    def _write(self, code: str) -> None:
        if self._lock is not None:
            _write_code(self._lock, code)
        elif self._run_dir is not None and self._run_dir.is_dir():
            lock = file_lock(self._run_dir / LOCK)
            acquire(lock, 0)
            _write_code(lock, code)
            lock.release()

    def is_in(self, run_dir: Path) -> bool:
        """Whether the lock that is held is the one in a directory, which may have been moved."""
        with suppress(OSError):
            return self._file is not None and samestat(self._file, (run_dir / LOCK).stat())
        return False

    def _hold(self, lock: FileLock) -> None:
        self._lock = lock
        with suppress(OSError):
            self._file = Path(lock.lock_file).stat()
        path = _code_file(lock)
        self.code_before = exit_code_in(path)
        if may_hold_code(path):
            path.unlink(missing_ok=True)


def _acquired(lock: FileLock, run_dir: Path) -> bool:
    """Whether the lock is held; False on a file system without locks."""
    try:
        return acquire(lock, NOTICE_SECONDS)
    except Timeout:
        say_error(f"waiting for another process to end, which uses {run_dir}")
        return acquire(lock, WAIT_SECONDS - NOTICE_SECONDS)


def _code_file(lock: FileLock) -> Path:
    return Path(lock.lock_file).with_name(EXIT_CODE)


def _write_code(lock: FileLock, code: str) -> None:
    """Leave an exit code, unless a file of that name has another use."""
    path = _code_file(lock)
    if may_hold_code(path):
        path.write_text(code)


def not_writable(run_dir: Path, error: OSError) -> ConfigError:
    """The error for a disk that refuses what a run writes at its start."""
    where = f" ({error.filename})" if error.filename else ""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "Free some space." if full else "Set run.dir to a folder that you may write to."
    return ConfigError(f"run.dir={run_dir} cannot be written: {error.strerror}{where}. {remedy}")
