"""A run's directory: only its own files are overwritten, by one attempt at a time.

It holds the exit code of the last attempt.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock

from accelerate import Accelerator
from filelock import FileLock, Timeout

from common.command import say_error
from common.shared_files import acquire, file_lock
from config.schema import Config, ConfigError
from config.stored import CONFIG_FILE, read_config
from snapshot.disk.folder import MANIFEST, TEMPORARY_PREFIX, snapshot_folders, snapshots_in
from snapshot.errors import SnapshotError, is_full
from snapshot.start import has_steps
from store.latest import METRICS
from training.distributed.launcher import is_local_main_process, is_one_machine
from training.distributed.processes import is_on_any, run_on_all
from training.exits import exit_code_in
from training.reporting.curves import CURVES
from training.reporting.trackers import FOLDER as TRACKERS

EXIT_CODE, LOCK = "exit_code", ".lock"
"""The first is a file with the last attempt's exit code: `accelerate launch` turns each into 1."""
WRITTEN = (CONFIG_FILE, METRICS, CURVES, TRACKERS, LOCK, EXIT_CODE)
WAIT_SECONDS = 30
"""How long to wait for a process that is just ending, with a snapshot to write first."""


def refuse_foreign(run_dir: Path) -> None:
    """Raise ConfigError if a run would overwrite or remove files there that no run wrote.

    A folder is a run's once it holds a run's configuration or a snapshot. Any other may hold what
    it likes under names that no run uses.
    """
    if holds_run(run_dir):
        return
    for path in (*(run_dir / name for name in WRITTEN), snapshots_in(run_dir)):
        if _is_foreign(path):
            raise ConfigError(
                f"run.dir={run_dir} holds {path.name}, which no run of this project wrote, and the "
                "run would overwrite it. Give the run a folder of its own, or move it away."
            )


def holds_run(run_dir: Path) -> bool:
    """Whether a run has written its configuration or a snapshot to a folder."""
    snapshots = snapshot_folders(snapshots_in(run_dir))
    has_snapshot = any((folder / MANIFEST).is_file() for folder in snapshots)
    return has_snapshot or read_config(run_dir / CONFIG_FILE) is not None


def _is_foreign(path: Path) -> bool:
    """Whether a path holds anything but an exit code, or downloads of a start that was killed."""
    with suppress(OSError):  # reported when a file is created there
        if path.is_dir():
            return any(not file.name.startswith(TEMPORARY_PREFIX) for file in path.iterdir())
        if path.name == EXIT_CODE and exit_code_in(path) is not None:
            return False
        return path.stat().st_size > 0
    return path.is_symlink()


class RunLock:
    """Keeps other attempts out of a run's directory and leaves this attempt's exit code there.

    The lock is held until the process ends. The first process of each machine leaves an exit code,
    because machines may have disks of their own.
    """

    def __init__(self) -> None:
        self.own_disks = False
        """Whether other machines of the run have disks of their own."""
        self.is_held = False
        """Whether this process writes the run's directory: one on each machine's own disk."""
        self._run_dir: Path | None = None
        """Where to leave an exit code; None: another process leaves it."""
        self._lock: FileLock | None = None
        self._code: int | None = None
        # The thread that handles signals ends the process: never while the main thread writes.
        self._writing = Lock()

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
            _make(folder)
            if snapshots_in(folder).is_dir():  # report before any work that it is not writable
                TemporaryFile(prefix=TEMPORARY_PREFIX, dir=snapshots_in(folder)).close()
            try:
                has_locks = acquire(lock, 0)
            except Timeout:
                say_error(f"{run_dir} is in use by another process: waiting up to {WAIT_SECONDS} s")
                has_locks = acquire(lock, WAIT_SECONDS)
            if not has_locks:
                say_error(
                    f"warning: run.dir={run_dir} is on a file system without locks: nothing keeps "
                    "a second attempt out of it while this one trains."
                )
            self._hold(lock, folder)
        except Timeout as error:
            raise ConfigError(
                f"run.dir={run_dir} is in use: another process trains in it. Wait for it or stop "
                "it, or give this run another run.name."
            ) from error
        except OSError as error:
            raise not_writable(run_dir, error) from error

    def acquire_on_other_machine(self, run_dir: Path) -> bool:
        """Acquire for a machine without the main process; whether it has a disk of its own.

        Its first process calls this. On a disk that both share, the main process holds the lock and
        leaves the exit code of both.
        """
        lock = file_lock(run_dir / LOCK)
        with suppress(OSError, Timeout):
            _make(run_dir)
            if acquire(lock, 0):
                self._hold(lock, run_dir)
        return self.is_held

    def note_exit(self, code: int) -> int:
        """Leave an exit code for whoever started this attempt, and return it.

        The first code that is noted counts, and is returned for each later one. Nothing is written
        where another process trains in the directory, where there is no directory yet, or in one
        that a run refuses.
        """
        with self._writing:
            if self._code is None:
                self._code = code
                # On a full disk the process still has its code.
                with suppress(OSError, Timeout, ConfigError, SnapshotError):
                    self._write()
            return self._code

    def _write(self) -> None:
        if self._run_dir is None or not self._run_dir.is_dir():
            return
        lock = self._lock or file_lock(self._run_dir / LOCK)
        if self._lock is None:
            refuse_foreign(self._run_dir)
            acquire(lock, 0)  # raises Timeout where another process trains
        if not _is_foreign(path := self._run_dir / EXIT_CODE):
            path.write_text(f"{self._code}\n")
        if self._lock is None:
            lock.release()

    def _hold(self, lock: FileLock, run_dir: Path) -> None:
        self._lock, self._run_dir, self.is_held = lock, run_dir, True
        if not _is_foreign(path := run_dir / EXIT_CODE):
            path.unlink(missing_ok=True)


def lock_run_dir(accelerator: Accelerator, config: Config, lock: RunLock) -> None:
    """Keep other attempts out of the run's directory. Every process must call this.

    Raises ConfigError as `RunLock.acquire` and `refuse_foreign` do.
    """
    run_dir = Path(config.run.dir)

    def acquire() -> None:
        if accelerator.is_local_main_process:
            refuse_foreign(run_dir)
        if accelerator.is_main_process:
            lock.acquire(run_dir)
        else:
            lock.leave_code_in(None)  # the main process's refusal is not this machine's exit code

    run_on_all(accelerator, acquire)
    if not is_one_machine():
        first = accelerator.is_local_main_process and not accelerator.is_main_process
        on_own_disk = first and lock.acquire_on_other_machine(run_dir)
        lock.own_disks = is_on_any(accelerator, on_own_disk)


def _make(run_dir: Path) -> None:
    """Create the directory; and that of its snapshots, unless the run must notice its loss."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if not has_steps(run_dir):
        snapshots_in(run_dir).mkdir(exist_ok=True)


def not_writable(run_dir: Path, error: OSError) -> ConfigError:
    """The error for a disk that refuses what a run writes at its start."""
    where = f" ({error.filename})" if error.filename else ""
    own = "Set run.dir to a folder that you may write to."
    remedy = "Free some space." if is_full(error) else own
    return ConfigError(f"run.dir={run_dir} cannot be written: {error.strerror}{where}. {remedy}")
