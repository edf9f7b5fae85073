"""What the text of a run is: its first row, its targets, and held-out text that is trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.printable import printable
from data.corpus import Corpus
from data.documents import Documents
from data.token_file import TokenStream
from model.head import IGNORED

CHECKED = 4
"""Rows whose targets are checked."""
MOST_TOKENS = 5_000_000
"""Tokens of the training text that are compared with the held-out text."""
MOST_HELD_OUT = 200
"""Held-out rows that are looked for."""
LONGEST_SHOWN = 400
"""Characters of the first row that are shown."""


class Rows:
    """The rows that this process trains on, as they reach the model."""

    def __init__(self) -> None:
        self.inputs: list[list[int]] = []
        """Of every row, each (T,)."""
        self.targets: list[list[int]] = []
        """Of the first rows, each (T,)."""

    def recorded(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches as they are."""
        for batch in batches:
            for row, targets in zip(*(one.tolist() for one in batch[0][:2]), strict=True):
                if any(target != IGNORED for target in targets):  # others only pad a batch
                    self.inputs.append(row)
                    self.targets += [targets] if len(self.targets) < CHECKED else []
            yield batch


def facts_of_text(corpus: Corpus, width: int, rows: Rows) -> dict[str, Any]:
    """What the checks of a text compare; `width` are the tokens of a row."""
    found, looked_for = repeated(corpus, rows, width)
    marks = corpus.marks
    return {
        "rows": len(rows.inputs),
        "lost": corpus.info.lost_in_words,
        "held_out_found": found,
        "held_out_looked_for": looked_for,
        "misplaced_targets": sum(map(misplaced, rows.inputs, rows.targets)),
        "unended_replies": sum(unended(row, marks) for row in rows.targets) if marks else None,
        "row": marked(corpus.tokenizer, rows.inputs[0], rows.targets[0]),
    }


def misplaced(inputs: list[int], targets: list[int]) -> int:
    """How many targets of a row (T,) are not the token that follows."""
    pairs = zip(targets[:-1], inputs[1:], strict=True)
    return sum(target not in (IGNORED, following) for target, following in pairs)


def unended(targets: list[int], marks: frozenset[int]) -> int:
    """How many replies of a row end with another token than the end of a turn."""
    ends = (one for one, after in pairwise(targets) if one != IGNORED and after == IGNORED)
    return sum(one not in marks for one in ends)


def marked(tokenizer: Any, inputs: list[int], targets: list[int]) -> str:
    """The beginning of a row of text; what the model learns to write stands between »«."""
    trained = [False, *(target != IGNORED for target in targets[:-1])]
    text = ""
    for is_trained, places in groupby(range(len(inputs)), lambda place: trained[place]):
        piece = tokenizer.decode(np.array([inputs[place] for place in places]))
        text += f"»{piece}«" if is_trained else piece
    text = printable(text, multiline=True)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def repeated(corpus: Corpus, rows: Rows, width: int) -> tuple[int, int]:
    """How many held-out rows are also in the training text, of how many that were looked for.

    Prepared texts are compared as far as `MOST_TOKENS`, streamed ones with the rows trained on.
    """
    held_out, train = tokens_of(corpus.held_out), tokens_of(corpus.train)
    if held_out is None:
        return 0, 0
    tokens = held_out.window(0, min(len(held_out), MOST_TOKENS))
    texts: list[NDArray] = [np.array(row, tokens.dtype) for row in rows.inputs]
    if train is not None:
        texts = [train.window(0, min(len(train), MOST_TOKENS))]
    return rows_within(texts, tokens, width)


def rows_within(texts: list[NDArray], tokens: NDArray, width: int) -> tuple[int, int]:
    """How many rows of `width` of some tokens (N,) are in one of the texts, of how many.

    At most `MOST_HELD_OUT` rows are looked for.
    """
    places = range(0, len(tokens) - width + 1, max(width, len(tokens) // MOST_HELD_OUT))
    rows = [tokens[at : at + width].tobytes() for at in places]
    seen = [text.tobytes() for text in texts]
    return sum(any(row in text for text in seen) for row in rows), len(rows)


def tokens_of(part: Any) -> TokenStream | None:
    """The tokens of a part of a prepared text; None for a streamed one."""
    if isinstance(part, Documents):
        return part.tokens
    return part if isinstance(part, TokenStream) else None
