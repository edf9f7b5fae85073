"""The thread that handles signals: what each means, also with a terminal or a worker gone."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import runs
from training.exits import WRITING_SECONDS
from training.run import session, stopping
from training.run.session import Session
from training.run.stopping import CAUSES, LAUNCHER_GONE, WORKER_GONE, Phase, Signals

# Without torch it is there in a tenth of a second.
PROCESS = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from training.run.stopping import Phase, Signals

def leave(number, why):
    print(number, why, flush=True)
    os._exit(0)

Signals(0.3, leave).phase = Phase.TRAINING
print("ready", flush=True)
time.sleep(30)
"""


def test_a_hangup_ignored_at_the_start_stays_ignored():
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    words = [sys.executable, "-c", PROCESS, str(runs.ROOT)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        signal.signal(signal.SIGHUP, ignored)
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=10)
    assert output == f"{int(signal.SIGTERM)} SIGTERM, and its grace time is over\n"


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
        for number in numbers:
            os.write(self._writing, bytes([number]))
            self._look()


def parent(lives: bool = True, lost: bool = False, forwards: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        is_alive=lambda: lives, lost_a_worker=lambda: lost, forwards_sigterm=forwards
    )


BEGINNING, TRAINING, UPLOADING = LIVING = list(Phase)[:3]
INT, TERM = signal.SIGINT, signal.SIGTERM


@pytest.mark.parametrize(
    ("phase", "launcher", "numbers", "cause", "code", "told"),
    [
        *((phase, parent(lost=True), [TERM], WORKER_GONE, 1, 0) for phase in LIVING),
        *((phase, parent(lost=False), [TERM], TERM, 143, 0) for phase in LIVING),
        (TRAINING, parent(lost=True), [INT, TERM], INT, 130, 1),  # it dies after the stop
        (TRAINING, None, [INT], INT, 130, 1),  # a step may take minutes, and a person waits
        (TRAINING, None, [TERM], TERM, 143, 0),
        (UPLOADING, None, [INT], INT, 130, 0),
        (TRAINING, parent(lives=False), [], LAUNCHER_GONE, 75, 0),  # nobody told the run to stop
        (TRAINING, parent(lives=False, forwards=False), [], TERM, 143, 0),
    ],
)
def test_the_first_signal_is_the_cause(monkeypatch, phase, launcher, numbers, cause, code, told):
    monkeypatch.setattr(stopping, "LOOK_SECONDS", 0.01)
    handler = Handler(phase, launcher)
    handler.tell(*numbers)
    if not numbers:
        handler._look()
    found = handler.left[0][0] if phase is BEGINNING else handler.cause
    assert (found, CAUSES[found].exit_code) == (cause, code)
    assert len(handler.said) == told
    assert all("within 5 s. Ctrl-C again ends it at once" in text for text in handler.said)


def test_the_thread_outlives_whatever_goes_wrong_in_it():
    handler = Handler(Phase.TRAINING)
    handler._look = Mock(side_effect=[OSError("the terminal is gone"), ValueError, SystemExit])
    with pytest.raises(SystemExit):
        handler._watch()
    assert handler._look.call_count == 3


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
