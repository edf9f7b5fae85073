"""The thread that handles signals: what each means, also with a terminal or a worker gone."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import runs
from training.exits import WRITING_SECONDS
from training.run import session, stopping
from training.run.session import Session
from training.run.stopping import CAUSES, LAUNCHER_GONE, WORKER_GONE, Phase, Signals

# Without torch it is there in a tenth of a second.
PROCESS = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from training.run.stopping import Phase, Signals

def leave(number, why):
    os.write(1, f"{{number}} {{why}}\\n".encode())
    if why != "an error":
        os._exit(0)

signals = Signals(0.3, leave)
signals.phase = Phase.TRAINING
print("ready", flush=True)
time.sleep(30)
"""


def started(**options) -> subprocess.Popen:
    """A process that would leave 0.3 seconds after a signal, and is ready for one."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS.format(root=str(runs.ROOT))],
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def ignoring_hangup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_a_hangup_ignored_at_the_start_stays_ignored():
    with started(preexec_fn=ignoring_hangup) as process:
        status = Path(f"/proc/{process.pid}/status").read_text()
        (ignored,) = (line for line in status.splitlines() if line.startswith("SigIgn:"))
        assert int(ignored.split()[1], 16) & 1 << signal.SIGHUP - 1
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=10)
    assert output.startswith(f"{int(signal.SIGTERM)} ")
    assert "its grace time is over" in output


class Handler(Signals):
    """One without a thread and without handlers: what it is told, it is told here."""

    def __init__(self, phase: Phase, launcher: object = None) -> None:
        self.phase, self.left, self.said = phase, [], []
        self._say = self.said.append
        self._grace, self._launcher, self.cause = 5.0, launcher, None
        self._until = math.inf
        self._leave = lambda number, why: self.left.append((number, why))
        self._reading, self._writing = os.pipe()  # of the test

    def tell(self, *numbers: int) -> None:
        os.write(self._writing, bytes(numbers))
        self._look()


def parent(lives: bool = True, lost: bool = False, forwards: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        is_alive=lambda: lives, lost_a_worker=lambda: lost, forwards_sigterm=forwards
    )


@pytest.mark.parametrize(("lost", "code"), [(True, 1), (False, 143)])
@pytest.mark.parametrize("phase", [Phase.NOTHING_BEGUN, Phase.TRAINING, Phase.UPLOADING])
def test_sigterm_after_a_worker_s_death_is_a_failure(phase, lost, code):
    handler = Handler(phase, parent(lost=lost))
    handler.tell(signal.SIGTERM)
    cause = handler.left[0][0] if phase is Phase.NOTHING_BEGUN else handler.cause
    assert CAUSES[cause].exit_code == code
    assert (cause == WORKER_GONE) == lost


@pytest.mark.parametrize(
    ("phase", "number", "told"),
    [
        (Phase.TRAINING, signal.SIGINT, 1),
        (Phase.TRAINING, signal.SIGTERM, 0),
        (Phase.UPLOADING, signal.SIGINT, 0),
    ],
)
def test_a_person_is_told_at_once_what_ctrl_c_does(phase, number, told):
    """A step may take minutes."""
    handler = Handler(phase)
    handler.tell(number)
    assert len(handler.said) == told
    assert all("within 5 s. Ctrl-C again ends it at once" in text for text in handler.said)


def test_a_worker_that_dies_after_the_stop_changes_nothing():
    handler = Handler(Phase.TRAINING, parent(lost=True))
    handler.tell(signal.SIGINT)
    handler._launcher = parent(lost=True)
    handler.tell(signal.SIGTERM)
    assert handler.cause == signal.SIGINT


@pytest.mark.parametrize(("forwards", "code"), [(True, 75), (False, 143)])
def test_a_silent_launcher_did_not_tell_the_run_to_stop(monkeypatch, forwards, code):
    monkeypatch.setattr(stopping, "LOOK_SECONDS", 0.01)
    handler = Handler(Phase.TRAINING, parent(lives=False, forwards=forwards))
    handler._look()
    assert CAUSES[handler.cause].exit_code == code
    assert (handler.cause == LAUNCHER_GONE) == forwards


def test_the_thread_outlives_whatever_goes_wrong_in_it():
    handler = Handler(Phase.TRAINING)
    seen = []

    def look():
        seen.append(1)
        if len(seen) < 3:
            raise OSError("the terminal is gone")
        raise SystemExit

    handler._look = look
    with pytest.raises(SystemExit):
        handler._watch()
    assert len(seen) == 3


class Left(Exception):
    """In the place of os._exit."""


@pytest.fixture
def left(monkeypatch):
    """The codes that this process left with."""
    codes = []

    def leave(code):
        codes.append(code)
        raise Left

    monkeypatch.setattr(session.os, "_exit", leave)
    return codes


class Ending:
    """A session, as far as the end by a signal needs one."""

    _lock = SimpleNamespace(note_exit=lambda code: code)
    end, _say_now = Session._end_by_signal, Session._say_now
    signals = SimpleNamespace(phase=Phase.TRAINING)

    def __init__(self) -> None:
        self.waited = []
        self.finish_writing = self.waited.append


@pytest.mark.parametrize(
    ("why", "waited"), [("Ctrl-C, and its grace time is over", []), ("", [WRITING_SECONDS])]
)
def test_after_an_error_the_snapshot_that_began_before_it_is_written(left, why, waited):
    ending = Ending()
    with pytest.raises(Left):
        ending.end(signal.SIGINT, why)
    assert (ending.waited, left) == (waited, [130])


def test_a_signal_ends_a_run_whose_stderr_takes_nothing(left, monkeypatch):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)  # as a terminal that was stopped by Ctrl-S
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(fileno=lambda: writing))
    monkeypatch.setattr(session, "LAST_WORDS_SECONDS", 0.05)
    begun = time.monotonic()
    with pytest.raises(Left):
        Ending().end(signal.SIGINT, "Ctrl-C again")
    assert time.monotonic() - begun < 5
    assert left == [130]
    for end in (reading, writing):
        os.close(end)
