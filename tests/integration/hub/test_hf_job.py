"""cloud/hf_job.py, with a stand-in for the Jobs that runs it on one empty disk after another."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tarfile
from pathlib import Path

import pytest

import hubs
import images
import runs
from cloud.hf_job import main
from training import exits

SCRIPT = runs.ROOT / "cloud" / "hf_job.py"
STEPS = 30
"""As many as `finished_run` has, which is the run without a disturbance."""


@pytest.fixture
def archive(tmp_path) -> Path:
    """What git archive writes, of the files as they are now."""
    path = tmp_path / "code.tar.gz"
    with tarfile.open(path, "w:gz") as opened:
        for name in images.sent():
            opened.add(runs.ROOT / name, arcname=name)
    return path


@pytest.fixture
def uv(tmp_path) -> str:
    """A PATH with a stand-in for uv, whose environment is the one of these tests."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin" / "uv").write_text(f"#!/bin/sh\nmkdir .venv && ln -s {tmp_path}/bin .venv\n")
    for program in python.parent.iterdir():
        program.chmod(0o755)
    return f"{python.parent}{os.pathsep}{os.environ['PATH']}"


def test_a_missing_archive_is_a_mistake_with_its_remedy(capsys):
    with pytest.raises(SystemExit) as raised:
        main("none.tar.gz", "train.py")
    assert raised.value.code == exits.EXIT_USER_MISTAKE
    assert "none.tar.gz: no such file. Make it: git archive" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_killed_job_resumes_on_an_empty_disk_bit_by_bit(
    small, finished_run, archive, uv, hub, tmp_path
):
    config = runs.rehearsal("cpu.yaml", tmp_path, 1)  # in the float32 of finished_run
    keys = hubs.words(Path("out/run"), *small, "model.dropout=0.1")
    words = [sys.executable, str(SCRIPT), str(archive), "--config_file", str(config), "train.py"]
    words += keys

    def disk(number: int) -> dict[str, str]:
        """Where the Job's number'th attempt has its files; all are removed with their machine."""
        (tmp_path / f"disk-{number}").mkdir()
        return {"TMPDIR": str(tmp_path / f"disk-{number}"), "PATH": uv, **hub.environment()}

    # The last snapshot does not come through before the machine is lost.
    hub.fault("commit", "hang", after=1, times=None)
    with runs.started(words, tmp_path / "1", forked=False, session=True, **disk(1)) as process:
        hub.wait_for(lambda: hubs.step_of(hub) >= 10)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
    hub.clear_faults()
    assert hubs.step_of(hub) < STEPS
    shutil.rmtree(tmp_path / "disk-1")
    second = runs.run(words, forked=False, **disk(2), code=exits.EXIT_DONE)
    assert f"fetched from {hubs.REPO}@" in second.stdout
    assert hubs.step_of(hub) == STEPS
    (run_dir,) = (tmp_path / "disk-2").glob("code-*/out/run")
    runs.assert_same_bits(runs.snapshot(finished_run, STEPS), runs.snapshot(run_dir, STEPS))
    hubs.assert_always_whole(hub)
