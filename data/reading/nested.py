"""Nested values of Arrow, as they were before a table gave all rows of a column one type.

Where the calls of two tools have other arguments, each has those of the other as null.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa

Restore = Callable[[Any], Any]
JSON = "arrow.json"
"""The type of values that have no common one, as `datasets` writes them."""


def restorer(kind: pa.DataType, decode: Restore = json.loads) -> Restore | None:
    """What restores the values of a type: without the null fields of structs, JSON decoded.

    None where they are right as they are. `decode` reads values of JSON.
    """
    if getattr(kind, "extension_name", None) == JSON:
        return _unless_null(decode)
    if pa.types.is_struct(kind):
        fields = {field.name: restorer(field.type, decode) for field in kind}
        return _unless_null(lambda value: _present(value, fields))
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if is_list and (entries := restorer(kind.value_type, decode)) is not None:
        return _unless_null(lambda value: [entries(entry) for entry in value])
    return None


def _present(value: dict[str, Any], fields: dict[str, Restore | None]) -> dict[str, Any]:
    found = {name: entry for name, entry in value.items() if entry is not None}
    restores = ((name, fields[name]) for name in found)
    return found | {name: restore(found[name]) for name, restore in restores if restore is not None}


def _unless_null(restore: Restore) -> Restore:
    return lambda value: None if value is None else restore(value)
