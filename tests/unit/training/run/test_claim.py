"""A run's directory: who has it, on a disk without locks too, and the exit code in it."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from config.schema import ConfigError
from disks import as_anybody
from snapshot.disk.folder import snapshots_in
from training.run.run_dir import EXIT_CODE, RunLock


@pytest.fixture
def lock():
    """That of an attempt of the first process on the only machine."""
    return RunLock()


@pytest.fixture
def answers(monkeypatch):
    """Have the disk answer each request for a lock with an error."""

    def each(number: int) -> None:
        def flock(descriptor, operation):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", flock)

    return each


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_disk_without_locks_is_said_and_keeps_no_start_out(
    answers, tmp_path, capsys, number, lock
):
    answers(number)
    run_dir = tmp_path / "run"
    lock.acquire(run_dir)
    assert f"run.dir={run_dir} is on a file system without locks" in capsys.readouterr().err

    # As another machine finds it, where the first one's process was killed: it cannot see whether
    # that still runs. A mark of it would keep the run from ever going on there.
    lock.acquire(run_dir)

    lock.note_exit(75)  # by which a job's script knows that it is to be started again
    assert (run_dir / EXIT_CODE).read_text() == "75\n"


def test_a_read_only_snapshot_folder_is_refused_at_the_start(tmp_path, lock):
    snapshots_in(tmp_path).mkdir()
    snapshots_in(tmp_path).chmod(0o555)
    with as_anybody(), pytest.raises(ConfigError, match=r"cannot be written: Permission denied"):
        lock.acquire(tmp_path)


def test_a_disk_that_fails_at_locking_is_refused(answers, tmp_path, lock):
    answers(errno.EIO)
    with pytest.raises(ConfigError, match=r"run\.dir=.* cannot be written: Input/output error"):
        lock.acquire(tmp_path / "run")


def test_the_first_cause_of_an_end_is_the_one_that_is_left(tmp_path, lock):
    lock.acquire(tmp_path)
    assert [lock.note_exit(1), lock.note_exit(143)] == [1, 1]  # the launcher's SIGTERM follows
    assert (tmp_path / EXIT_CODE).read_text() == "1\n"


def test_an_ending_thread_waits_for_the_code_of_another(tmp_path, lock, monkeypatch):
    """The launcher that a mistake stops sends SIGTERM while the main thread leaves its code."""
    lock.acquire(tmp_path)
    opened, go_on = threading.Event(), threading.Event()
    found = []
    write_text = Path.write_text

    def write_slowly(path, text):
        path.open("w").close()
        opened.set()
        go_on.wait(10)
        return write_text(path, text)

    def signalled():
        opened.wait(10)
        threading.Timer(0.2, go_on.set).start()
        lock.note_exit(143)
        found.append((tmp_path / EXIT_CODE).read_text())

    monkeypatch.setattr(Path, "write_text", write_slowly)
    other = threading.Thread(target=signalled)
    other.start()
    lock.note_exit(2)
    opened.clear()
    lock.note_exit(2)  # once more, as the end does
    other.join(10)
    assert not opened.is_set()  # what is written is not opened again
    assert found == ["2\n"]


def refused(run_dir: Path) -> None:
    """A start that ends with a mistake before it has the lock."""
    lock = RunLock()
    lock.leave_code_in(run_dir)
    lock.note_exit(2)


def test_a_mistake_before_the_lock_leaves_its_code(tmp_path):
    run_dir = tmp_path / "run"
    refused(run_dir)
    assert not run_dir.exists()  # a mistake makes nothing

    run_dir.mkdir()
    (run_dir / EXIT_CODE).write_text("75\n")
    refused(run_dir)
    assert (run_dir / EXIT_CODE).read_text() == "2\n"


def test_a_second_start_leaves_no_code_beside_a_running_one(tmp_path, lock):
    lock.acquire(tmp_path)
    refused(tmp_path)
    assert not (tmp_path / EXIT_CODE).exists()


def test_each_machine_has_the_exit_code_on_its_own_disk(tmp_path, lock):
    shared, own = tmp_path / "shared", tmp_path / "own"
    lock.acquire(shared)
    other = RunLock()
    other.acquire_on_other_machine(shared)  # the main process has it
    other.note_exit(143)
    assert not (shared / EXIT_CODE).exists()

    other = RunLock()
    own.mkdir()
    (own / EXIT_CODE).write_text("1\n")  # of the attempt before
    other.acquire_on_other_machine(own)
    assert not (own / EXIT_CODE).exists()
    other.note_exit(143)
    assert (own / EXIT_CODE).read_text() == "143\n"


def test_a_process_that_is_not_its_machines_first_leaves_no_code(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    refused(tmp_path)
    assert not (tmp_path / EXIT_CODE).exists()


def test_a_link_that_leads_nowhere_yet_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "run"
    link.symlink_to(tmp_path / "disk" / "target")
    lock = RunLock()
    lock.acquire(link)
    assert link.is_symlink()
    assert list((tmp_path / "disk" / "target" / "snapshots").iterdir()) == []
