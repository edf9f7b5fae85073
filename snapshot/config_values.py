"""Values of a configuration that a snapshot holds, and how they differ from others."""

from __future__ import annotations

import json
from typing import Any


def value_of(config: dict[str, Any], key: str) -> Any:
    """The value of a dotted key in nested dictionaries; None if there is none."""
    found: Any = config
    for name in key.split("."):
        if not isinstance(found, dict) or name not in found:
            return None
        found = found[name]
    return found


def as_argument(value: Any) -> str:
    """A value as the command line expects it: null, true, 0.1, a text, a list without spaces."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def changed_values(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """'key: old -> new' for every value that differs between two configurations."""
    return [
        f"{key}: {as_argument(old)} -> {as_argument(new)}"
        for key in (f"{section}.{name}" for section, group in now.items() for name in group)
        if (old := value_of(before, key)) != (new := value_of(now, key))
    ]
