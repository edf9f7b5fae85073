"""The Hub client (huggingface_hub), bounded in time and in what it takes from the training.

By default its requests have no timeout, and an upload through hf_xet, its library for Xet (the
Hub's storage for large files), can wait for ever. hf_xet's threads take no signals.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import lru_cache

import httpx2
import huggingface_hub  # imports HfApi at its first use, which a run without a Hub has not
from huggingface_hub.utils import hf_raise_for_status, logging
from huggingface_hub.utils._http import default_client_factory, set_client_factory
from huggingface_hub.utils._runtime import is_xet_available
from huggingface_hub.utils._xet import get_xet_session

from common.failures import retry_after

XET_SETTINGS = {  # memory: each upload in flight holds up to 64 MB
    "HF_XET_CLIENT_AC_MAX_UPLOAD_CONCURRENCY": "3",
    "HF_XET_DATA_MAX_CONCURRENT_FILE_INGESTION": "2",
    "HF_XET_DATA_INGESTION_BLOCK_SIZE": "4mb",
}
NICENESS = 10
"""Added to that of the process, for the threads that cut, hash and compress an upload."""


def hub_api(timeout: float) -> huggingface_hub.HfApi:
    """The Hub client: quiet, and `timeout` is the seconds that a request waits for data."""
    logging.set_verbosity_error()  # its warnings would break our progress line
    for name, value in XET_SETTINGS.items():
        os.environ.setdefault(name, value)
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

    def make() -> httpx2.Client:
        client = default_client_factory()
        client.timeout = httpx2.Timeout(timeout)
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks["request"], bound],
            "response": [*hooks["response"], _raise_rate_limit],
        }
        return client

    set_client_factory(make)


def _raise_rate_limit(response: httpx2.Response) -> None:
    """Raise the error of an answer that asks for a delay: the client itself would sleep so long."""
    if response.is_error and retry_after(response):
        response.read()
        hf_raise_for_status(response)


def open_xet_session() -> None:
    """Make the client's Xet session, if it uses Xet and has none, with threads of a low priority.

    Only its own threads: one that holds Python's lock must not wait for the processor.
    """
    if not is_xet_available():
        return

    def make() -> None:
        if sys.platform == "linux":  # elsewhere the priority is that of the process
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, own + NICENESS))
        get_xet_session()

    thread = threading.Thread(target=make, name="xet session")
    thread.start()
    thread.join()
