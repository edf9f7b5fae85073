"""The form in which every source gives its text."""

from __future__ import annotations

from typing import TypedDict


class Piece(TypedDict):
    """A piece of the text, in order."""

    text: str
    ends: list[int]
    """The offsets in it, in characters, at which a document ends."""


def ended(document: str) -> str:
    """A document with the newline that ends it."""
    return document if document.endswith("\n") else document + "\n"
