"""Errors of the Hub, in a few kinds: the Hub client raises many unrelated types.

Every message is a sentence without tokens and without control characters.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx2
from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    BucketNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import parse_ratelimit_headers

from common.printable import printable, redact_urls

RETRY_AFTER = "hidden_retry_after"
"""The extension of a response that holds a delay which is hidden from the Hub client."""


def redact_secrets(text: str) -> str:
    """A text without tokens, and without passwords and signatures in URLs."""
    token = None
    with suppress(OSError):  # its file cannot be read, which is reported elsewhere
        token = get_token()
    if token:
        text = text.replace(token, "hf_***")
    return redact_urls(re.sub(r"hf_\w+", "hf_***", text))


def status_text(status: int, server_message: str | None) -> str:
    """`HTTP 403: quota exceeded`, or the number alone if the server sends no message."""
    message, number = short_text(server_message or ""), f"HTTP {status}"
    return number if message in ("", number) else f"{number}: {message}"


def requested_delay(error: HfHubHTTPError) -> float | None:
    hidden = error.response.extensions.get(RETRY_AFTER)
    return retry_after_seconds(error.response.headers) if hidden is None else float(hidden)


def retry_after_seconds(headers: httpx2.Headers) -> float | None:
    """The delay that a response requests, in seconds; None if it requests none."""
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    value = headers.get("Retry-After", "")
    return float(value) if value.isdigit() else None


def short_text(text: object) -> str:
    """The first line of a message; of XML and HTML, the code, message and title."""
    message = str(text).strip()
    if message.startswith("<"):  # object storage: the rest holds keys, signatures and host names
        parts = re.findall(r"<(?:Code|Message|title)>([^<]*)</", message, re.IGNORECASE)
        message = ": ".join(parts)
    lines = redact_secrets(message).strip().splitlines()
    return printable(lines[0][:200].rstrip(".")) if lines else ""


CARD_VALIDATION_PATH = "/api/validate-yaml"
DISK_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO),
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG),
)
"""Errors of the local disk, not of the Hub."""
REMEDY = "Log in with `hf auth login`, or set HF_TOKEN, with a token that may write."
COMMIT_ID = re.compile("[0-9a-f]{7,64}")
XET_STATUS = re.compile(r"HTTP status \w+ error \((\d{3})")
"""In the errors of hf_xet, which are of built-in types."""
XET_DISK_ERROR = re.compile(r"\(os error (\d+)\)")
CLIENT_ERRORS = (ValueError, LookupError, TypeError, AttributeError)
"""Raised by the Hub client before a request, or for a response in an unexpected format."""
NOT_A_FILE = (RepositoryNotFoundError, BucketNotFoundError, RevisionNotFoundError, GatedRepoError)
"""The errors of HTTP 404 that are about more than one file."""
TRANSIENT_STATUSES = (408, 409, 425, 429)
"""Statuses below 500 after which a retry may succeed."""


class StoreError(Exception):
    """A request to the Hub failed. The message is a sentence, without a token."""

    def __init__(self, message: str, short: str = "refused") -> None:
        super().__init__(printable(message))
        self.short = short
        """The error in one or two words, for the progress line."""

    @property
    def reason(self) -> str:
        """Why something optional could not be done, without a full stop."""
        return str(self).rstrip(".")

    about_card = False
    """Whether the Hub rejected README.md, or could not validate it."""


class StoreUnreachable(StoreError):
    """A transient failure: a retry may succeed."""

    def __init__(
        self, message: str, short: str = "not reachable", retry_after: float | None = None
    ) -> None:
        super().__init__(message, short)
        self.retry_after = retry_after
        """The delay that the Hub requests, in seconds; None if it requests none."""


class StoreSilent(StoreUnreachable):
    """The Hub has not answered in time."""

    def __init__(self) -> None:
        super().__init__("the Hub did not answer in time", "no answer in time")


class StoreOffline(StoreUnreachable):
    """This process must not use the Hub: HF_HUB_OFFLINE is set."""


class StoreRefused(StoreError):
    """A lasting failure, until somebody changes a token, a permission or a name."""


class StoreMissing(StoreRefused):
    """The repo does not exist, or the token may not see it."""


class NoRevision(StoreRefused):
    """The repo exists, but not the commit or branch."""


class NoFile(StoreRefused):
    """A file that a revision lists is not there: its snapshot was pruned, or its content lost."""


class Unsupported(StoreRefused):
    """The server does not support the request: it is an older one, or another implementation."""

    @property
    def reason(self) -> str:
        """Without the remedy for a server that cannot even do what is needed."""
        return f"the server does not support that ({self.short})"


class StoreMoved(StoreError):
    """Another commit came first."""


@contextmanager
def translate_errors(
    repo_id: str, revision: str, not_found: type[StoreRefused] = Unsupported
) -> Iterator[None]:
    """Turn any error of the Hub client into a StoreError of the right kind.

    `not_found` is the kind for a 404 from a server that does not send X-Error-Code.
    """
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            if error.filename == constants.HF_TOKEN_PATH:
                raise StoreRefused(
                    f"the file of the token, {error.filename}, cannot be read: {error.strerror}. "
                    "Set HF_TOKEN, or HF_HOME to a folder that can be used.",
                    "no token",
                ) from error
            raise
        if (found := XET_DISK_ERROR.search(str(error))) and int(found[1]) in DISK_ERRORS:
            raise OSError(int(found[1]), os.strerror(int(found[1]))) from error
        translated = translate(error, repo_id, revision, not_found)
        translated.about_card = _is_about_card(error)
        raise translated from error


def translate(
    error: BaseException, repo_id: str, revision: str, not_found: type[StoreRefused]
) -> StoreError:
    """The StoreError of the right kind for any error of the Hub client."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:  # errors of uploads are wrapped in RuntimeError
        chain.append(cause)
        cause = cause.__cause__
    for found in chain:
        if isinstance(found, LocalTokenNotFoundError):
            return StoreRefused(
                f"hub.repo_id={repo_id} needs a token, and there is none. {REMEDY}", "no token"
            )
        if isinstance(found, HFValidationError):
            return StoreRefused(
                f"{repo_id} is not a name that the Hub allows: {short_text(found)}."
            )
        if isinstance(found, OfflineModeIsEnabled):
            return StoreOffline("HF_HUB_OFFLINE is set, so the Hub is not used", "offline")
        if isinstance(found, HfHubHTTPError) and found.response is not None:
            return _translate_response(found, repo_id, revision, not_found)
    if status := XET_STATUS.search(str(chain[-1])):
        return _translate_xet(chain[-1], int(status[1]), repo_id, revision, not_found)
    for found in chain:
        if isinstance(found, httpx2.TimeoutException):
            return StoreSilent()
        if isinstance(found, httpx2.TransportError | ConnectionError):
            return StoreUnreachable(f"the Hub cannot be reached ({short_text(found)})")
    last = chain[-1]
    reason = f"{type(last).__name__}: {short_text(last)}"
    if isinstance(last, json.JSONDecodeError):
        return StoreUnreachable(
            "the server is not a Hub: its response is not JSON (a proxy's page, or a wrong "
            "HF_ENDPOINT)",
            "not a Hub",
        )
    if isinstance(last, (*CLIENT_ERRORS, FileMetadataError)):
        return StoreRefused(
            f"the Hub client (huggingface_hub) cannot work with this server ({reason}). What "
            "it needs of a server: docs/hub.md.",
            "client error",
        )
    return StoreUnreachable(f"the Hub client failed: {reason}", type(last).__name__)


