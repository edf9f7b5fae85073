"""What ends an attempt on each machine, where machines come and go."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from config.schema import RunConfig
from training.run import stop
from training.run.signals import MEMBERSHIP, PREEMPTED, name_of
from training.run.stop import Stop


@pytest.mark.parametrize(
    ("own", "largest", "ends_by"),
    [
        (0, signal.SIGTERM, MEMBERSHIP),
        (signal.SIGTERM, PREEMPTED, signal.SIGTERM),
        (PREEMPTED, signal.SIGTERM, PREEMPTED),  # it has a notice, and another machine goes first
    ],
)
def test_each_machine_ends_by_its_own_cause_or_stays(monkeypatch, own, largest, ends_by):
    monkeypatch.setattr(stop, "is_elastic", lambda: True)
    stopped = []
    signals = SimpleNamespace(cause=None, own_cause=own, stop=stopped.append)
    saves = SimpleNamespace(is_time=lambda: False, agree=lambda *answer: None)
    run = Stop(SimpleNamespace(num_processes=2), RunConfig(), signals, saves)
    run._largest_of_all = lambda step, number, *rest: (step, max(number, largest), *rest)
    assert run.agreed(1)
    assert stopped == [ends_by]
    assert run.reason == name_of(ends_by)
