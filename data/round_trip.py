"""Whether tokens hold their text: what its beginning is after it was encoded and decoded.

Normalizers change characters, and a token for what is unknown stands for any. A model of such
tokens never sees the text, so its bits per byte would be those of another one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

from data.tokenizer import Tokenizer

FIRST_CHARACTERS = 1 << 18
"""How much of a text is compared."""
SHOWN = 6
"""Characters that are named."""
NEGLIGIBLE = 1e-4
"""The share that changes no printed digit of bits per byte."""


@dataclass(frozen=True)
class RoundTrip:
    """How many characters were decoded again, and what did not come back."""

    checked: int = 0
    lost: int = 0
    which: str = ""
    """Some of the characters that were lost, each once."""

    def __add__(self, other: RoundTrip) -> RoundTrip:
        which = "".join(dict.fromkeys(self.which + other.which))[:SHOWN]
        return RoundTrip(self.checked + other.checked, self.lost + other.lost, which)


def round_trip(texts: Iterable[str], tokenizer: Tokenizer) -> RoundTrip:
    """Compare the first characters with what their tokens say, by how often each one occurs.

    Raises DataError if they have no encoding.
    """
    first, left = [], FIRST_CHARACTERS
    for text in texts:
        first.append(text[:left])
        left -= len(first[-1])
        if not left:
            break
    text = "".join(first)
    before, after = Counter(text), Counter(tokenizer.decode(tokenizer.encode(text)))
    changed = before - after or after - before
    which = "".join(character for character, _ in changed.most_common(SHOWN))
    return RoundTrip(len(text), changed.total(), which)


def unknown_id(content: bytes, end_of_text: int | None) -> int | None:
    """The token of a tokenizer.json for what its model does not know; None if it has none."""
    model = json.loads(content)["model"]
    vocabulary, unknown = model.get("vocab"), model.get("unk_token")
    found = model.get("unk_id") if unknown is None else vocabulary.get(unknown)
    # GPT-2 names its end-of-text token, which its bytes never need.
    return found if type(found) is int and found != end_of_text else None


def lost_in_words(unknown_share: float, found: RoundTrip) -> str | None:
    """What of a text its tokens do not hold, as a clause; None if they hold all of it."""
    parts = []
    if unknown_share:
        parts.append(f"{_percent(unknown_share)} of the tokens are unknown to the tokenizer")
    if found.lost:
        which = ", ".join(map(repr, found.which))
        share = _percent(found.lost / max(1, found.checked))
        parts.append(
            f"{share} of the first {found.checked:,} characters are lost when decoded ({which})"
        )
    return " and ".join(parts) or None


def _percent(share: float) -> str:
    return f"{Decimal(f'{100 * share:.2g}'):f} %"  # never as 1e+02
