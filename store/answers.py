"""What an answer of the Hub says, as it may be shown: one line, without tokens."""

from __future__ import annotations

import re
from contextlib import suppress

import httpx2
from huggingface_hub import get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import parse_ratelimit_headers

from data.printable import printable, redact_urls

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
