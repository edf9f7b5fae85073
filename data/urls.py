"""URLs, which may hold secrets, and what servers answer."""

from __future__ import annotations

import re

SCHEME = r"(\b[a-z][a-z0-9+.-]*://"
USER = re.compile(rf"{SCHEME})[^\s/?#]*@", re.IGNORECASE)
"""`user:password@` before the host."""
QUERY = re.compile(rf"{SCHEME}[^\s?#]*[?#])\S*?(?=[.,;:)\]}}'\"]*(?:\s|$))", re.IGNORECASE)
"""What follows `?` or `#`, without the punctuation of a sentence around the URL."""


def is_transient(status: int) -> bool:
    """Whether an HTTP status is that of a failure that passes, such as a rate limit."""
    return status in (408, 425, 429) or status >= 500


def redact_urls(text: str) -> str:
    """`text` with the secrets of its URLs removed: `user:password@`, and all after a `?` or `#`.

    These parts can hold passwords, tokens and signatures, which must not be stored, shown or
    uploaded. The removed query is shown as `?***`.
    """
    return QUERY.sub(r"\1***", USER.sub(r"\1", text))
