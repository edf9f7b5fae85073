"""The log of the loopback Hub, and waiting until something stands in it."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from loopback_messages import Request


class Log:
    """What was asked and what came in. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._changes = 0
        self._numbers = itertools.count(1)
        self._requests: list[Request] = []
        self._uploaded: Counter[str] = Counter()

    def begin(self, endpoint: str, method: str, path: str, token: str | None) -> Request:
        """The line of a request that has come, not yet in the log."""
        with self._changed:
            return Request(next(self._numbers), time.monotonic(), endpoint, method, path, token)

    def add(self, request: Request) -> None:
        """Put a request into the log."""
        with self._changed:
            self._requests.append(request)
        self.notify()

    def received(self, sha256: str) -> None:
        """Count a large content that has come in whole."""
        with self._changed:
            self._uploaded[sha256] += 1

    def notify(self) -> None:
        """Let those who wait look again."""
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def requests(self) -> list[Request]:
        """What was asked, in the order of the answers."""
        with self._changed:
            return list(self._requests)

    def uploaded(self) -> Counter[str]:
        """How often each large content came in whole, by SHA-256."""
        with self._changed:
            return Counter(self._uploaded)

    def wait_for(self, predicate: Callable[[], Any], deadline: float) -> Any:
        """The first true value of a predicate, looked at whenever something has changed.

        Raises AssertionError after so many seconds. No lock is held while the predicate looks.
        """
        end = time.monotonic() + deadline
        while True:
            seen = self._changes
            if value := predicate():
                return value
            if time.monotonic() >= end:
                last = "\n".join(f"{one.endpoint} {one.status}" for one in self.requests()[-20:])
                raise AssertionError(f"not within {deadline} seconds; the last requests:\n{last}")
            with self._changed:
                if self._changes == seen:
                    self._changed.wait(max(0.0, end - time.monotonic()))