def _is_about_card(error: Exception) -> bool:
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return error.response.url.path.endswith(CARD_VALIDATION_PATH)
    if isinstance(error, httpx2.TransportError):
        with suppress(RuntimeError):  # the error has no request
            return error.request.url.path.endswith(CARD_VALIDATION_PATH)
    # A server without that endpoint sends a page, which the client parses as JSON.
    return isinstance(error, json.JSONDecodeError) or (
        isinstance(error, ValueError) and "README.md" in str(error)
    )


def _translate_response(
    error: HfHubHTTPError, repo_id: str, revision: str, not_found: type[StoreRefused]
) -> StoreError:
    status = error.response.status_code
    short, answer = f"HTTP {status}", status_text(status, error.server_message)
    if status == 412:
        return StoreMoved(f"{repo_id} has moved on (HTTP 412)", "moved on")
    if status == 404 and "X-Error-Code" not in error.response.headers:
        is_repo, is_revision = not_found is StoreMissing, not_found is NoRevision
    else:
        is_repo = isinstance(error, RepositoryNotFoundError | BucketNotFoundError)
        is_revision = isinstance(error, RevisionNotFoundError)
    if is_revision:
        is_commit = COMMIT_ID.fullmatch(revision) is not None
        why = (
            "commits from before a squash no longer exist"
            if is_commit
            else "no branch and no tag has that name"
        )
        return NoRevision(
            f"{repo_id} has no revision {revision}: {why}. To list "
            f"what exists: `python -m snapshot list {repo_id}`.",
            short,
        )
    if status == 404 and not_found is NoFile and not isinstance(error, NOT_A_FILE):
        return lost_file(repo_id, revision, short)
    if isinstance(error, GatedRepoError):
        return StoreMissing(
            f"{repo_id} is gated ({short}): request access on its page of the Hub, then log in "
            "with `hf auth login`, or set HF_TOKEN, with a token of that account.",
            "gated",
        )
    if is_repo:
        return StoreMissing(
            f"there is no repo {repo_id}, or the token may not see it ({short}). Check the name. "
            f"{REMEDY}",
            short,
        )
    if status == 401:
        return StoreRefused(f"the Hub does not accept the token ({answer}). {REMEDY}", short)
    if status in (402, 403):
        return StoreRefused(
            f"the Hub refuses ({answer}). Check the token's permissions on {repo_id}, and the "
            "free storage.",
            short,
        )
    if status in (404, 405, 501):
        return Unsupported(
            f"the Hub does not support the request ({answer}). Check hub.repo_id and HF_ENDPOINT.",
            short,
        )
    if status < 500 and status not in TRANSIENT_STATUSES:
        return StoreRefused(f"the Hub rejects the request ({answer}).", short)
    return StoreUnreachable(f"the Hub answers {answer}", short, requested_delay(error))


