"""The launcher of a process: what proves that there is one, and what is known of it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from training.distributed import launcher

WAITING = "import sys; print('up', flush=True); sys.stdin.read()"
TWO_WORKERS = """
import subprocess, sys
workers = [subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL) for _ in range(2)]
print(workers[1].pid, flush=True)
for line in sys.stdin:
    print(workers[1].wait(), flush=True)
"""


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    launcher.launcher.cache_clear()
    yield
    launcher.launcher.cache_clear()


@pytest.fixture
def under(monkeypatch):
    """Make a process the parent of this one, as far as the system is asked."""

    @contextlib.contextmanager
    def parent(*words: str) -> Iterator[subprocess.Popen]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(words, **pipes)
        try:
            process.first = process.stdout.readline().strip()
            monkeypatch.setattr(launcher.os, "getppid", lambda: process.pid)
            yield process
        finally:
            process.kill()
            process.communicate()

    return parent


def program(folder: Path, name: str, text: str = WAITING) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", ["accelerate-launch", "torchrun"])
def test_a_launcher_is_known_by_its_command(under, tmp_path, name):
    with under(sys.executable, program(tmp_path, name), "launch", "train.py") as parent:
        found = launcher.launcher()
        assert found.process.pid == parent.pid
        assert Path(found.command[0]).name == name
        assert found.command[1:] == ("launch", "train.py")
        assert found.is_alive()


@pytest.mark.parametrize(
    "words",
    [
        ["sh", "-c", "echo up; read line", "accelerate", "launch"],
        [sys.executable, "-c", WAITING, "-m", "unittest"],
    ],
)
def test_what_is_exported_makes_no_launcher_of_a_shell(under, monkeypatch, words):
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    with under(*words):
        assert launcher.launcher() is None


def test_only_a_worker_that_died_by_itself_is_missed(under, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with under(sys.executable, program(tmp_path, "torchrun", TWO_WORKERS)) as parent:
        found = launcher.launcher()
        assert not found.lost_a_worker()
        worker = psutil.Process(int(parent.first))
        worker.kill()
        while worker.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert not found.lost_a_worker()  # as when all are told, and the first has not ended
        parent.stdin.write("wait\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "-9\n"
        assert found.lost_a_worker()  # as before the others are told


def test_an_orphan_signals_nobody_in_its_launchers_place(under, tmp_path, monkeypatch):
    with under(sys.executable, program(tmp_path, "torchrun")) as parent:
        found = launcher.launcher()
        monkeypatch.setattr(launcher.os, "getppid", lambda: 1)
        assert not found.is_alive()
        found.stop()
        assert parent.poll() is None
        monkeypatch.setattr(launcher.os, "getppid", lambda: parent.pid)
        found.stop()
        assert parent.wait(timeout=10) == -15


def test_a_restarted_attempt_has_lasted_since_its_launcher_began(under, tmp_path, monkeypatch):
    with under(sys.executable, program(tmp_path, "torchrun")):
        first = launcher.seconds_since_launch()
        assert first == pytest.approx(launcher.seconds_since_start(), abs=1)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert launcher.seconds_since_launch() < first - 0.5  # here the launcher is the younger
