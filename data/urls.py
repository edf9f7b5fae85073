"""Addresses of texts, which may hold secrets."""

from __future__ import annotations

import re

START = r"(\b[a-z][a-z0-9+.-]*://"
USER = re.compile(rf"{START})[^\s/?#]*@", re.IGNORECASE)
"""`user:password@`."""
QUERY = re.compile(rf"{START}[^\s?#]*[?#])\S*?(?=[.,;:)\]}}'\"]*(?:\s|$))", re.IGNORECASE)
"""What follows `?` or `#`; not the punctuation of a sentence around the address."""


def redact_urls(text: str) -> str:
    """`text` without `user:password@` in its addresses, and with `?***` for all behind a `?`.

    Passwords, tokens and signatures stand there: they must not be stored, shown or uploaded.
    """
    return QUERY.sub(r"\1***", USER.sub(r"\1", text))
