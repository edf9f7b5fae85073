"""A run's directory: who has it, on a disk without locks too, and the exit code in it."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest

from config.schema import ConfigError
from disks import as_anybody
from training.run import run_lock


@pytest.fixture(autouse=True)
def attempt(monkeypatch):
    """Has this process begin another attempt, as the first process of the only machine."""

    def begin() -> None:
        monkeypatch.setattr(run_lock, "_attempt", run_lock._Attempt())

    begin()
    return begin


@pytest.fixture
def answers(monkeypatch):
    """Have the disk answer each request for a lock with an error, without waiting for long."""
    monkeypatch.setattr(run_lock, "SOON_SECONDS", 0.1)
    monkeypatch.setattr(run_lock, "CLAIM_SECONDS", 0.2)

    def each(number: int) -> None:
        def flock(descriptor, operation):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", flock)

    return each


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_disk_without_locks_is_said_and_keeps_no_start_out(answers, tmp_path, capsys, number):
    answers(number)
    run_dir = tmp_path / "run"
    run_lock.claim(run_dir)
    assert f"run.dir={run_dir} is on a file system without locks" in capsys.readouterr().err

    # As another machine finds it, where the first one's process was killed: it cannot see whether
    # that still runs. A mark of it would keep the run from ever going on there.
    run_lock.claim(run_dir)

    run_lock.note_exit(75)  # by which a job's script knows that it is to be started again
    assert (run_dir / run_lock.EXIT_CODE).read_text() == "75\n"


def test_a_folder_of_snapshots_that_may_not_be_written_is_refused_before_any_work(tmp_path):
    run_lock.snapshots_in(tmp_path).mkdir()
    run_lock.snapshots_in(tmp_path).chmod(0o555)
    with as_anybody(), pytest.raises(ConfigError, match=r"cannot be written: Permission denied"):
        run_lock.claim(tmp_path)


def test_a_disk_that_fails_at_locking_is_refused(answers, tmp_path):
    answers(errno.EIO)
    with pytest.raises(ConfigError, match=r"run\.dir=.* cannot be written: Input/output error"):
        run_lock.claim(tmp_path / "run")


def test_the_first_cause_of_an_end_is_the_one_that_is_left(tmp_path):
    run_dir = tmp_path / "run"
    run_lock.claim(run_dir)
    assert run_lock.note_exit(1) == 1
    assert run_lock.note_exit(143) == 1  # the launcher's SIGTERM, because of the same crash
    assert (run_dir / run_lock.EXIT_CODE).read_text() == "1\n"


def test_a_mistake_before_the_lock_leaves_its_code_where_the_folder_is_there(tmp_path, attempt):
    run_dir = tmp_path / "run"
    run_lock.expect(run_dir)
    run_lock.note_exit(2)
    assert not run_dir.exists()  # a mistake makes nothing

    run_dir.mkdir()
    (run_dir / run_lock.EXIT_CODE).write_text("75\n")
    attempt()
    run_lock.expect(run_dir)
    run_lock.note_exit(2)
    assert (run_dir / run_lock.EXIT_CODE).read_text() == "2\n"


def test_a_second_start_leaves_no_code_in_the_folder_of_a_run_that_trains(tmp_path, attempt):
    run_dir = tmp_path / "run"
    run_lock.claim(run_dir)
    held = run_lock._attempt.lock
    attempt()
    run_lock.expect(run_dir)
    run_lock.note_exit(2)
    assert not (run_dir / run_lock.EXIT_CODE).exists()
    held.release()


def test_each_machine_has_the_exit_code_on_its_own_disk_and_one_on_a_shared_disk(tmp_path, attempt):
    shared, own = tmp_path / "shared", tmp_path / "own"
    run_lock.claim(shared)
    held = run_lock._attempt.lock
    attempt()
    run_lock.claim_elsewhere(shared)  # the main process has it
    run_lock.note_exit(143)
    assert not (shared / run_lock.EXIT_CODE).exists()
    held.release()

    attempt()
    own.mkdir()
    (own / run_lock.EXIT_CODE).write_text("1\n")  # of the attempt before
    run_lock.claim_elsewhere(own)
    assert not (own / run_lock.EXIT_CODE).exists()
    run_lock.note_exit(143)
    assert (own / run_lock.EXIT_CODE).read_text() == "143\n"


def test_a_process_that_is_not_its_machines_first_leaves_no_code(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    run_lock.expect(tmp_path)
    run_lock.note_exit(2)
    assert not (tmp_path / run_lock.EXIT_CODE).exists()