def _translate_xet(
    error: BaseException, status: int, repo_id: str, revision: str, not_found: type[StoreRefused]
) -> StoreError:
    short = f"HTTP {status}"
    if "xet-write-token" in str(error) and status in (400, 404, 405, 410, 501):
        return StoreRefused(
            f"{redact_secrets(constants.ENDPOINT)} has no Xet storage for large files ({short}). "
            "Set HF_HUB_DISABLE_XET=1 in the environment.",
            "no Xet",
        )
    if status == 404 and not_found is NoFile:
        return lost_file(repo_id, revision, short)
    # A new transfer has a new token, so 401 may pass.
    if status < 500 and status not in (401, *TRANSIENT_STATUSES):
        return StoreRefused(
            f"the Hub's storage refuses ({short}). Check the token's permissions on {repo_id}, and "
            "the free storage.",
            short,
        )
    return StoreUnreachable(f"the Hub's storage answers {short}", short)


def lost_file(name: str, revision: str, short: str) -> NoFile:
    """The error for a file that a revision lists and the Hub does not have."""
    return NoFile(
        f"{name} lists a file at {revision[:8] or 'its head'} that is gone ({short}): that "
        f"snapshot was pruned, or its content is lost. To list what exists: `python -m snapshot "
        f"list {name}`.",
        short,
    )
