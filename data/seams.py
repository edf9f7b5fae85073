"""Places where a long document can be cut, and the tokens of a text that continues another one.

A place is a *seam* if the tokens of both sides are those of the whole. Whether it is one is tried,
with the tokenizer, on the characters around it. A tokenizer of SentencePiece puts a space before
whatever it is given, so a text is encoded after some other text, whose tokens are then dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from tokenizers import Encoding

from data import pieces

AROUND = 64
"""Characters on each side that are tried."""
TRIED = 8
"""Line ends, spaces, and then characters that are tried."""
NEUTRAL = "\n"
"""A text with which few tokenizers join what follows."""


class Seams:
    """Finds the end of a chunk for one tokenizer."""

    around = AROUND

    def __init__(self, encode: Callable[[str], Encoding]) -> None:
        self._encode = encode
        self.own = lru_cache(maxsize=1024)(self._ids)
        """The tokens of a text by itself."""

    def __call__(self, text: str, start: int) -> tuple[int, str]:
        """Where a chunk from `start` ends, and the text after which the next one is encoded.

        The last character before it, or a newline, keeps a tokenizer of SentencePiece from putting
        a space there. If no place has the tokens of the whole, the chunk ends at a line or a word.
        """
        for place in _places(text, start):
            before = self._before(text[max(start, place - AROUND) : place], text[place:][:AROUND])
            if before is not None:
                return place, before
        place = pieces.plain_end(text, start)[0]
        return place, self._any_before(text[place - 1], text[place:][:AROUND])

    def _before(self, left: str, right: str) -> str | None:
        """What `right` is encoded after, so that its tokens are those in both; None if nothing."""
        own, both = self._ids(left), self._ids(left + right)
        if both[: len(own)] != own:
            return None
        for before in (left[-1], NEUTRAL, ""):
            if self._ids(before + right) == [*self.own(before), *both[len(own) :]]:
                return before
        return None

    def _any_before(self, last: str, right: str) -> str:
        for before in (last, NEUTRAL):
            own = self.own(before)
            if self._ids(before + right)[: len(own)] == own:
                return before
        return ""

    def _ids(self, text: str) -> list[int]:
        return self._encode(text).ids


def _places(text: str, start: int) -> Iterator[int]:
    """The places that are tried: ends of lines, of words, and any.

    Not within white space, which most tokenizers join.
    """
    most = start + pieces.CHUNK_CHARACTERS
    lines = _found(text, "\n", start, most, 1)
    words = _found(text, " ", start + 1, most, 0)
    apart = (i for i in lines if not text[i - 2].isspace() and not text[i].isspace())
    yield from islice(apart, TRIED)
    yield from islice((place for place in words if not text[place - 1].isspace()), TRIED)
    yield from range(most, max(start, most - TRIED), -1)


def _found(text: str, wanted: str, begin: int, end: int, after: int) -> Iterator[int]:
    while (place := text.rfind(wanted, begin, end)) >= 0:
        yield place + after
        end = place


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
