"""Parameters that a run does not train: patterns over the names that a snapshot gives them."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

KEY = "optim.freeze"


def is_frozen(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns, with * and ?, matches all of a parameter's name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def frozen_in(config: dict[str, Any]) -> list[str]:
    """The patterns in the configuration of a snapshot, which is untrusted input."""
    found = config.get("optim", {}) if isinstance(config, dict) else {}
    patterns = found.get("freeze", []) if isinstance(found, dict) else []
    return [one for one in patterns if isinstance(one, str)] if isinstance(patterns, list) else []
