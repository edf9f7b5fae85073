"""The form in which every source gives its text."""

from __future__ import annotations

from datasets import Features, List, Value

PIECE_FEATURES = Features({"text": Value("large_string"), "ends": List(Value("int64"))})
"""A piece of text and the offsets in it, in characters, at which a document ends."""


def ended(document: str) -> str:
    """A document with the newline that ends it."""
    return document if document.endswith("\n") else document + "\n"
