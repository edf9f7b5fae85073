"""What can go wrong with the Hub, in a few kinds: the client reports it in many types.

Every message is a sentence in which no token stands.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx2
from huggingface_hub import get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import parse_ratelimit_headers

ASKED = "asked_to_wait"
"""Where an answer's own wish, how long to wait, is kept from the client."""
JUDGES_CARDS = "/api/validate-yaml"
OF_THIS_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOENT, errno.EIO)
"""Errors that no Hub has."""
REMEDY = "Log in with `hf auth login`, or set HF_TOKEN, with a token that may write."


class HubError(Exception):
    """The Hub did not do what was asked. The message is a sentence, without a token."""

    about_card = False
    """Whether it is README.md that it did not like, or could not judge."""


class HubUnreachable(HubError):
    """It may do it later."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds that the Hub asks to wait; None where it does not say."""


class HubRefused(HubError):
    """It will not, until somebody changes a token, a right or a name."""


class HubMissing(HubRefused):
    """There is no such repo, or the token may not see it."""


class HubNoRevision(HubRefused):
    """The repo is there, but not that commit or branch."""


class HubUnknown(HubRefused):
    """The Hub does not know what it was asked for: an older or another server."""


class HubMoved(HubError):
    """Somebody else's commit came first."""


def without_secrets(text: str) -> str:
    """A text in which no token stands."""
    token = get_token()
    if token:
        text = text.replace(token, "hf_***")
    text = re.sub(r"hf_\w+", "hf_***", text)
    return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]+", r"\1", text)  # signed addresses


@contextmanager
def told_apart(repo_id: str, revision: str) -> Iterator[None]:
    """Turn whatever the client raises into a HubError of the right kind."""
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in OF_THIS_DISK:
            raise
        told = _kind_of(error, repo_id, revision)
        told.about_card = _is_about_card(error)
        raise told from error


def _kind_of(error: BaseException, repo_id: str, revision: str) -> HubError:
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:  # uploads come wrapped in RuntimeError
        chain.append(cause)
        cause = cause.__cause__
    for found in chain:
        if isinstance(found, LocalTokenNotFoundError):
            return HubRefused(f"hub.repo_id={repo_id} needs a token, and there is none. {REMEDY}")
        if isinstance(found, HFValidationError):
            return HubRefused(f"{repo_id} is not a name that the Hub allows: {_short(found)}.")
        if isinstance(found, OfflineModeIsEnabled):
            return HubUnreachable("the Hub may not be asked: HF_HUB_OFFLINE is set")
        if isinstance(found, HfHubHTTPError) and found.response is not None:
            return _kind_of_answer(found, repo_id, revision)
    for found in chain:
        if isinstance(found, httpx2.TimeoutException):
            return HubUnreachable("the Hub did not answer in time")
        if isinstance(found, httpx2.TransportError | ConnectionError):
            return HubUnreachable(f"the Hub cannot be reached ({_short(found)})")
    return HubUnreachable(f"the Hub client failed: {type(error).__name__}: {_short(chain[-1])}")


def _is_about_card(error: Exception) -> bool:
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return error.response.url.path.endswith(JUDGES_CARDS)
    if isinstance(error, httpx2.TransportError):
        with suppress(RuntimeError):  # none is known
            return error.request.url.path.endswith(JUDGES_CARDS)
    # A server without that address answers with a page, which the client reads as JSON.
    return isinstance(error, json.JSONDecodeError) or (
        isinstance(error, ValueError) and "README.md" in str(error)
    )


def _kind_of_answer(error: HfHubHTTPError, repo_id: str, revision: str) -> HubError:
    status = error.response.status_code
    said = _short(error.server_message or "") or f"HTTP {status}"
    if status == 412:
        return HubMoved(f"{repo_id} has moved on (HTTP 412)")
    if isinstance(error, RevisionNotFoundError):
        return HubNoRevision(
            f"{repo_id} has no revision {revision}: what was before a squash is gone. What there "
            f"is: `python -m snapshot list {repo_id}`."
        )
    if status == 401 and not isinstance(error, RepositoryNotFoundError):
        return HubRefused(f"the Hub does not accept the token (HTTP 401: {said}). {REMEDY}")
    if isinstance(error, RepositoryNotFoundError):
        return HubMissing(
            f"there is no repo {repo_id}, or the token may not see it (HTTP {status}). Check the "
            f"name. {REMEDY}"
        )
    if status in (402, 403):
        return HubRefused(
            f"the Hub refuses (HTTP {status}: {said}). Check the token's rights on {repo_id}, and "
            "the storage that is left."
        )
    if status == 404:
        return HubUnknown(
            f"the Hub does not know what it was asked for (HTTP 404: {said}). Check hub.repo_id "
            "and HF_ENDPOINT."
        )
    return HubUnreachable(f"the Hub answers HTTP {status} ({said})", _retry_after(error))


def _retry_after(error: HfHubHTTPError) -> float | None:
    hidden = error.response.extensions.get(ASKED)
    return seconds_asked(error.response.headers) if hidden is None else float(hidden)


def seconds_asked(headers: httpx2.Headers) -> float | None:
    """How long an answer asks to wait; None where it does not say."""
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    said = headers.get("Retry-After", "")
    return float(said) if said.isdigit() else None


def _short(text: object) -> str:
    lines = without_secrets(str(text)).strip().splitlines()
    return lines[0][:200].rstrip(".") if lines else ""
