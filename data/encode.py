"""Rows of text as tokens, in bounded memory."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from data.pieces import chunks_of, pieces_of, rows_of
from data.token_file import TokenRows
from data.tokenizer import Tokenizer

ROWS_AT_ONCE = 32
"""About a million characters: enough for many cores."""
Item = TypeVar("Item")
Result = TypeVar("Result")


def texts_as_tokens(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[TokenRows]:
    """The tokens of documents, in order. Raises DataError if the tokenizer has none for one."""
    rows = rows_of(chunks_of(pieces_of(texts), sys.maxsize))
    while batch := list(islice(rows, ROWS_AT_ONCE)):
        yield from tokenizer.encode_rows([(row["text"], row["ends"]) for row in batch])


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
