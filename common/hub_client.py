"""The Hub client (huggingface_hub), bounded in time: its requests, and its transfers through Xet.

By default its requests have no timeout, and an upload through hf_xet, its library for Xet (the
Hub's storage for large files), can wait for ever. hf_xet's threads take no signals.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryFile

import httpx2
import huggingface_hub  # imports HfApi at its first use, which a run without a Hub has not
from huggingface_hub import constants
from huggingface_hub.utils import logging
from huggingface_hub.utils._http import default_client_factory, set_client_factory
from huggingface_hub.utils._runtime import is_xet_available
from huggingface_hub.utils._xet import abort_xet_session, get_xet_session

from common.failures import HIDDEN_DELAY, NO_ANSWER, Refused, Unanswered, retry_after

LONGEST_SLEEP_SECONDS = 10.0
"""The longest delay that the client itself may sleep before it repeats a request."""
SLOWEST_BYTES_PER_SECOND = 250_000
"""A transfer may last as long as its bytes need at this speed, and the timeout of a request."""
END: ContextVar[float] = ContextVar("end", default=math.inf)
"""After this moment, by time.monotonic(), this thread begins no request."""
XET_SETTINGS = {  # memory: each upload in flight holds up to 64 MB
    "HF_XET_CLIENT_AC_MAX_UPLOAD_CONCURRENCY": "3",
    "HF_XET_DATA_MAX_CONCURRENT_FILE_INGESTION": "2",
    "HF_XET_DATA_INGESTION_BLOCK_SIZE": "4mb",
}
NICENESS = 10
"""Added to that of the process, for the threads that cut, hash and compress an upload."""
CHANGE = threading.Lock()
"""Held while the HTTP client may change."""


def hub_api(timeout: float) -> huggingface_hub.HfApi:
    """The Hub client: quiet, and `timeout` is the seconds that a request waits for data."""
    logging.set_verbosity_error()  # its warnings would break our progress line
    for name, value in XET_SETTINGS.items():
        os.environ.setdefault(name, value)
    with CHANGE:  # lru_cache alone lets two threads in
        _use_timeout(timeout)
    return huggingface_hub.HfApi()


@lru_cache(maxsize=1)
def _use_timeout(timeout: float) -> None:
    """Change the timeout of all requests, if it is another one.

    All of a process's requests share one HTTP client, and a change closes the one before, with the
    requests of other threads: an upload would be cut off.
    """

    def bound(request: httpx2.Request) -> None:
        # Some calls (repo_info, list_repo_tree) disable the timeout of the client.
        given = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {
            name: timeout if given.get(name) is None else given[name]
            for name in ("connect", "read", "write", "pool")
        }
        if time.monotonic() > END.get():
            raise Unanswered(NO_ANSWER, NO_ANSWER)

    def make() -> httpx2.Client:
        client = default_client_factory()
        client.timeout = httpx2.Timeout(timeout)
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks["request"], bound],
            "response": [*hooks["response"], _hide_long_delay],
        }
        return client

    set_client_factory(make)


def _hide_long_delay(response: httpx2.Response) -> None:
    """Hide a long Retry-After from the client, which would sleep so long: the rooms wait."""
    seconds = retry_after(response)
    if response.is_error and seconds is not None and seconds > LONGEST_SLEEP_SECONDS:
        response.extensions[HIDDEN_DELAY] = seconds
        for name in ("ratelimit", "Retry-After"):
            response.headers.pop(name, None)


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """No request of this thread begins after so long, whatever the client repeats."""
    before = END.set(min(END.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        END.reset(before)


@contextmanager
def transfer(timeout: float, size: int) -> Iterator[None]:
    """A transfer of `size` bytes by the Hub client, which ends when its time is over.

    Raises Unanswered then, and Refused if Xet cannot be used on this machine.
    """
    seconds = timeout + size / SLOWEST_BYTES_PER_SECOND
    end = time.monotonic() + seconds
    timer = threading.Timer(seconds, abort_xet_session)
    timer.daemon = True
    if is_xet_available():
        _check_xet_cache()
        open_xet_session()
        timer.start()
    try:
        with deadline(seconds):
            yield
    except (Exception, KeyboardInterrupt) as error:  # as an aborted session raises
        if time.monotonic() < end:
            raise
        reason = f"a transfer of {size / 1e6:.1f} MB has not ended within {seconds:.0f} seconds"
        raise Unanswered(reason, NO_ANSWER) from error
    finally:
        timer.cancel()


def open_xet_session() -> None:
    """Make the client's Xet session, if it has none, with threads of a low priority.

    Only its own threads: one that holds Python's lock must not wait for the processor.
    """

    def make() -> None:
        if sys.platform == "linux":  # elsewhere the priority is that of the process
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, own + NICENESS))
        get_xet_session()

    thread = threading.Thread(target=make, name="xet session")
    thread.start()
    thread.join()


def _check_xet_cache() -> None:
    """Raise Refused unless hf_xet can write its cache; its own error would not tell."""
    cache = Path(constants.HF_XET_CACHE)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise Refused(
            f"HF_XET_CACHE={cache} cannot be written ({error.strerror}), and Xet needs it for "
            "large files. Free some space there, set HF_XET_CACHE to another folder, or set "
            "HF_HUB_DISABLE_XET=1 to transfer them without Xet.",
            "no cache",
        ) from error
