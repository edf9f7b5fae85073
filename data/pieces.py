"""Pieces, in which all sources yield their text, and rows, in which it is encoded.

The rows depend on the text alone, not on how it is divided into pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypedDict

PIECE_CHARACTERS = 1 << 20
CHUNK_CHARACTERS = 1 << 15
"""A longer document is cut, so that several cores encode it in bounded memory."""
ROWS_AT_ONCE = 32
"""About a million characters: enough for many cores."""
DOCUMENTS_OF_A_ROW = 128
"""Each takes memory of its own when it is encoded, even a short one."""


class Piece(TypedDict):
    """A piece of the text, in order."""

    text: str
    ends: list[int]
    """The offsets in it, in characters, at which documents end."""


class Row(Piece):
    """Documents, or a part of a long one, of about `CHUNK_CHARACTERS`: all held out, or none."""

    held_out: bool


class Chunk(NamedTuple):
    """A document, or a part of one."""

    text: str
    ends_document: bool
    held_out: bool


def with_final_newline(document: str) -> str:
    """The document, with a newline added if it does not end with one."""
    return document if document.endswith("\n") else document + "\n"


def utf8_bytes(text: str) -> int:
    """The size of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def pieces_of(documents: Iterable[str], characters: int = PIECE_CHARACTERS) -> Iterator[Piece]:
    """Join documents into pieces of at least so many characters."""
    parts: list[str] = []
    ends: list[int] = []
    length = 0
    for document in documents:
        parts.append(document)
        length += len(document)
        ends.append(length)
        if length >= characters:
            yield {"text": "".join(parts), "ends": ends}
            parts, ends, length = [], [], 0
    if parts:
        yield {"text": "".join(parts), "ends": ends}


def chunks_of(pieces: Iterable[Piece], cut: int) -> Iterator[Chunk]:
    """The chunks of a text, in order. Character `cut` is the first held-out one.

    A chunk ends where a document ends, and at `cut`; within a document where `plain_end` says.
    """
    text, begin = "", 0  # what is not yet a chunk, and how many characters are before it
    for piece in pieces:
        ends = {len(text) + end: True for end in piece["ends"]}
        text += piece["text"]
        if 0 < cut - begin <= len(text):
            ends.setdefault(cut - begin, False)
        start = 0
        for stop in sorted({*ends, len(text)}):
            while stop - start > CHUNK_CHARACTERS:
                middle = plain_end(text, start)
                yield Chunk(text[start:middle], False, begin + start >= cut)
                start = middle
            if stop in ends and start < stop:
                yield Chunk(text[start:stop], ends[stop], begin + start >= cut)
                start = stop
        text, begin = text[start:], begin + start
    if text:
        yield Chunk(text, False, begin >= cut)


def plain_end(text: str, start: int) -> int:
    """Where a chunk from `start` ends, with more than `CHUNK_CHARACTERS` left.

    After a line end, or else before a space, with no white space next to it: tokenizers of words
    join white space, and a space with its word. Without such a place, anywhere.
    """
    most = start + CHUNK_CHARACTERS
    for wanted, after in (("\n", 1), (" ", 0)):
        place = text.rfind(wanted, start + 1, most)
        while place > 0:
            if not text[place - 1].isspace() and not text[place + 1].isspace():
                return place + after
            place = text.rfind(wanted, start + 1, place)
    return most


def rows_of(chunks: Iterable[Chunk]) -> Iterator[Row]:
    """Consecutive chunks as rows: several short documents in one, a long part by itself."""
    texts: list[str] = []
    ends: list[int] = []
    length, held_out = 0, False
    for chunk in chunks:
        is_full = len(texts) == DOCUMENTS_OF_A_ROW or length + len(chunk.text) > CHUNK_CHARACTERS
        if texts and (is_full or chunk.held_out != held_out):
            yield {"text": "".join(texts), "ends": ends, "held_out": held_out}
            texts, ends, length = [], [], 0
        texts.append(chunk.text)
        length += len(chunk.text)
        held_out = chunk.held_out
        if chunk.ends_document:
            ends.append(length)
    if texts:
        yield {"text": "".join(texts), "ends": ends, "held_out": held_out}
