"""The few tries of a start, for which a user may be waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from store.errors import HubOffline, HubUnreachable
from store.remote import Remote

Result = TypeVar("Result")
RETRY_DELAYS_SECONDS = (1.0, 3.0)
"""Between tries."""


def with_retries(hub: Remote, work: Callable[[], Result]) -> Result:
    """`work()`, with a few retries while the Hub cannot be reached.

    All requests of a start wait at most `hub.timeout` seconds in all for their answers.
    """
    for seconds in (*RETRY_DELAYS_SECONDS, None):
        try:
            with hub.waiting.limit():
                return work()
        except HubUnreachable as error:
            if seconds is None or hub.waiting.is_over or isinstance(error, HubOffline):
                raise
            time.sleep(seconds)
    raise AssertionError("the last try returns or raises")
