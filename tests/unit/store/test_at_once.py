"""Requests at the same time: they share a start's limit, and none is left behind."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from store import waiting
from store.errors import HubSilent
from store.waiting import CURRENT, MOST_AT_ONCE, WaitingTime, at_once, limit_to

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


def test_after_an_error_no_more_begin_and_it_is_raised_when_those_that_had_have_ended():
    both, ended = threading.Barrier(2, timeout=DEADLINE_SECONDS), []

    def fail(text: str) -> None:
        both.wait()
        ended.append(text)
        raise ValueError(text)

    works = [partial(fail, "first"), partial(fail, "second")]
    with pytest.raises(ValueError, match="first"):
        at_once([*works, *[partial(ended.append, "late")] * (MOST_AT_ONCE - 2)])
    assert {"first", "second"} <= set(ended)
    ended.clear()
    both = threading.Barrier(MOST_AT_ONCE, timeout=DEADLINE_SECONDS)
    works = [partial(fail, str(number)) for number in range(MOST_AT_ONCE)]
    with pytest.raises(ValueError, match="0"):
        at_once([*works, partial(ended.append, "late")])
    assert "late" not in ended


def test_more_requests_than_threads_have_one_limit(clock):
    """A server that hangs costs the limit once, however many files there are."""
    limit, all_ask = WaitingTime(LIMIT_SECONDS), threading.Barrier(MOST_AT_ONCE)
    asked = []

    def hang() -> None:
        asked.append(CURRENT.get().begin())
        if all_ask.wait(DEADLINE_SECONDS) == 0:
            clock[0] += LIMIT_SECONDS
        all_ask.wait(DEADLINE_SECONDS)
        CURRENT.get().stop()

    with limit.limit(), pytest.raises(HubSilent):
        at_once([hang] * (2 * MOST_AT_ONCE))
    assert asked == [LIMIT_SECONDS] * MOST_AT_ONCE
    assert limit.is_over


def test_a_question_to_spare_takes_a_share(clock):
    limit = WaitingTime(LIMIT_SECONDS)
    with limit.limit():
        with limit_to(1 / 4):
            assert CURRENT.get().begin() == LIMIT_SECONDS / 4
            clock[0] += 2.0
        assert CURRENT.get().begin() == LIMIT_SECONDS - 2.0
