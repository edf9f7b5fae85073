"""A text on its way to tokens: parts of documents, chunks of a bounded size, batches of chunks.

Chunks depend on the text alone, not on how its documents are divided into parts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

CHUNK_CHARACTERS = 1 << 15
"""A longer document is cut, so that several cores encode it in bounded memory."""
CHARACTERS_AT_ONCE = 32 * CHUNK_CHARACTERS
"""Enough for many cores."""
CHUNKS_AT_ONCE = 4096
"""Each takes memory of its own when it is encoded, even a short one."""
NEVER = sys.maxsize
"""The first held-out character of a text that has none."""
Part = tuple[str, bool]
"""A document, or a part of a long one, and whether it ends there: what all sources yield."""


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


def chunks_of(parts: Iterable[Part], cut: int = NEVER) -> Iterator[Chunk]:
    """The chunks of a text, in order. Character `cut` is the first held-out one.

    A chunk ends where a document ends, and at `cut`; within a document where `plain_end` says.
    """
    text, begin = "", 0  # what is not yet a chunk, and how many characters are before it
    for part, ends_document in parts:
        text += part
        end = len(text)
        stops = {cut - begin: False} if 0 < cut - begin <= end else {}
        if ends_document:
            stops[end] = True
        start = 0
        for stop in sorted({*stops, end}):
            while stop - start > CHUNK_CHARACTERS:
                middle = plain_end(text, start)
                yield Chunk(text[start:middle], False, begin + start >= cut)
                start = middle
            if stop in stops and start < stop:
                yield Chunk(text[start:stop], stops[stop], begin + start >= cut)
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


def batches_of(parts: Iterable[Part], cut: int = NEVER) -> Iterator[list[Chunk]]:
    """The chunks of a text, many at once: all of a batch are held out, or none."""
    batch: list[Chunk] = []
    length = 0
    for chunk in chunks_of(parts, cut):
        is_full = len(batch) == CHUNKS_AT_ONCE or length >= CHARACTERS_AT_ONCE
        if batch and (is_full or chunk.held_out != batch[0].held_out):
            yield batch
            batch, length = [], 0
        batch.append(chunk)
        length += len(chunk.text)
    if batch:
        yield batch
