"""What prove.py has found out about a run: the card of its repo says it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROOF = "proof.json"
FORMAT_VERSION = 1


def folder_of_proof(run_dir: str | Path) -> Path:
    """Where the proof of a run is: next to its directory."""
    return Path(f"{run_dir}-proof")


def read_proof(run_dir: str | Path) -> dict[str, Any] | None:
    """The newest proof of a run; None without one that can be read."""
    try:
        found = json.loads((folder_of_proof(run_dir) / PROOF).read_text(encoding="utf-8"))
        if found["format_version"] != FORMAT_VERSION:
            return None
        in_words(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    assert isinstance(found, dict)
    return found


def in_words(proof: Mapping[str, Any]) -> str:
    """'27 green, 3 grey, on 2 processes, ...; torch 2.13.0'."""
    counts = proof["counts"]
    found = ", ".join(f"{counts[status]} {status}" for status in ("green", "red", "grey"))
    return f"{found}, on {proof['machine']}"
