"""What the error of a client means: whether it may pass, why it came, and when to try again.

One table for huggingface_hub, httpx2, hf_xet and the file systems of fsspec, which raise many
unrelated types. The sentences are those of the rooms: data/reading/access.py, store/errors.py.
"""

from __future__ import annotations

import errno
import json
import re
from contextlib import suppress
from typing import Any

import httpx2
from huggingface_hub import get_token
from huggingface_hub.errors import (
    FileMetadataError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    OIDCError,
)
from huggingface_hub.utils import parse_ratelimit_headers

from common.printable import printable, redact_urls

TRANSIENT_STATUSES = (408, 409, 425, 429)
"""Below 500; above, only 501 lasts: the server lacks what is requested."""
XET_STATUS = re.compile(r"HTTP status \w+ error \((\d{3})")
"""In the errors of hf_xet, which are of built-in types."""
WRAPPERS = (RuntimeError, LocalEntryNotFoundError)
"""What the Hub client raises from the error that says why."""
LASTING = (
    *(ImportError, ValueError, LookupError, TypeError, AttributeError, NotImplementedError),
    *(FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError),
    *(httpx2.InvalidURL, httpx2.TooManyRedirects, httpx2.DecodingError),
    *(FileMetadataError, LocalTokenNotFoundError, OfflineModeIsEnabled),
)
"""Raised before a request, or for an answer that is not what the client knows."""
LASTING_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOSYS)
NO_CREDENTIALS = re.compile("Credential|ClientAuthentication|ProfileNotFound|TokenRetrieval")
"""In the names of errors of the libraries for S3, GCS and Azure, which need not be installed."""
NO_ANSWER = "no answer in time"


class Failure(Exception):
    """A request failed. The message says why, without secrets and control characters."""

    may_pass = False
    """Whether the same request may succeed later."""

    def __init__(
        self,
        message: str,
        short: str = "refused",
        retry_after: float | None = None,
        status: int | None = None,
        cause: BaseException | None = None,
    ) -> None:
        """`short`: one or two words for a progress line. `retry_after`: the seconds that the server
        asks to wait. `status`: of HTTP, if there was an answer. `cause`: the error of a client that
        says why.
        """
        super().__init__(printable(message))
        self.short, self.retry_after = short, retry_after
        self.status, self.cause = status, cause or self


class Unanswered(Failure):
    """A failure that may pass."""

    may_pass = True


class Refused(Failure):
    """A failure that lasts until somebody changes something."""


def failure_of(error: BaseException) -> Failure:
    """What an error of any client means. What is not known may pass."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    for cause in causes:
        if isinstance(cause, Failure):
            return cause
        if failure := _of_answer(cause):
            return failure
    return _of_type(next((one for one in causes if not isinstance(one, WRAPPERS)), causes[-1]))


def _of_answer(cause: BaseException) -> Failure | None:
    """The failure that a server's answer is; None if there was no answer."""
    response = getattr(cause, "response", None)
    status = getattr(response, "status_code", None)
    if match := XET_STATUS.search(str(cause)):
        status = int(match[1])
    if not isinstance(status, int):
        return None
    short, said = f"HTTP {status}", short_text(getattr(cause, "server_message", None) or "")
    reason = short if said in ("", short) else f"{short}: {said}"
    may_pass = status in TRANSIENT_STATUSES or (status >= 500 and status != 501)
    may_pass = may_pass or (response is None and status == 401)  # Xet has a new token then
    delay = None if response is None else retry_after(response)
    return (Unanswered if may_pass else Refused)(reason, short, delay, status=status, cause=cause)


def _of_type(cause: BaseException) -> Failure:
    name = type(cause).__name__
    if isinstance(cause, httpx2.TimeoutException | TimeoutError):
        return Unanswered(NO_ANSWER, NO_ANSWER, cause=cause)
    if isinstance(cause, json.JSONDecodeError | UnicodeDecodeError):
        reason = "the answer is not JSON, but a proxy's page, for example"
        return Unanswered(reason, "not JSON", cause=cause)
    lasts = isinstance(cause, LASTING) or getattr(cause, "errno", None) in LASTING_ERRNOS
    lasts = lasts or NO_CREDENTIALS.search(name) is not None
    return (Refused if lasts else Unanswered)(short_text(cause) or name, name, cause=cause)


def retry_after(response: Any) -> float | None:
    """The seconds that a response asks to wait, by the Hub's own header or by Retry-After."""
    limit = parse_ratelimit_headers(response.headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    value = response.headers.get("Retry-After", "").strip()
    return float(value) if value.isdecimal() else None


def short_text(text: object) -> str:
    """The first line of a message, without secrets; of XML and HTML the code, message and title."""
    message = str(text).strip()
    if message.startswith("<"):  # object storage: the rest holds keys, signatures and host names
        parts = re.findall(r"<(?:Code|Message|title)>([^<]*)</", message, re.IGNORECASE)
        message = ": ".join(parts)
    lines = redact_secrets(message).strip().splitlines()
    return printable(lines[0][:200].rstrip(".")) if lines else ""


def redact_secrets(text: str) -> str:
    """A text without tokens of the Hub, and without passwords and signatures in URLs."""
    token = None
    with suppress(OSError, ValueError, OIDCError):  # no token can be read: a request says why
        token = get_token()
    if token:  # which may have any form
        text = text.replace(token, "hf_***")
    return redact_urls(re.sub(r"hf_\w+", "hf_***", text))
