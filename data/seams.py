"""The tokens of a text that continues another one.

A tokenizer of SentencePiece puts a space before whatever it is given, so a text is encoded after
some other text, whose tokens are then dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tokenizers import Encoding

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
