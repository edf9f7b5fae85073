"""A run's directory on a disk without locks."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest

from training import claim
from training.config import ConfigError


@pytest.fixture
def answers(monkeypatch):
    """Have the disk answer each request for a lock with an error, without waiting for long."""
    monkeypatch.setattr(claim, "_claims", [])
    monkeypatch.setattr(claim, "SOON_SECONDS", 0.1)
    monkeypatch.setattr(claim, "CLAIM_SECONDS", 0.2)

    def each(number: int) -> None:
        def flock(descriptor, operation):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", flock)

    return each


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_disk_without_locks_is_said_and_keeps_no_start_out(answers, tmp_path, capsys, number):
    answers(number)
    run_dir = tmp_path / "run"
    claim.claim(run_dir)
    assert f"run.dir={run_dir} is on a file system without locks" in capsys.readouterr().err

    # As another machine finds it, where the first one's process was killed: it cannot see whether
    # that still runs. A mark of it would keep the run from ever going on there.
    claim.claim(run_dir)

    claim.note_exit(75)  # by which a job's script knows that it is to be started again
    assert (run_dir / claim.EXIT_CODE).read_text() == "75\n"


def test_a_disk_that_fails_at_locking_is_refused(answers, tmp_path):
    answers(errno.EIO)
    with pytest.raises(ConfigError, match=r"run\.dir=.* cannot be written: Input/output error"):
        claim.claim(tmp_path / "run")
