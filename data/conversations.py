"""A source of conversations as tokens, in order and in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, groupby

import numpy as np

from data.chat import ChatTemplate, EncodedChat
from data.encode import Chats, Encoded
from data.errors import DataError
from data.messages import ChatError, Conversation
from data.pieces import Piece
from data.round_trip import RoundTrip
from data.sources import Source

BATCH = 256
"""Conversations that are encoded at once."""


def encoded_chats(
    pieces: Iterable[Piece], template: ChatTemplate, cut: int, longest: int, source: Source
) -> Iterator[Encoded]:
    """Conversations of at most so many tokens; the document that begins at `cut` is held out.

    Raises DataError, with the row, for one that cannot be rendered or encoded.
    """
    for first, documents, held_out in _batches(pieces, cut):
        conversations = list(map(Conversation.from_json, documents))
        found: list[EncodedChat] = []
        for row, one in enumerate(template.encode(conversations, longest), first + 1):
            if isinstance(one, ChatError):
                raise DataError(f"data.source={source.name}: {source.place(row)}: {one}.")
            if one is not None:
                found.append(one)
        no_flags = np.zeros(0, dtype=np.uint8)
        yield Encoded(
            np.concatenate([template.no_tokens, *(one.ids for one in found)]),
            sum(map(len, documents)),
            sum(one.text_bytes for one in found),
            held_out,
            np.cumsum([len(one.ids) for one in found], dtype=np.int64),
            Chats(
                np.concatenate([no_flags, *(one.trained for one in found)]),
                np.array([one.targets for one in found], dtype=np.int64),
                len(documents) - len(found),
                sum(one.is_shortened for one in found),
                Counter(chain.from_iterable(map(template.unwritten, conversations))),
            ),
            trip=sum((one.trip for one in found), RoundTrip()),
        )


def _batches(pieces: Iterable[Piece], cut: int) -> Iterator[tuple[int, list[str], bool]]:
    """Documents, all held out or none, with the number of the first one."""
    numbered = enumerate(_documents(pieces))
    for held_out, group in groupby(numbered, lambda one: one[1][0] >= cut):
        batch: list[str] = []
        for number, (_, document) in group:
            batch.append(document)
            if len(batch) == BATCH:
                yield number + 1 - len(batch), batch, held_out
                batch = []
        if batch:
            yield number + 1 - len(batch), batch, held_out


def _documents(pieces: Iterable[Piece]) -> Iterator[tuple[int, str]]:
    """Each document, with its first character in the whole text."""
    begin = 0
    for piece in pieces:
        start = 0
        for end in piece["ends"]:
            yield begin + start, piece["text"][start:end]
            start = end
        begin += len(piece["text"])
