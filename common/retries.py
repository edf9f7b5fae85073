"""Requests of texts and of snapshots: given up when their time is over, and repeated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from common.failures import NO_ANSWER, Failure

Answer = TypeVar("Answer")
FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.5, 60.0
LONGEST_RETRY_AFTER_SECONDS = 3600.0
"""The longest delay that a server may ask for."""
BRIEF_DELAY_SECONDS = 2.0
"""The longest delay of `wait_briefly`: four tries within four seconds."""
BRIEF_RATE_LIMIT_SECONDS = 10.0
"""The same where the server asks for it."""


def in_background(request: Callable[[], Answer]) -> Future[Answer]:
    """Run a request in a thread that may be given up, and does not keep the process alive."""
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(request())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="request", daemon=True).start()
    return answer


def wait_briefly(failure: Failure, waited: float, delay: float) -> None:
    """Wait; raise the failure if that would take long, or if the request itself did."""
    longest = BRIEF_RATE_LIMIT_SECONDS if failure.retry_after else BRIEF_DELAY_SECONDS
    if failure.short == NO_ANSWER or delay > longest:
        raise failure
    time.sleep(delay)


def with_retries(
    request: Callable[[], Answer],
    wait: Callable[[Failure, float, float], None] = wait_briefly,
) -> Answer:
    """What `request` returns; it is repeated while it raises a Failure that may pass.

    The delay doubles, or is what the server asks for, an hour at most.
    `wait(failure, waited, delay)` waits that long, or raises to give up; `waited` are the seconds
    since the first try.
    """
    began, delay = time.monotonic(), FIRST_DELAY_SECONDS
    while True:
        try:
            return request()
        except Failure as failure:
            if not failure.may_pass:
                raise
            asked_for = min(failure.retry_after or 0.0, LONGEST_RETRY_AFTER_SECONDS)
            wait(failure, time.monotonic() - began, max(delay, asked_for))
        delay = min(2 * delay, LONGEST_DELAY_SECONDS)
