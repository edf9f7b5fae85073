"""What an attempt says in the store when it ends, and after what."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from store.ownership import AGAIN, DONE, PERSON
from training.run import session
from training.run.session import Session
from training.run.signals import (
    LAUNCHER_GONE,
    TIME_IS_OVER,
    WORKER_GONE,
    Phase,
)


class Ending:
    """A session, as far as its last word needs one. It notes what happens, in order."""

    _ends_as = Session._ends_as
    _release_after_uploads = Session._release_after_uploads
    _seconds_to_release = Session._seconds_to_release
    end, end_by_signal, _say_now = Session.end, Session._end_by_signal, Session._say_now
    note_exit = staticmethod(lambda code: code)
    console = start = SimpleNamespace(folder=None)
    state = SimpleNamespace(step=40)

    def __init__(self, last: bool = False, cause: int | None = None, left: float = 9e9) -> None:
        self.happened, self.finished, self._last = [], last, last
        self.signals = SimpleNamespace(cause=cause, phase=Phase.TRAINING, seconds_left=lambda: left)

    def release(self, *word) -> None:
        self.happened.append(word)

    def _finish_uploads(self) -> None:
        self.happened.append("uploads")

    def finish_writing(self, seconds) -> None:
        self.happened.append("writing")


@pytest.mark.parametrize(
    ("cause", "word"),
    [
        (signal.SIGTERM, AGAIN),
        (signal.SIGUSR1, AGAIN),
        (LAUNCHER_GONE, AGAIN),
        (signal.SIGINT, PERSON),
        (WORKER_GONE, ""),
        (TIME_IS_OVER, AGAIN),
    ],
)
def test_the_last_word_says_who_may_start_the_run_again(cause, word):
    ending = Ending()
    assert ending._ends_as(cause) == word
    assert Ending(last=True)._ends_as(cause) == DONE
    ending._release_after_uploads(cause, 5.0)
    assert ending.happened == ([(word, 5.0)] if word else [])


def test_ctrl_c_while_the_last_step_is_uploaded_is_a_person_s_stop():
    ending = Ending(last=True, cause=signal.SIGINT)
    ending._release_after_uploads(signal.SIGINT, 5.0)
    assert ending.happened == [(PERSON, 5.0)]


def test_a_finished_run_is_uploaded_before_it_is_called_done(monkeypatch):
    monkeypatch.setattr(session.summary, "print_finished", lambda *_: None)
    ending = Ending(last=True, left=3.5)
    assert ending.end() == 0
    assert ending.happened == ["uploads", (DONE, 3.0)]


@pytest.mark.parametrize(
    ("phase", "why", "happened"),
    [
        (Phase.UPLOADING, "Ctrl-C, and its grace time is over", [(PERSON, 2.0)]),
        (Phase.NOTHING_BEGUN, "", ["writing", (PERSON, 2.0)]),
        (Phase.FAILED, "", ["writing"]),  # nobody has stopped a run that an error ends
    ],
)
def test_a_run_that_a_signal_ends_at_once_says_so(monkeypatch, phase, why, happened):
    codes = []
    monkeypatch.setattr(session.os, "_exit", codes.append)
    ending = Ending()
    ending.signals.phase = phase
    ending.end_by_signal(signal.SIGINT, why)
    assert (ending.happened, codes) == (happened, [130])
