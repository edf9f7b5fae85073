"""What there is to know of a prepared text, and what identifies it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from data.token_file import TokenRows

FORMAT = 2
"""Part of the fingerprints that snapshots store, and of the names in the cache; of streams, too.
Increase it when the same source would have another text, other rows or another order of them."""
ALL_HELD_OUT = 1.0
"""The `val_fraction` of a text that is only evaluated: no token is trained on."""
NEGLIGIBLE = 1e-4
"""The share of lost text that changes no printed digit of bits per byte."""
TOKENS = "tokens.bin"
"""The file of a prepared text, beside those of its tokenizer."""


@dataclass
class CorpusInfo:
    """What is known of a text: the facts in its token file. What nobody has counted is 0."""

    name: str = ""
    characters: int = 0
    documents: int = 0
    tokens: int = 0
    split: int = 0
    """The first held-out token."""
    train_bytes: int = 0
    """Bytes of the training text in UTF-8; for conversations, of the assistant's text."""
    held_out_bytes: int = 0
    held_out_targets: int = 0
    """Number of tokens of these bytes."""
    left_out: int = 0
    """Number of conversations left out because not even their first reply fits."""
    shortened: int = 0
    """Number of conversations that lost turns to fit."""
    fingerprint: str = ""
    """Hex digest of text, split and tokenizer; equal texts have equal ones in any format."""
    lost: float = 0.0
    """The share of characters, of those that were compared, that the tokens do not hold."""
    which: str = ""
    """Some of these characters."""

    def count(self, rows: TokenRows, held_out: bool, characters: int, text_bytes: int) -> None:
        """Add rows of a text, with its size in UTF-8; of a conversation, that of its targets."""
        tokens = len(rows.tokens)
        if held_out:
            self.held_out_bytes += text_bytes
            self.held_out_targets += rows.target_count
        else:
            self.train_bytes += text_bytes
            self.split += tokens
        self.documents += len(rows.ends)
        self.tokens += tokens
        self.characters += characters

    @property
    def lost_in_words(self) -> str | None:
        """The part of the text that the tokens lose, as a clause; None if they lose nothing."""
        which = ", ".join(map(repr, self.which))
        lost = f"{100 * self.lost:.3g} % of the characters are lost when decoded ({which})"
        return lost if self.lost else None

    @property
    def is_lossy(self) -> bool:
        """Whether more is lost than bits per byte, with the digits that are printed, allow."""
        return self.lost > NEGLIGIBLE

    def bits_per_byte(self, loss: float) -> float | None:
        """A held-out loss in nats per token, as bits per byte of the raw text.

        None if the tokens do not hold the text, or have none.
        """
        if self.is_lossy or not self.held_out_bytes:
            return None
        return loss / math.log(2) * self.held_out_targets / self.held_out_bytes
