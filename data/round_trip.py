"""Whether tokens hold their text: what a part of it is after it was encoded and decoded.

Normalizers change characters, and a token for what is unknown stands for any. A model of such
tokens never sees the text, so its bits per byte would be those of another one.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal

FIRST_CHARACTERS = 1 << 18
EVERY = 16
"""After the first characters, one text in this many is decoded; all would take a fifth longer."""
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


def is_checked(number: int, begin: int) -> bool:
    """Whether a text is decoded, by its number in the order of the source, and where it begins."""
    return begin < FIRST_CHARACTERS or number % EVERY == 0


def round_trip(text: str, decoded: str, may_add: bool = False) -> RoundTrip:
    """Compare a text with what its tokens say, by how often each character occurs.

    With `may_add` other characters may be there as well, such as spaces around special tokens.
    """
    if text == decoded:
        return RoundTrip(len(text))
    before, after = Counter(text), Counter(decoded)
    changed = before - after
    if not changed and not may_add:
        changed = after - before
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
            f"{share} of {found.checked:,} sampled characters are lost when decoded ({which})"
        )
    return " and ".join(parts) or None


def _percent(share: float) -> str:
    return f"{Decimal(f'{100 * share:.2g}'):f} %"  # never as 1e+02
