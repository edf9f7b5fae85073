"""Text from token ids while they arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

NOT_A_CHARACTER = "\ufffd"
"""What a decoder writes for bytes that are not UTF-8, such as half of a character."""
MOST_WAITING = 64
"""Tokens that a stream holds back because they do not end with a whole character."""


def decode_stream(
    decode: Callable[[Sequence[int]], str], ids: Iterable[int], after: Sequence[int]
) -> Iterator[str]:
    """Yield the texts of ids, which follow `after`: joined, what decoding all at once gives.

    A token may be a part of a character, and some decoders drop the space before the first
    token: so what is new is what the text of the tokens before does not have.
    """
    before: list[int] = list(after)[-MOST_WAITING:]
    waiting: list[int] = []
    for token in ids:
        waiting.append(token)
        known, text = decode(before), decode(before + waiting)
        if text.endswith(NOT_A_CHARACTER) and len(waiting) < MOST_WAITING:
            continue
        yield text[len(known) :]
        before, waiting = waiting, []
    if waiting:
        yield decode(before + waiting)[len(decode(before)) :]
