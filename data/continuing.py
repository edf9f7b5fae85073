"""The tokens of a text that continues another one.

A tokenizer of SentencePiece puts a space before whatever it is given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tokenizers import Encoding

from data.pieces import utf8_bytes

BYTE = re.compile("<0x[0-9A-F]{2}>")
SPACE = "\u2581"
"""How tokenizers of SentencePiece spell a space."""
NEUTRAL = "\n"
"""A text with which few tokenizers join what follows."""


class Tokens(NamedTuple):
    """The tokens of a text."""

    ids: list[int]
    offsets: list[tuple[int, int]]
    """The first character of each, and the one after its last."""


def tokens_after(
    encode: Callable[[str], Encoding], before: Iterable[str], text: str
) -> tuple[Tokens, str]:
    """The tokens of a text that follows one of some texts, and which.

    It is the first of `before` whose own tokens do not change, or else none.
    """
    for context in before:
        own, both = encode(context).ids, encode(context + text)
        if both.ids[: len(own)] == own:
            length = len(context)
            offsets = [(begin - length, end - length) for begin, end in both.offsets[len(own) :]]
            return Tokens(both.ids[len(own) :], offsets), context
    alone = encode(text)
    return Tokens(alone.ids, alone.offsets), ""


def first_token_bytes(text: str, encoding: Encoding) -> int:
    """Bytes of the first token of an encoded text, in UTF-8."""
    offsets = encoding.offsets
    if not offsets:
        return 0
    end = offsets[0][1]
    if len(offsets) == 1 or offsets[1][0] >= end:
        return utf8_bytes(text[:end])
    # A part of a character: a byte by its number, a character for each byte, or the added space.
    piece = encoding.tokens[0]
    return 1 if BYTE.fullmatch(piece) else len(piece.replace(SPACE, ""))
