"""Untrusted text, made safe to print."""

from __future__ import annotations

import unicodedata

UNSAFE = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories: control characters, lone surrogates, line and paragraph separators."""
REORDERING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Bidirectional control characters, which reorder the text after them."""


def printable(text: str, multiline: bool = False) -> str:
    r"""`text` with control characters, which a terminal may execute, as escapes such as `\x1b`.

    With `multiline`, newlines and tabs are unchanged.
    """
    allowed = "\n\t" if multiline else ""
    return "".join(
        char if char in allowed or not _is_unsafe(char) else char.encode("unicode_escape").decode()
        for char in text
    )


def _is_unsafe(char: str) -> bool:
    return char in REORDERING or unicodedata.category(char) in UNSAFE
