"""A text as tokens, in order and in bounded memory: what is written to the Arrow file."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from data.pieces import Chunk, Piece, batches_of, chunks_of, utf8_bytes
from data.round_trip import RoundTrip, is_checked, round_trip
from data.subwords import EncodedTexts, SubwordTokenizer
from data.tokenizer import CharTokenizer, Tokenizer

MOST_THREADS = 4
"""More threads would wait for the one that reads."""
BATCHES_AT_ONCE = 2
"""While Rust encodes one batch on all cores, Python converts the tokens of another."""
Item = TypeVar("Item")
Result = TypeVar("Result")


class Chats(NamedTuple):
    """What is known of consecutive conversations besides their tokens."""

    trained: NDArray[np.uint8]
    """1 for each token that is a target, 0 for any other."""
    targets: NDArray[np.int64]
    """How many targets each conversation has."""
    left_out: int
    """How many conversations are too long even with their first reply alone."""
    shortened: int
    """How many have lost turns, to be short enough."""
    unwritten: Counter[str]
    """How many have what their template does not mention, by its name."""


class Encoded(NamedTuple):
    """Consecutive tokens, all held out or none, and the text that they encode."""

    tokens: NDArray
    characters: int
    text_bytes: int
    """Of the text in UTF-8; end-of-text tokens have none."""
    held_out: bool
    ends: NDArray[np.int64]
    """How many of the tokens there are up to the end of each document that ends here."""
    chats: Chats | None = None
    """For conversations, of which `text_bytes` are those of the targets."""
    first_bytes: int = 0
    """Bytes of the first tokens of held-out documents, which nothing predicts in a document."""
    trip: RoundTrip = RoundTrip()
    """What of the text the tokens do not hold, as far as it was decoded again."""


def encoded(
    pieces: Iterable[Piece], tokenizer: Tokenizer, cut: int, threads: int
) -> Iterator[Encoded]:
    """The tokens of a text, whose first held-out character is `cut`.

    So many `threads`, at most `MOST_THREADS`, encode characters; subwords are encoded on all cores,
    about so many. Raises DataError if the tokenizer has no encoding of the text.
    """
    if isinstance(tokenizer, SubwordTokenizer):
        return _encoded_subwords(pieces, tokenizer, cut, threads)
    assert isinstance(tokenizer, CharTokenizer)
    return _encoded_characters(pieces, tokenizer, cut, min(threads, MOST_THREADS))


def _encoded_characters(
    pieces: Iterable[Piece], tokenizer: CharTokenizer, cut: int, threads: int
) -> Iterator[Encoded]:
    def encode(piece: Piece) -> tuple[str, NDArray, int, NDArray[np.int64]]:
        text, ends = piece["text"], np.array(piece["ends"], dtype=np.int64)
        return text, tokenizer.encode(text), utf8_bytes(text), ends

    left = cut  # characters before the first held-out one
    begins = True  # a document, with the next character
    for text, tokens, size, ends in in_order(encode, pieces, threads):
        if 0 < left < len(text):
            before, late = utf8_bytes(text[:left]), ends > left
            yield Encoded(tokens[:left], left, before, False, ends[~late])
            late_ends = ends[late] - left
            first = _first_bytes(text[left:], late_ends, begins=True)
            yield Encoded(
                tokens[left:], len(text) - left, size - before, True, late_ends, None, first
            )
        else:
            first = _first_bytes(text, ends, begins or left == 0) if left <= 0 else 0
            yield Encoded(tokens, len(text), size, left <= 0, ends, None, first)
        left -= len(text)
        begins = len(ends) > 0 and int(ends[-1]) == len(text)


def _first_bytes(text: str, ends: NDArray[np.int64], begins: bool) -> int:
    """Bytes of the characters with which documents begin."""
    starts = {*ends.tolist(), *([0] if begins else [])}
    return sum(utf8_bytes(text[start : start + 1]) for start in starts)


def _encoded_subwords(
    pieces: Iterable[Piece], tokenizer: SubwordTokenizer, cut: int, cores: int
) -> Iterator[Encoded]:
    def encode(placed: tuple[int, int, list[Chunk]]) -> Encoded:
        first_number, begin, batch = placed
        texts, ends_document = ([chunk.text for chunk in batch], [c.ends_document for c in batch])
        found = tokenizer.encode_chunks(texts, ends_document, [one.before for one in batch])
        characters, size = sum(map(len, texts)), sum(map(utf8_bytes, texts))
        begins = [one.text for one in batch if one.held_out and one.begins]
        first = sum(map(tokenizer.first_token_bytes, begins))
        trip = _round_trip(tokenizer, first_number, begin, batch, found)
        held_out = batch[0].held_out
        return Encoded(found.ids, characters, size, held_out, found.ends, None, first, trip)

    chunks = chunks_of(pieces, cut, tokenizer.seams)
    return in_order(encode, _placed(batches_of(chunks, cores)), BATCHES_AT_ONCE)


def _placed(batches: Iterable[list[Chunk]]) -> Iterator[tuple[int, int, list[Chunk]]]:
    """Batches, with the number of their first chunk and with its first character."""
    number = begin = 0
    for batch in batches:
        yield number, begin, batch
        number += len(batch)
        begin += sum(len(chunk.text) for chunk in batch)


def _round_trip(
    tokenizer: SubwordTokenizer,
    first_number: int,
    begin: int,
    batch: list[Chunk],
    found: EncodedTexts,
) -> RoundTrip:
    """What does not come back of the chunks that are decoded again."""
    trips = []
    for number, chunk in enumerate(batch):
        # A decoder drops the space before a text, which is no text where one continues another.
        if is_checked(first_number + number, begin) and (chunk.begins or chunk.before):
            first, stop = found.starts[number : number + 2]
            own = tokenizer.seams.own(chunk.before) if chunk.before else []
            ids = [*own, *found.ids[first : stop - chunk.ends_document].tolist()]
            trip = round_trip(chunk.before + chunk.text, tokenizer.decode(ids))
            trips.append(replace(trip, checked=len(chunk.text)))
        begin += len(chunk.text)
    return sum(trips, RoundTrip())


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
