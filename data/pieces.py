"""Pieces, in which all sources yield their text, and chunks, in which a tokenizer encodes it.

The chunks depend on the text alone, not on how it is divided into pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypedDict

PIECE_CHARACTERS = 1 << 20
CHUNK_CHARACTERS = 1 << 15
"""A longer document is cut, so that several cores encode it in bounded memory."""
BATCH_CHARACTERS = 1 << 20
CHUNKS_OF_A_CORE = 2
MOST_CHUNKS = 4096
"""Most chunks in a batch. Each takes memory of its own, even a short one."""


class Piece(TypedDict):
    """A piece of the text, in order."""

    text: str
    ends: list[int]
    """The offsets in it, in characters, at which documents end."""


def with_final_newline(document: str) -> str:
    """The document, with a newline added if it does not end with one."""
    return document if document.endswith("\n") else document + "\n"


def utf8_bytes(text: str) -> int:
    """The size of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def pieces_of(documents: Iterable[str]) -> Iterator[Piece]:
    """Join documents into pieces."""
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


class SplitPiece(NamedTuple):
    """A piece, or what of it is before or after the first held-out character."""

    text: str
    ends: list[int]
    held_out: bool
    ends_training: bool
    """Whether the held-out text begins after it."""


def split_pieces(pieces: Iterable[Piece], cut: int) -> Iterator[SplitPiece]:
    """The pieces, of which the one with `cut`, the first held-out character, is divided there."""
    left = cut
    for piece in pieces:
        text, ends = piece["text"], piece["ends"]
        sides = [(text, ends)]
        if 0 < left < len(text):
            late = [end - left for end in ends if end > left]
            sides = [(text[:left], ends[: len(ends) - len(late)]), (text[left:], late)]
        for side, side_ends in sides:
            yield SplitPiece(side, side_ends, left <= 0, 0 < left == len(side))
            left -= len(side)


class Chunk(NamedTuple):
    """A document, or a part of one."""

    text: str
    ends_document: bool
    held_out: bool


def chunks_of(pieces: Iterable[Piece], cut: int) -> Iterator[Chunk]:
    """The chunks of a text, in order. Character `cut` is the first held-out one.

    A chunk ends where a document ends, and at `cut`; within a document where `plain_end` says.
    """
    rest, held_out = "", False
    for text, held_out, edge, ends_document in _segments(pieces, cut):
        rest += text
        start = 0
        while len(rest) - start > CHUNK_CHARACTERS:
            stop = plain_end(rest, start)
            yield Chunk(rest[start:stop], False, held_out)
            start = stop
        rest = rest[start:]
        if edge and rest:
            yield Chunk(rest, ends_document, held_out)
            rest = ""
    if rest:
        yield Chunk(rest, False, held_out)


def _segments(pieces: Iterable[Piece], cut: int) -> Iterator[tuple[str, bool, bool, bool]]:
    """The text, divided where a piece or a document ends and at `cut`.

    Each with whether it is held out, whether a chunk ends there, and whether a document does.
    """
    for part in split_pieces(pieces, cut):
        text, ends = part.text, set(part.ends)
        edges = ends | ({len(text)} if part.ends_training else set())
        start = 0
        for stop in sorted({*edges, len(text)}):
            yield text[start:stop], part.held_out, stop in edges, stop in ends
            start = stop


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


def batches_of(chunks: Iterable[Chunk], cores: int) -> Iterator[list[Chunk]]:
    """Consecutive chunks, all held out or none, to be encoded at once by this many cores."""
    most = max(BATCH_CHARACTERS, cores * CHUNKS_OF_A_CORE * CHUNK_CHARACTERS)
    batch: list[Chunk] = []
    characters = 0
    for chunk in chunks:
        if batch and (
            characters + len(chunk.text) > most
            or len(batch) == MOST_CHUNKS
            or chunk.held_out != batch[0].held_out
        ):
            yield batch
            batch, characters = [], 0
        batch.append(chunk)
        characters += len(chunk.text)
    if batch:
        yield batch
