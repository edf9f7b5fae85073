"""Repeats the requests for a text, reports long waits, and says what a failure means.

Every request goes through `Waiting.until_answered`, whoever answers it: the Hub, another server, a
store of fsspec or a disk.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import TypeVar

import httpx2

from common.printable import redact_urls
from data.errors import DataError, TextUnreachable, reason_of

Answer = TypeVar("Answer")
TIMEOUT_SECONDS = 20.0
"""How long a request waits for the next bytes."""
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
LOG_IN = "For a private data set of the Hub log in with `hf auth login`, or set HF_TOKEN."
REFUSED_STATUSES = {
    401: f"is refused (HTTP 401). {LOG_IN} The signature of a URL may have expired.",
    403: f"is refused (HTTP 403). {LOG_IN} The signature of a URL may have expired.",
    404: "does not exist (HTTP 404): it was renamed or deleted, or is private. Check its name. "
    + LOG_IN,
    410: "does not exist (HTTP 410): it was deleted. Check its name.",
}
"""Of HTTP statuses that last, what they say of a file."""
LASTING = (
    ImportError,  # the package of a protocol
    ValueError,  # no such protocol
    httpx2.InvalidURL,
    httpx2.TooManyRedirects,
    httpx2.DecodingError,
)


class Unanswered(Exception):
    """A failure that may pass, after the seconds that the server named."""

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class Refused(Exception):
    """A failure that lasts. The message completes a sentence that begins with the file."""


class Stopped(DataError):
    """A wait ended because `Access` was closed."""


class Waiting:
    """Repeats the requests of all threads that read a data set."""

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

    def until_answered(
        self, source: str, request: Callable[[], Answer], subject: str = ""
    ) -> Answer:
        """What `request` returns. It is repeated while the network or the server fails.

        The delay doubles, or is what the server asks for. `subject` continues `data.source=...` in
        the sentence about a failure that lasts.

        Raises DataError for such a failure, and TextUnreachable if nothing answers for too long.
        """
        what = f"data.source={redact_urls(source)}"
        began = time.monotonic()
        delay = FIRST_DELAY_SECONDS
        while not self._closed.is_set():
            try:
                return request()
            except DataError:
                raise
            except Exception as error:  # each client and each file system has its own types
                failure = failure_of(error)
                if isinstance(failure, Refused):
                    raise DataError(f"{what}{subject} {failure}") from error
                self._wait(what, failure, began, delay)
            delay = min(2 * delay, LONGEST_DELAY_SECONDS)
        raise Stopped(f"the wait for {what} ended")

    def _wait(self, what: str, failure: Unanswered, began: float, delay: float) -> None:
        waited, most = time.monotonic() - began, self._most_seconds
        reason, named = str(failure), failure.retry_after
        if named is not None:
            reason = f"{reason}, and the server asks for a delay of {named:,.0f} s"
            delay = max(delay, min(named, LONGEST_RETRY_AFTER_SECONDS))
            most = max(most, START_RATE_LIMIT_SECONDS)
        if waited + delay > most:
            remedy = "Check the address and the network" if named is None else "Wait that long"
            raise TextUnreachable(
                f"{what} cannot be reached: {reason}. Tried for {waited:,.0f} s, of {most:,.0f} s "
                f"at most. {remedy}, and start again."
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


def failure_of(error: Exception) -> Unanswered | Refused:
    """Whether what a request raised may pass, and why it failed."""
    if isinstance(error, Unanswered | Refused):
        return error
    response = getattr(error, "response", None)  # of httpx2, the Hub's client or a file system
    if isinstance(status := getattr(response, "status_code", None), int):
        return _failure_of_status(status, getattr(response, "headers", {}))
    reason = redact_urls(reason_of(error))
    if isinstance(error, httpx2.TimeoutException):
        return Unanswered(f"no answer in {TIMEOUT_SECONDS:.0f} s")
    if isinstance(error, FileNotFoundError):
        return Refused("does not exist. Check its name.")
    if isinstance(error, PermissionError):
        return Refused(f"is refused: {reason}. Check the credentials.")
    if isinstance(error, LASTING):
        return Refused(f"cannot be opened: {reason}. Check the address of the file.")
    return Unanswered(reason)


def _failure_of_status(status: int, headers: Mapping[str, str]) -> Unanswered | Refused:
    if status in (408, 425, 429) or status >= 500:
        # The Hub names the end of its rate limit in a header of its own: `"api";r=0;t=55`.
        limit = re.search(r"\bt=(\d+)", headers.get("RateLimit", ""))
        retry_after = seconds_of(headers.get("Retry-After"))
        if retry_after is None and limit is not None:
            retry_after = float(limit[1])
        return Unanswered(f"HTTP {status}", retry_after)
    return Refused(
        REFUSED_STATUSES.get(status, f"cannot be read: HTTP {status}. Check the address.")
    )


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
