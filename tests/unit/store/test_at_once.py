"""Requests at the same time: they share a start's limit, and none is left behind."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from store import waiting
from store.errors import HubSilent
from store.waiting import CURRENT, WaitingTime, at_once, limit_to

LIMIT_SECONDS = 10.0
DEADLINE_SECONDS = 20.0


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only where a test lets them."""
    now = [100.0]
    monkeypatch.setattr(waiting, "time", type("Clock", (), {"monotonic": lambda: now[0]}))
    return now


def test_the_silence_of_requests_at_once_counts_once(clock):
    """Each may wait as long as is left, and together they take as long as the longest."""
    limit, all_ask = WaitingTime(LIMIT_SECONDS), threading.Barrier(3, timeout=DEADLINE_SECONDS)
    lefts = []

    def ask(number: int) -> int:
        lefts.append(CURRENT.get().begin())
        if all_ask.wait() == 0:
            clock[0] += 4.0
        all_ask.wait()
        return number

    with limit.limit():
        assert at_once([partial(ask, number) for number in range(3)]) == [0, 1, 2]
        assert lefts == [LIMIT_SECONDS] * 3
        assert CURRENT.get().begin() == LIMIT_SECONDS - 4.0


def test_after_the_limit_no_request_at_once_begins(clock):
    limit = WaitingTime(LIMIT_SECONDS)
    with limit.limit():
        CURRENT.get().begin()
        clock[0] += LIMIT_SECONDS
        limit.stop()
        with pytest.raises(HubSilent):
            at_once([lambda: CURRENT.get().begin()] * 2)


def test_the_first_of_several_errors_is_raised_when_all_have_ended():
    ended = []

    def fail(text: str) -> None:
        ended.append(text)
        raise ValueError(text)

    with pytest.raises(ValueError, match="first"):
        at_once([partial(fail, "first"), partial(ended.append, "whole"), partial(fail, "last")])
    assert sorted(ended) == ["first", "last", "whole"]


def test_a_question_to_spare_takes_a_share(clock):
    limit = WaitingTime(LIMIT_SECONDS)
    with limit.limit():
        with limit_to(1 / 4):
            assert CURRENT.get().begin() == LIMIT_SECONDS / 4
            clock[0] += 2.0
        assert CURRENT.get().begin() == LIMIT_SECONDS - 2.0
