"""What can go wrong with the Hub, in a few kinds: the client reports it in many types.

Every message is a sentence in which no token stands, and no control character.
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
    FileMetadataError,
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import parse_ratelimit_headers

from data.printable import printable
from data.urls import redact_urls

ASKED = "asked_to_wait"
"""Where an answer's own wish, how long to wait, is kept from the client."""
JUDGES_CARDS = "/api/validate-yaml"
OF_THIS_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOENT, errno.EIO)
"""Errors that no Hub has."""
REMEDY = "Log in with `hf auth login`, or set HF_TOKEN, with a token that may write."


COMMIT_ID = re.compile("[0-9a-f]{7,64}")
CLIENT_GAVE_UP = (ValueError, LookupError, TypeError, AttributeError)
"""What the client raises before it asks, or on an answer of another form than it knows."""
MAY_PASS = (408, 409, 425, 429)
"""Statuses below 500 that another try may mend."""


class HubError(Exception):
    """The Hub did not do what was asked. The message is a sentence, without a token."""

    def __init__(self, message: str, short: str = "refused") -> None:
        super().__init__(printable(message))
        self.short = short
        """The fault in a word or two, for the progress line."""

    about_card = False
    """Whether it is README.md that it did not like, or could not judge."""


class HubUnreachable(HubError):
    """It may do it later."""

    def __init__(
        self, message: str, short: str = "not reachable", retry_after: float | None = None
    ) -> None:
        super().__init__(message, short)
        self.retry_after = retry_after
        """Seconds that the Hub asks to wait; None where it does not say."""


class HubRefused(HubError):
    """It will not, until somebody changes a token, a right or a name."""


class HubMissing(HubRefused):
    """There is no such repo, or the token may not see it."""


class HubNoRevision(HubRefused):
    """The repo is there, but not that commit or branch."""


class HubUnsupported(HubRefused):
    """The Hub does not know what it was asked for: an older or another server."""


class HubConflict(HubError):
    """Somebody else's commit came first."""


def redact_secrets(text: str) -> str:
    """A text in which no token stands, and no password or signature of an address."""
    token = get_token()
    if token:
        text = text.replace(token, "hf_***")
    return redact_urls(re.sub(r"hf_\w+", "hf_***", text))


@contextmanager
def translate_errors(
    repo_id: str, revision: str, not_found: type[HubRefused] = HubUnsupported
) -> Iterator[None]:
    """Turn whatever the client raises into a HubError of the right kind.

    `not_found` is what 404 means here from a server that does not send X-Error-Code.
    """
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in OF_THIS_DISK:
            raise
        told = _kind_of(error, repo_id, revision, not_found)
        told.about_card = _is_about_card(error)
        raise told from error


def _kind_of(
    error: BaseException, repo_id: str, revision: str, not_found: type[HubRefused]
) -> HubError:
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:  # uploads come wrapped in RuntimeError
        chain.append(cause)
        cause = cause.__cause__
    for found in chain:
        if isinstance(found, LocalTokenNotFoundError):
            return HubRefused(
                f"hub.repo_id={repo_id} needs a token, and there is none. {REMEDY}", "no token"
            )
        if isinstance(found, HFValidationError):
            return HubRefused(f"{repo_id} is not a name that the Hub allows: {_short(found)}.")
        if isinstance(found, OfflineModeIsEnabled):
            return HubUnreachable("the Hub may not be asked: HF_HUB_OFFLINE is set", "offline")
        if isinstance(found, HfHubHTTPError) and found.response is not None:
            return _kind_of_answer(found, repo_id, revision, not_found)
    for found in chain:
        if isinstance(found, httpx2.TimeoutException):
            return HubUnreachable("the Hub did not answer in time", "no answer in time")
        if isinstance(found, httpx2.TransportError | ConnectionError):
            return HubUnreachable(f"the Hub cannot be reached ({_short(found)})")
    last = chain[-1]
    said = f"{type(last).__name__}: {_short(last)}"
    if isinstance(last, json.JSONDecodeError):
        return HubUnreachable(
            "what answers is no Hub: it sends something else where JSON is due (a proxy's page, or "
            "a wrong HF_ENDPOINT)",
            "no Hub",
        )
    if isinstance(last, (*CLIENT_GAVE_UP, FileMetadataError)):
        return HubRefused(
            f"the Hub client (huggingface_hub) cannot work with this server ({said}). What it "
            "needs of one: docs/hub.md.",
            "client gave up",
        )
    return HubUnreachable(f"the Hub client failed: {said}", type(last).__name__)


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


def _kind_of_answer(
    error: HfHubHTTPError, repo_id: str, revision: str, not_found: type[HubRefused]
) -> HubError:
    status = error.response.status_code
    short, answer = f"HTTP {status}", _answer(status, error.server_message)
    if status == 412:
        return HubConflict(f"{repo_id} has moved on (HTTP 412)", "moved on")
    if status == 404 and "X-Error-Code" not in error.response.headers:
        is_repo, is_revision = not_found is HubMissing, not_found is HubNoRevision
    else:
        is_repo = isinstance(error, RepositoryNotFoundError)
        is_revision = isinstance(error, RevisionNotFoundError)
    if is_revision:
        gone = COMMIT_ID.fullmatch(revision) is not None
        why = "what was before a squash is gone" if gone else "no branch and no tag is called so"
        return HubNoRevision(
            f"{repo_id} has no revision {revision}: {why}. What there is: "
            f"`python -m snapshot list {repo_id}`.",
            short,
        )
    if is_repo:
        return HubMissing(
            f"there is no repo {repo_id}, or the token may not see it ({short}). Check the name. "
            f"{REMEDY}",
            short,
        )
    if status == 401:
        return HubRefused(f"the Hub does not accept the token ({answer}). {REMEDY}", short)
    if status in (402, 403):
        return HubRefused(
            f"the Hub refuses ({answer}). Check the token's rights on {repo_id}, and the storage "
            "that is left.",
            short,
        )
    if status in (404, 405, 501):
        return HubUnsupported(
            f"the Hub does not know what it was asked for ({answer}). Check hub.repo_id and "
            "HF_ENDPOINT.",
            short,
        )
    if status < 500 and status not in MAY_PASS:
        return HubRefused(f"the Hub does not take what it was sent ({answer}).", short)
    return HubUnreachable(f"the Hub answers {answer}", short, _retry_after(error))


def _answer(status: int, said: str | None) -> str:
    """`HTTP 403: quota exceeded`; the number alone where the server says nothing more."""
    words, number = _short(said or ""), f"HTTP {status}"
    return number if words in ("", number) else f"{number}: {words}"


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
    """The first line of what somebody says; of XML and HTML what it is about."""
    said = str(text).strip()
    if said.startswith("<"):  # object storage: the rest holds keys, signatures and host names
        said = ": ".join(re.findall(r"<(?:Code|Message|title)>([^<]*)</", said, re.IGNORECASE))
    lines = redact_secrets(said).strip().splitlines()
    return printable(lines[0][:200].rstrip(".")) if lines else ""
