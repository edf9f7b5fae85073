"""A text, or conversations, as tokens: in order, by several threads, in bounded memory."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from data.chat import ChatTemplate, EncodedChat
from data.errors import DataError
from data.messages import ChatError, Conversation
from data.pieces import (
    Chunk,
    Piece,
    SplitPiece,
    batches_of,
    chunks_of,
    split_pieces,
    utf8_bytes,
)
from data.sources import Source
from data.subwords import SubwordTokenizer
from data.token_file import TokenRows
from data.tokenizer import Tokenizer

MOST_THREADS = 4
"""More threads would wait for the one that reads."""
BATCHES_AT_ONCE = 2
"""While Rust encodes one batch on all cores, Python converts the tokens of another."""
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Encoded(TokenRows):
    """Consecutive tokens, all held out or none, and what is known of the text that they encode."""

    held_out: bool
    characters: int
    text_bytes: int
    """Of the text in UTF-8, without end-of-text tokens; of conversations those of the targets."""
    left_out: int = 0
    """Number of conversations whose first reply does not fit."""
    shortened: int = 0
    """Number of conversations that lost turns to fit."""
    unwritten: Counter[str] = field(default_factory=Counter)
    """Number of conversations with a field that their template never mentions, by field."""


def encoded(
    pieces: Iterable[Piece], tokenizer: Tokenizer, cut: int, threads: int
) -> Iterator[Encoded]:
    """The tokens of a text, whose first held-out character is `cut`.

    So many `threads`, at most `MOST_THREADS`, encode characters; subwords are encoded on all cores,
    about so many. Raises DataError if the tokenizer has no encoding of the text.
    """
    if isinstance(tokenizer, SubwordTokenizer):
        subwords = tokenizer

        def encode_batch(batch: list[Chunk]) -> Encoded:
            texts = [chunk.text for chunk in batch]
            ids, ends = subwords.encode_chunks(texts, [chunk.ends_document for chunk in batch])
            return _encoded(ids, ends, texts, batch[0].held_out)

        return in_order(encode_batch, batches_of(chunks_of(pieces, cut), threads), BATCHES_AT_ONCE)

    def encode(part: SplitPiece) -> Encoded:
        ends = np.array(part.ends, dtype=np.int64)
        return _encoded(tokenizer.encode(part.text), ends, [part.text], part.held_out)

    return in_order(encode, split_pieces(pieces, cut), min(threads, MOST_THREADS))


def _encoded(ids: NDArray, ends: NDArray[np.int64], texts: list[str], held_out: bool) -> Encoded:
    return Encoded(
        ids,
        ends,
        held_out=held_out,
        characters=sum(map(len, texts)),
        text_bytes=sum(map(utf8_bytes, texts)),
    )


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int
) -> Iterator[Result]:
    """`map` of a function over items, in order, by several threads.

    At most `threads` + 1 items are in memory. numpy, hashlib and `tokenizers` release the
    interpreter lock.
    """
    running: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            running.append(pool.submit(function, item))
            if len(running) > threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


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
            np.cumsum([len(one.ids) for one in found], dtype=np.int64),
            np.concatenate([no_flags, *(one.trained for one in found)]),
            np.array([one.targets for one in found], dtype=np.int64),
            held_out=held_out,
            characters=sum(map(len, documents)),
            text_bytes=sum(one.text_bytes for one in found),
            left_out=len(documents) - len(found),
            shortened=sum(one.is_shortened for one in found),
            unwritten=Counter(chain.from_iterable(map(template.unwritten, conversations))),
        )


def _batches(pieces: Iterable[Piece], cut: int) -> Iterator[tuple[int, list[str], bool]]:
    """Documents, all held out or none, with the number of the first one."""
    number = 0
    for part in split_pieces(pieces, cut):
        bounds = pairwise([0, *part.ends])
        documents = [part.text[begin:end] for begin, end in bounds]
        for first in range(0, len(documents), BATCH):
            yield number + first, documents[first : first + BATCH], part.held_out
        number += len(documents)
