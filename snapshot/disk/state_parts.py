"""Parts of `state.json` that are checked before anything uses them."""

from __future__ import annotations

import re
from typing import Any

CURSOR = ("epoch", "window", "row", "token", "blocks")
HELD_OUT_GROUPS = "held_out_groups"
LARGEST_NUMBER = 2**40
"""Of a cursor."""
LARGEST_FACTOR = 2.0**127
"""Of a loss scaler, whose numbers become tensors of 32 bits."""
COMMIT = re.compile("[0-9a-f]{40}")


def is_loss_scaler(content: dict[str, Any]) -> bool:
    """Whether torch's GradScaler can load it."""
    factors = {"scale", "growth_factor", "backoff_factor"}
    counts = {"growth_interval", "_growth_tracker"}
    return (
        content.keys() == factors | counts
        and all(type(content[name]) in (int, float) for name in factors)
        and all(0 <= content[name] <= LARGEST_FACTOR for name in factors)
        and all(type(content[name]) is int and 0 <= content[name] < 2**31 for name in counts)
    )


def is_cursor(content: Any) -> bool:
    """Whether a source of a streamed text can continue there."""
    if not isinstance(content, dict):
        return False
    content = {HELD_OUT_GROUPS: 1.0, **content}  # older snapshots lack it
    if content.keys() != {"source", "revision", HELD_OUT_GROUPS, *CURSOR}:
        return False
    revision, of_groups = content["revision"], content[HELD_OUT_GROUPS]
    is_commit = isinstance(revision, str) and COMMIT.fullmatch(revision) is not None
    return (
        isinstance(content["source"], str)
        and type(of_groups) is float
        and 0 < of_groups <= 1
        and (revision is None or is_commit)
        and all(
            type(content[name]) is int and 0 <= content[name] < LARGEST_NUMBER for name in CURSOR
        )
    )
