"""A store on the Hub, and the HTTP client that it has: the default one, with timeouts."""

from __future__ import annotations

from functools import lru_cache
from threading import Lock

import httpx2
import huggingface_hub  # imports HfApi at its first use, which a run without a Hub has not
from huggingface_hub import constants, get_token
from huggingface_hub.errors import LocalTokenNotFoundError
from huggingface_hub.utils import logging
from huggingface_hub.utils._http import default_client_factory, set_client_factory

from store.errors import REMEDY, RETRY_AFTER, HubRefused, retry_after_seconds, translate_errors
from store.store import BRANCH, Store
from store.waiting import limit_request, watch_response
from store.xet import XetStorage

LONGEST_SLEEP_SECONDS = 10.0
"""The longest delay between the Hub client's own retries of a request."""

CHANGE = Lock()
"""Held while the HTTP client may change."""


def hub_api(timeout: float) -> huggingface_hub.HfApi:
    """The Hub client: quiet, and `timeout` is the seconds that a request waits for data."""
    logging.set_verbosity_error()  # its warnings would break our progress line
    with CHANGE:  # lru_cache alone lets two threads in
        _use_timeout(timeout)
    return huggingface_hub.HfApi()


class OnHub(Store):
    """A store that the Hub client reaches."""

    def __init__(self, repo_id: str, timeout: float = 60.0) -> None:
        """`timeout`: seconds that a request waits for data."""
        super().__init__(timeout)
        self.repo_id = repo_id
        self._api = hub_api(timeout)
        self._xet = XetStorage(repo_id, timeout)

    def beside(self, suffix: str) -> str:
        """The URL of another one of the same owner."""
        return f"{self.url}{suffix}"

    @property
    def is_offline(self) -> bool:
        """Whether this process must not use the Hub; that lasts as long as the process."""
        return bool(constants.HF_HUB_OFFLINE)

    def require_token(self) -> None:
        """Raise HubRefused if there is no token. Makes no request."""
        with translate_errors(self.name, BRANCH):
            if not get_token():
                raise LocalTokenNotFoundError

    def check_token(self) -> None:
        """Raise HubRefused if there is no token, or a read-only one."""
        with translate_errors(self.name, BRANCH):
            who = self._api.whoami()
        token = (who.get("auth") or {}).get("accessToken") or {}
        if token.get("role") == "read":
            raise HubRefused(
                f"the token of {who.get('name')} is read-only, but the run writes to "
                f"{self.name}. {REMEDY}"
            )


@lru_cache(maxsize=1)
def _use_timeout(timeout: float) -> None:
    """Change the timeout of all requests, if it is another one.

    All of a process's requests share one HTTP client, and a change closes the one before, with the
    requests of other threads: an upload would be cut off.
    """
    set_client_factory(lambda: client(timeout))


def client(timeout: float) -> httpx2.Client:
    """The Hub client's default HTTP client, with a timeout and without long delays for retries."""

    def set_timeouts(request: httpx2.Request) -> None:
        # Some calls (repo_info, list_repo_tree) disable the timeout of the client.
        given = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {
            name: timeout if given.get(name) is None else given[name]
            for name in ("connect", "read", "write", "pool")
        }

    client = default_client_factory()
    client.timeout = httpx2.Timeout(timeout)
    hooks = client.event_hooks
    client.event_hooks = {
        "request": [*hooks["request"], set_timeouts, limit_request],
        "response": [*hooks["response"], _hide_long_retry_delay, watch_response],
    }
    return client


def _hide_long_retry_delay(response: httpx2.Response) -> None:
    """Hide a long Retry-After from the Hub client, which would sleep so long: we wait ourselves."""
    seconds = retry_after_seconds(response.headers)
    if response.is_error and seconds is not None and seconds > LONGEST_SLEEP_SECONDS:
        response.extensions[RETRY_AFTER] = seconds
        for name in ("ratelimit", "Retry-After"):
            response.headers.pop(name, None)
