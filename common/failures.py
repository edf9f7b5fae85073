"""What the error of a client means: whether it may pass, why it came, and when to try again.

One table for huggingface_hub, httpx2, hf_xet and the file systems of fsspec, which raise many
unrelated types. The sentences are those of the rooms: data/reading/waiting.py, store/errors.py.
"""

from __future__ import annotations

import errno
import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2
from huggingface_hub import get_token
from huggingface_hub.errors import (
    FileMetadataError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import parse_ratelimit_headers

from common.printable import printable, redact_urls

TRANSIENT_STATUSES = (408, 409, 425, 429)
"""Below 500; above, only 501 lasts: the server lacks what is asked for."""
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
NO_ANSWER = "no answer in time"
LASTING_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOSYS)
HIDDEN_DELAY = "hidden_retry_after"
"""The extension of a response with a delay that common/hub_client.py hides from the Hub client."""


class Failure(Exception):
    """A request failed. The message says why, without secrets and control characters."""

    may_pass = False
    """Whether the same request may succeed later."""

    def __init__(
        self,
        message: str,
        short: str = "refused",
        retry_after: float | None = None,
        timed_out: bool = False,
    ) -> None:
        super().__init__(printable(message))
        self.short, self.retry_after, self.timed_out = short, retry_after, timed_out
        """One or two words for a progress line; the seconds that the server asks to wait, if any;
        whether no answer came in time."""
        self.status: int | None = None
        """The HTTP status, if a server answered with an error."""
        self.cause: BaseException = self
        """The error of a client that says why, in the chain of causes."""


class Unanswered(Failure):
    """A failure that may pass."""

    may_pass = True


class Refused(Failure):
    """A failure that lasts until somebody changes something."""


def failure_of(error: BaseException) -> Failure:
    """What an error of any client means. What is not known may pass."""
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, Failure):
            return cause
        response = getattr(cause, "response", None)
        status = getattr(response, "status_code", None)
        if xet := XET_STATUS.search(str(cause)):
            status = int(xet[1])
        if isinstance(status, int):
            failure = _of_status(status, cause, response)
            break
    else:
        cause = next((one for one in causes if not isinstance(one, WRAPPERS)), causes[-1])
        failure = _of_cause(cause)
    failure.cause = cause
    return failure


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        yield cause
        cause = cause.__cause__


def _of_status(status: int, cause: BaseException, response: Any) -> Failure:
    short, said = f"HTTP {status}", short_text(getattr(cause, "server_message", None) or "")
    reason = short if said in ("", short) else f"{short}: {said}"
    may_pass = status in TRANSIENT_STATUSES or (status >= 500 and status != 501)
    may_pass = may_pass or (response is None and status == 401)  # Xet's next token may do
    delay = None if response is None else delay_of(response)
    failure = (Unanswered if may_pass else Refused)(reason, short, delay)
    failure.status = status
    return failure


def _of_cause(cause: BaseException) -> Failure:
    name = type(cause).__name__
    if isinstance(cause, httpx2.TimeoutException | TimeoutError):
        return Unanswered(NO_ANSWER, NO_ANSWER, timed_out=True)
    if isinstance(cause, json.JSONDecodeError | UnicodeDecodeError):
        return Unanswered("the answer is not JSON, but a proxy's page, for example", "not JSON")
    lasts = isinstance(cause, LASTING) or getattr(cause, "errno", None) in LASTING_ERRNOS
    return (Refused if lasts else Unanswered)(short_text(cause) or name, name)


def delay_of(response: Any) -> float | None:
    """The delay that a response asks for, in seconds; None if it asks for none."""
    hidden = getattr(response, "extensions", {}).get(HIDDEN_DELAY)
    return retry_after(response.headers) if hidden is None else float(hidden)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """The delay of the Hub's own header or of Retry-After, which is a number or a date."""
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    value = headers.get("Retry-After", "")
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return None


def short_text(text: object) -> str:
    """The first line of a message, without secrets; of XML and HTML the code, message and title."""
    message = str(text).strip()
    if message.startswith("<"):  # object storage: the rest holds keys, signatures and host names
        parts = re.findall(r"<(?:Code|Message|title)>([^<]*)</", message, re.IGNORECASE)
        message = ": ".join(parts)
    lines = redact_secrets(message).strip().splitlines()
    return printable(lines[0][:200].rstrip(".")) if lines else ""


def redact_secrets(text: str) -> str:
    """A text without tokens, and without passwords and signatures in URLs."""
    token = None
    with suppress(OSError):  # its file cannot be read, which is reported elsewhere
        token = get_token()
    if token:
        text = text.replace(token, "hf_***")
    return redact_urls(re.sub(r"hf_\w+", "hf_***", text))
