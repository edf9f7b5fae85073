"""Text made fit to show: errors in a line, no control characters, URLs without secrets."""

from __future__ import annotations

import re
import unicodedata

UNSAFE = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories: control characters, lone surrogates, line and paragraph separators."""
REORDERING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Bidirectional control characters, which reorder the text after them."""
SCHEME = r"(\b[a-z][a-z0-9+.-]*://"
USER = re.compile(rf"{SCHEME})[^\s/?#]*@", re.IGNORECASE)
"""`user:password@` before the host."""
QUERY = re.compile(rf"{SCHEME}[^\s?#]*[?#])\S*?(?=[.,;:)\]}}'\"]*(?:\s|$))", re.IGNORECASE)
"""What follows `?` or `#`, without the punctuation of a sentence around the URL."""


def printable(text: str, multiline: bool = False) -> str:
    r"""`text` with control characters, which a terminal may execute, as escapes such as `\x1b`.

    With `multiline`, newlines and tabs are unchanged.
    """
    allowed = "\n\t" if multiline else ""
    return "".join(
        char if char in allowed or not _is_unsafe(char) else char.encode("unicode_escape").decode()
        for char in text
    )


def shown(text: str) -> str:
    """Text that is safe to print: control characters escaped, URLs without their secrets."""
    return printable(redact_urls(text), multiline=True)


def shortened(text: str) -> str:
    """A value for an error, cut if it is long."""
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"


def _is_unsafe(char: str) -> bool:
    return char in REORDERING or unicodedata.category(char) in UNSAFE


def reason_of(error: BaseException) -> str:
    """The first line of an error without a full stop; of one without a message its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def redact_urls(text: str) -> str:
    """`text` with the secrets of its URLs removed: `user:password@`, and all after a `?` or `#`.

    These parts can hold passwords, tokens and signatures, which must not be stored, shown or
    uploaded. The removed query is shown as `?***`.
    """
    return QUERY.sub(r"\1***", USER.sub(r"\1", text))
