"""Values of a configuration that a snapshot holds, and how they differ from today's."""

from __future__ import annotations

import json
from typing import Any

from data.public_names import public_config

LEGACY_VALUES = {
    "model.activation_function": "gelu_new",
    "data.tokenizer": "char",
    "data.documents": "packed",
    "data.mix": [],
    "data.window_bytes": 32_000_000,
    "data.prefetch_bytes": 128_000_000,
    "data.stream_cache_bytes": 4_000_000_000,
    "data.held_out_bytes": 2_000_000,
    "data.skip_broken": False,
    "model.lora_targets": [],
    "model.frozen_dtype": "auto",
    "optim.freeze": [],
    "optim.name": "adamw",
    "optim.schedule": "cosine",
    "optim.decay_fraction": 0.2,
}
"""By key, the value that a snapshot implies which was written before the key existed."""


def value_of(config: dict[str, Any], key: str) -> Any:
    """The value of a dotted key in nested dictionaries; if absent, its LEGACY_VALUES, or None."""
    found: Any = config
    for name in key.split("."):
        if not isinstance(found, dict) or name not in found:
            return LEGACY_VALUES.get(key)
        found = found[name]
    return found


def as_argument(value: Any) -> str:
    """A value as the command line expects it: null, true, 0.1, a text, a list without spaces."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def changed_values(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """'key: old -> new' for every value that differs between two configurations."""
    before = public_config(before)  # older snapshots hold folders, and URLs with their secrets
    return [
        f"{key}: {as_argument(old)} -> {as_argument(new)}"
        for key in (f"{section}.{name}" for section, group in now.items() for name in group)
        if (old := value_of(before, key)) != (new := value_of(now, key))
    ]
