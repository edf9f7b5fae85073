"""Pieces of text, the common format of all sources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypedDict

PIECE_CHARACTERS = 1 << 20


class Piece(TypedDict):
    """A piece of the text, in order."""

    text: str
    ends: list[int]
    """The offsets in it, in characters, at which documents end."""


def with_final_newline(document: str) -> str:
    """A document that ends with a newline; one is added if needed."""
    return document if document.endswith("\n") else document + "\n"


def utf8_bytes(text: str) -> int:
    """How many bytes a text has in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def pieces_of(documents: Iterable[str]) -> Iterator[Piece]:
    """Documents, joined into pieces."""
    parts: list[str] = []
    ends: list[int] = []
    length = 0
    for document in documents:
        parts.append(document)
        length += len(document)
        ends.append(length)
        if length >= PIECE_CHARACTERS:
            yield {"text": "".join(parts), "ends": ends}
            parts, ends, length = [], [], 0
    if parts:
        yield {"text": "".join(parts), "ends": ends}
