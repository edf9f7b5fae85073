"""What the text of a run is: its first rows, and whether held-out text is trained on."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.printable import printable
from config.schema import Config
from data.corpus import Corpus
from data.documents import Documents
from data.order import mixed
from data.token_file import TokenStream
from model.head import IGNORED
from proving.rows import Rows

MOST_TOKENS = 5_000_000
"""Tokens of the training text that are compared with the held-out text."""
MOST_HELD_OUT = 2_000
"""Held-out rows that are looked for."""
FACTOR = np.uint64(0x9E3779B97F4A7C15)
LONGEST_SHOWN = 2_000


def facts_of_text(corpus: Corpus, config: Config, rows: Rows) -> dict[str, Any]:
    """What there is to know of the text, and of the rows that this process has trained on."""
    info, width = corpus.info, config.data.block_size
    found, looked_for = repeated(corpus, rows, width)
    return {
        "name": info.name,
        "documents": info.documents,
        "tokens": info.tokens,
        "unknown_share": info.unknown_share,
        "lost": info.lost_in_words,
        "left_out": info.left_out,
        "shortened": info.shortened,
        "held_out_found": found,
        "held_out_looked_for": looked_for,
        "longest_row": max(len(row) for row, _ in rows.first),
        "padding_share": padding_share(rows),
        "misplaced_targets": sum(misplaced(*row) for row in rows.first),
        "unended_replies": unended(rows, corpus.marks),
        "conversations": bool(corpus.marks),
        "first_row": shown(corpus, *rows.first[0]),
    }


def misplaced(inputs: list[int], targets: list[int]) -> int:
    """How many targets of a row (T,) are not the token that follows."""
    pairs = zip(targets[:-1], inputs[1:], strict=True)
    return sum(target not in (IGNORED, following) for target, following in pairs)


def unended(rows: Rows, marks: frozenset[int]) -> int:
    """How many replies in the first rows end with another token than the end of a turn."""
    count = 0
    for _, targets in rows.first:
        for target, following in pairwise(targets):
            count += target != IGNORED and following == IGNORED and target not in marks
    return count if marks else 0


def padding_share(rows: Rows) -> float:
    """The share of positions of the first rows that have no target."""
    targets = [target for _, row in rows.first for target in row]
    return sum(target == IGNORED for target in targets) / max(1, len(targets))


def shown(corpus: Corpus, inputs: list[int], targets: list[int]) -> list[list[Any]]:
    """A row as pieces of text, each with whether the model is trained to write it."""
    pieces: list[list[Any]] = []
    trained = [False, *(target != IGNORED for target in targets[:-1])]
    start = 0
    for end in range(1, len(inputs) + 1):
        if end == len(inputs) or trained[end] != trained[start]:
            text = corpus.tokenizer.decode(np.array(inputs[start:end]))
            pieces.append([printable(text, multiline=True)[:LONGEST_SHOWN], trained[start]])
            start = end
    return pieces


def repeated(corpus: Corpus, rows: Rows, width: int) -> tuple[int, int]:
    """How many held-out rows are also in the training text, of how many that were looked for.

    Prepared texts are compared as far as `MOST_TOKENS`, streamed ones with the rows trained on.
    """
    held_out, train = tokens_of(corpus.held_out), tokens_of(corpus.train)
    width = 1 << (width.bit_length() - 1)  # a power of two
    if held_out is None or len(held_out) < width:
        return 0, 0
    every = digests(held_out.window(0, min(len(held_out), MOST_TOKENS)), width)
    wanted = every[:: max(width, len(every) // MOST_HELD_OUT)]
    texts: list[NDArray] = [np.array(row) for row in rows.all_inputs]
    if train is not None:
        texts = [train.window(0, min(len(train), MOST_TOKENS))]
    seen = np.concatenate([digests(text, width) for text in texts])
    return int(np.isin(wanted, seen).sum()), len(wanted)


def tokens_of(part: Any) -> TokenStream | None:
    """The tokens of a part of a prepared text; None for a streamed one."""
    if isinstance(part, Documents):
        return part.tokens
    return part if isinstance(part, TokenStream) else None


def digests(tokens: NDArray, width: int) -> NDArray[np.uint64]:
    """A digest of each `width` consecutive ones of some tokens (N,): (N - width + 1,).

    `width` is a power of two: those of twice as many tokens follow from two digests.
    """
    found, length = mixed(tokens.astype(np.uint64)), 1
    while length < width:
        found = mixed(found[:-length] * FACTOR + found[length:])
        length *= 2
    return found
