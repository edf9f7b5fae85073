"""What a signal that ends the process at once still waits for."""

from __future__ import annotations

import signal

import pytest

from training.run import session
from training.run.session import Session


class Ending:
    """A session, as far as that needs one. It notes what happens, in order."""

    end_by_signal, _say_now = Session._end_by_signal, Session._say_now
    note_exit = staticmethod(lambda code: code)

    def __init__(self) -> None:
        self.happened = []

    def finish_writing(self, seconds) -> None:
        self.happened.append("writing")


@pytest.mark.parametrize(
    ("why", "happened"), [("Ctrl-C, and its grace time is over", []), ("", ["writing"])]
)
def test_after_an_error_the_snapshot_that_began_before_it_is_written(monkeypatch, why, happened):
    codes = []
    monkeypatch.setattr(session.os, "_exit", codes.append)
    ending = Ending()
    ending.end_by_signal(signal.SIGINT, why)
    assert (ending.happened, codes) == (happened, [130])
