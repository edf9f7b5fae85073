"""What the `data` of a run's state says about its text; older snapshots say less."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def token_unit(data: Mapping[str, Any]) -> str:
    """The name of a token: character, or token."""
    return "token" if data.get("unit") == "token" else "character"


def bits_per_byte(data: Mapping[str, Any], loss: float) -> float | None:
    """A held-out loss in nats per token, as bits per byte of the raw text; None if unknown."""
    tokens, size = data.get("held_out_tokens"), data.get("held_out_bytes")
    if not all(type(number) is int and 0 < number < 2**63 for number in (tokens, size)):
        return None  # of an older snapshot; or not an honest one
    assert tokens is not None
    assert size is not None
    return loss / math.log(2) * tokens / size


def loss_in_words(data: Mapping[str, Any], loss: float, separator: str = ", ") -> str:
    """A loss in nats per token; for characters in bits per character, too; and in bits per byte."""
    unit, per_byte = token_unit(data), bits_per_byte(data, loss)
    parts = [f"{loss:.4f} nats per {unit}"]
    if unit == "character":
        parts.append(f"{loss / math.log(2):.4f} bits")
    if per_byte is not None:
        parts.append(f"{per_byte:.4f} bits per byte")
    return separator.join(parts)


def lost_facts(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A row of the model card: what of the text its tokens do not hold, if that is known."""
    lost = data.get("lost")
    return [("not in the tokens", lost)] if isinstance(lost, str) else []
