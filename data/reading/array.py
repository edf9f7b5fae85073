"""Parses a JSON array element by element, in bounded memory."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from json.decoder import WHITESPACE  # type: ignore[attr-defined]
from typing import IO, Any

from data.reading.table import check_length

PIECE_BYTES = 1 << 20
CUT_TOKEN = 64
"""A parse error this close to the end of a piece may be caused by the cut."""


def elements_of(content: IO[bytes]) -> Iterator[tuple[Any, str]]:
    """The elements of the array that a file consists of, each with its JSON.

    Raises ValueError for what is no JSON, and as reading does.
    """
    text = _Text(content)
    text.take("[")
    first = True
    while text.next_character() != "]":
        if not first:
            text.take(",")
            text.next_character()
        first = False
        yield text.value()
    text.take("]")
    if text.next_character():
        raise ValueError("more data follows the end of its array")


class _Text:
    """The part of a text that has been read and not yet parsed."""

    def __init__(self, content: IO[bytes]) -> None:
        self._content = content
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self._json = json.JSONDecoder()
        self._text, self._at = "", 0
        self._ended = False

    def next_character(self) -> str:
        """Skip whitespace and return the next character; empty at the end."""
        while True:
            self._at = WHITESPACE.match(self._text, self._at).end()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._read()

    def take(self, character: str) -> None:
        if self.next_character() != character:
            raise ValueError(
                f"its array is cut off or not JSON: {character} expected, but "
                f"{self._text[self._at : self._at + 40]!r}"
            )
        self._at += 1

    def value(self) -> tuple[Any, str]:
        """Parse the next value; returns it and its JSON."""
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except RecursionError as error:
                raise ValueError("an element is nested too deeply") from error
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated")
                is_cut |= error.pos > len(self._text) - CUT_TOKEN
                if self._ended or not is_cut:
                    raise ValueError(f"an element is not JSON ({error.msg})") from error
            else:
                if end < len(self._text) or self._ended:  # a number may continue
                    start, self._at = self._at, end
                    return value, self._text[start:end]
            self._read()

    def _read(self) -> None:
        """Read a piece as long as what is left, so that a long value is parsed only a few times."""
        left = self._text[self._at :]
        check_length(len(left))
        piece = self._content.read(max(PIECE_BYTES, len(left)))
        self._ended = not piece
        self._text, self._at = left + self._decoder.decode(piece, final=self._ended), 0
