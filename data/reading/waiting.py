"""How long the requests for a text are repeated, and what is said of those that fail.

Every request goes through `Waiting.until_answered`, whoever answers it: the Hub, another server, a
store of fsspec or a disk.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from common.failures import Failure, Refused, failure_of
from common.printable import redact_urls
from common.retries import Answer, with_retries
from data.errors import DataError, TextUnreachable

TIMEOUT_SECONDS = 20.0
"""How long a request waits for the next bytes."""
START_SECONDS = 30.0
"""How long a start waits before it fails with TextUnreachable; the launcher may try again."""
START_RATE_LIMIT_SECONDS = 330.0
"""How long a start waits for the end of a rate limit. The Hub counts over five minutes, and would
refuse an attempt that starts again sooner."""
RUN_SECONDS = 6 * 3600.0
"""How long a run waits."""
SHOWN_AFTER_SECONDS, SHOWN_EVERY_SECONDS = 5.0, 60.0
LOG_IN = "For a private data set of the Hub log in with `hf auth login`, or set HF_TOKEN."
DENIED = f"is refused ({{reason}}). {LOG_IN} The signature of a URL may have expired."
GONE = (
    "does not exist ({reason}): it was renamed or deleted, or is private. Check its name. " + LOG_IN
)


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

        `subject` continues `data.source=...` in the sentence about a failure that lasts.

        Raises DataError for such a failure, and TextUnreachable if nothing answers for too long.
        """
        what = f"data.source={redact_urls(source)}"

        def ask() -> Answer:
            if self._closed.is_set():
                raise Stopped(f"the wait for {what} ended")
            try:
                return request()
            except DataError:
                raise
            except Exception as error:  # each client and each file system has its own types
                raise failure_of(error) from error

        try:
            return with_retries(ask, partial(self._wait, what))
        except Failure as failure:
            raise DataError(f"{what}{subject} {_sentence(failure)}") from failure

    def _wait(self, what: str, failure: Failure, waited: float, delay: float) -> None:
        most, reason, asked_for = self._most_seconds, str(failure), failure.retry_after
        if asked_for is not None:
            reason = f"{reason}, and the server asks for a delay of {asked_for:,.0f} s"
            most = max(most, START_RATE_LIMIT_SECONDS)
        if waited + delay > most:
            remedy = "Check the address and the network" if asked_for is None else "Wait that long"
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


def _sentence(failure: Failure) -> str:
    """What a failure that lasts says of a file, after its name."""
    cause, status = failure.cause, failure.status
    if isinstance(cause, Refused):
        return str(cause)
    if status in (404, 410) or isinstance(cause, FileNotFoundError):
        return GONE.format(reason=failure)
    if status in (401, 403) or isinstance(cause, PermissionError):
        return DENIED.format(reason=failure)
    return f"cannot be read: {failure}. Check the address of the file, and the credentials."
