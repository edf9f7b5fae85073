"""Retries failing requests, with a growing delay, and reports long waits."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime

from data.errors import DataError, TextUnreachable

FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.5, 60.0
LONGEST_RETRY_AFTER_SECONDS = 3600.0
"""The longest delay that a server may ask for."""
START_SECONDS = 30.0
"""How long a start waits before it fails with TextUnreachable; the launcher may try again."""
START_RATE_LIMIT_SECONDS = 330.0
"""How long a start waits for the end of a rate limit. The Hub counts over five minutes, and would
refuse an attempt that starts again sooner."""
RUN_SECONDS = 6 * 3600.0
"""How long a run waits."""
SHOWN_AFTER_SECONDS, SHOWN_EVERY_SECONDS = 5.0, 60.0


class Unanswered(Exception):
    """A request that failed and may succeed later, after the seconds that the server named."""

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class Stopped(DataError):
    """A wait ended because `Access` was closed."""


class Waiting:
    """Retries the requests of all threads that read a data set."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._most_seconds = RUN_SECONDS
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._said_at = -math.inf

    @contextmanager
    def at_start(self) -> Iterator[None]:
        """Waits are short within this context."""
        before, self._most_seconds = self._most_seconds, START_SECONDS
        try:
            yield
        finally:
            self._most_seconds = before

    def close(self) -> None:
        """End every wait with Stopped."""
        self._closed.set()

    def until_answered(self, what: str, attempt: Callable[[], bool]) -> None:
        """Call `attempt` until it returns true.

        After Unanswered the delay doubles, or is what the server asks for. An attempt that returns
        false has received a part: the next one follows at once.

        Raises TextUnreachable if nothing is received for too long.
        """
        began = time.monotonic()
        delay = FIRST_DELAY_SECONDS
        while not self._closed.is_set():
            try:
                if attempt():
                    return
                began, delay = time.monotonic(), FIRST_DELAY_SECONDS
                continue
            except Unanswered as error:
                self._wait(what, error, began, delay)
            delay = min(2 * delay, LONGEST_DELAY_SECONDS)
        raise Stopped(f"the wait for {what} ended")

    def _wait(self, what: str, error: Unanswered, began: float, delay: float) -> None:
        waited, most = time.monotonic() - began, self._most_seconds
        reason, named = str(error), error.retry_after
        if named is not None:
            reason = f"{reason}, and the server asks for a delay of {named:,.0f} s"
            delay = max(delay, min(named, LONGEST_RETRY_AFTER_SECONDS))
            most = max(most, START_RATE_LIMIT_SECONDS)
        if waited + delay > most:
            remedy = "Check the network, and" if named is None else "Wait that long, and"
            raise TextUnreachable(
                f"{what} cannot be reached: {reason}. Tried for {waited:,.0f} s, of {most:,.0f} s "
                f"at most. {remedy} start again."
            )
        if waited + delay > SHOWN_AFTER_SECONDS:
            self._show(f"waiting for {what}, {waited:.0f} s so far: {reason}")
        self._closed.wait(delay)

    def _show(self, line: str) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._said_at < SHOWN_EVERY_SECONDS:
                return
            self._said_at = now
        self._say(line)


def is_transient(status: int) -> bool:
    """Whether an HTTP status is a failure that may pass, such as a rate limit."""
    return status in (408, 425, 429) or status >= 500


def seconds_of(retry_after: str | None) -> float | None:
    """The delay of a Retry-After header, which is a number or a date; None without one."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return None
