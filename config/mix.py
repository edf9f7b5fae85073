"""Streamed sources of a run, in `data.mix`."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING


@dataclass
class MixPart:
    source: str = MISSING
    """A source like data.source, always streamed."""
    weight: float = 1.0
    """Its share of the training blocks, relative to the other weights."""
    text_column: str | None = None
    """The column that holds the text; null: data.text_column."""
