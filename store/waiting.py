"""How long a start waits for a Hub that does not answer: one limit for all of its requests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock, Thread
from typing import TypeVar

import httpx2

from store.errors import HubSilent

SHORTEST_TIMEOUT_SECONDS = 0.1
MOST_AT_ONCE = 8
"""Requests at the same time, as many as the Hub client's own downloads of a repo make."""
Result = TypeVar("Result")


class WaitingTime:
    """The seconds that all requests may wait in sum without a byte of an answer.

    Time in which bytes arrive does not count, so a long download has no limit.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = self._left = self._limit = seconds
        self._since: float | None = None
        """When the last byte came; None if no request waits."""

    @property
    def is_over(self) -> bool:
        """Whether no request may wait any longer."""
        return self._left <= 0

    @contextmanager
    def limit(self) -> Iterator[None]:
        """Count the requests that this thread makes in the block. They raise HubSilent at the end
        of the time."""
        outer = CURRENT.set(self)
        try:
            yield
        finally:
            CURRENT.reset(outer)
            self.stop()

    def part(self, share: float = 1.0) -> WaitingTime:
        """A share of the time that is left, for another thread or for an optional request."""
        part = WaitingTime(max(0.0, share * self._left))
        part._limit = self._limit  # for messages
        return part

    def spend(self, parts: Sequence[WaitingTime]) -> None:
        """Count what parts have used that ran at the same time: the longest of them."""
        self._left -= max((part._seconds - part._left for part in parts), default=0.0)

    def begin(self) -> float:
        """A request begins; the seconds that are left for it. Raises HubSilent if there are none.

        A request before it that has not come to an end has failed: its time counts.
        """
        self.stop()
        if self.is_over:
            raise HubSilent(f"the Hub has not answered for {self._limit:g} seconds")
        self._since = time.monotonic()
        return max(self._left, SHORTEST_TIMEOUT_SECONDS)

    def progress(self) -> None:
        """Bytes have come, so the waiting begins anew."""
        self._since = time.monotonic()

    def end(self) -> None:
        """The request has its answer."""
        self._since = None

    def stop(self) -> None:
        """Count the time since the last byte, if a request still waits."""
        if self._since is not None:
            self._left -= time.monotonic() - self._since
            self._since = None


CURRENT: ContextVar[WaitingTime | None] = ContextVar("waiting", default=None)
"""What limits the requests of this thread; the Hub client has one HTTP client for all threads."""


def limit_request(request: httpx2.Request) -> None:
    """A hook of the HTTP client: shorten a request's timeouts to the time that is left."""
    if (waiting := CURRENT.get()) is not None:
        left = waiting.begin()
        timeouts = request.extensions["timeout"]
        request.extensions["timeout"] = {name: min(left, own) for name, own in timeouts.items()}


def watch_response(response: httpx2.Response) -> None:
    """A hook of the HTTP client: bytes of the answer end the waiting, and begin it anew."""
    if (waiting := CURRENT.get()) is not None:
        waiting.progress()
        assert isinstance(response.stream, httpx2.SyncByteStream)
        response.stream = _Watched(response.stream, waiting)


class _Watched(httpx2.SyncByteStream):
    """The body of an answer, which tells of its bytes."""

    def __init__(self, stream: httpx2.SyncByteStream, waiting: WaitingTime) -> None:
        self._stream, self._waiting = stream, waiting

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            self._waiting.progress()
            yield part
        self._waiting.end()

    def close(self) -> None:
        self._waiting.stop()  # before the end of the body only if that was cut off
        self._stream.close()


@contextmanager
def limit_to(share: float) -> Iterator[None]:
    """A limit for a question that a start can do without: a share of the time that is left."""
    outer = CURRENT.get()
    if outer is None:
        yield
        return
    part = outer.part(share)
    try:
        with part.limit():
            yield
    finally:
        outer.spend([part])


def at_once(works: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run the callables in threads that share this thread's limit; their results, in order.

    After an error no more of them begin, and it is raised when those that had begun have ended; of
    several, the first in the list. Ctrl-C ends the wait at once.
    """
    outer, left, lock = CURRENT.get(), deque(enumerate(works)), Lock()
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def work_off(part: WaitingTime | None) -> None:
        CURRENT.set(part)  # a thread has a context of its own
        while not errors:
            with lock:
                if not left:
                    break
                number, work = left.popleft()
            try:
                results[number] = work()
            except BaseException as error:
                errors[number] = error
        if part is not None:
            part.stop()

    parts = [outer and outer.part() for _ in works[:MOST_AT_ONCE]]
    threads = [
        Thread(target=work_off, args=(part,), name="requests", daemon=True) for part in parts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if outer is not None:
        outer.spend([part for part in parts if part is not None])
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(len(works))]


@contextmanager
def transfer(timeout: float) -> Iterator[tuple[float, Callable[[], None]]]:
    """A download that makes its requests itself.

    Yields the seconds that it may stall, at most `timeout`, and what it must call when bytes come.
    Of a start's time it is half of what is left, so that a download that stalls is tried again.
    """
    waiting = CURRENT.get()
    if waiting is None:
        yield timeout, lambda: None
        return
    yield min(timeout, waiting.begin() / 2), waiting.progress
    waiting.end()
