"""JSON lines and JSON arrays: the ranges of bytes that hold whole rows, and each row.

A row is an object; a text alone is a row with that text.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from typing import Any

from data.columns import DEFAULT_COLUMN
from data.errors import BadRow
from data.reading.formats import suffixes
from data.reading.groups import Group
from data.reading.table import HEAD_BYTES, Row, Table

GROUP_BYTES = 16 << 20
"""The size of a group of a plain file."""
SLACK_BYTES = 1 << 18
"""Bytes read beyond a group, for the end of its last line."""
REMEDY = (
    "Each row must be an object on a line of its own, or all rows one array of objects in a file "
    "whose name ends in .json"
)


def groups(table: Table) -> list[Group]:
    """Ranges of lines. A compressed file is one group, and `.json`, which may be an array."""
    suffix, compression = suffixes(table.file.name)
    return table.whole() if compression or suffix == ".json" else table.parts(GROUP_BYTES)


def rows(table: Table, group: Group) -> Iterator[Row]:
    """The rows of a group."""
    if (group.begin, group.end) != (0, table.file.size):
        return _parsed(_lines_in(table, group), group)
    content = table.open()
    if content.peek(HEAD_BYTES).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        values = json.loads(content.read().decode("utf-8-sig", "surrogateescape"))
        return ((number, _row(value)) for number, value in enumerate(values, 1))
    return _parsed(content, group)


def _parsed(lines: Iterable[bytes], group: Group) -> Iterator[Row]:
    """The rows of the lines of a group."""
    for number, line in enumerate(lines, start=1):
        is_first = number == 1 and group.begin == 0
        content = (line.removeprefix(codecs.BOM_UTF8) if is_first else line).strip()
        if not content:
            continue
        # Bytes that are not UTF-8 are an error only in the columns that are read.
        text = content.decode(errors="surrogateescape")
        try:
            yield number, _row(json.loads(text))
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error
            yield number, BadRow(f"it is not JSON ({reason}): {text!r:.40}", REMEDY)


def _row(value: Any) -> dict[str, Any] | BadRow:
    if isinstance(value, str):
        return {DEFAULT_COLUMN: value}
    if not isinstance(value, dict):
        return BadRow(f"it is not an object: {value!r:.40}", REMEDY)
    return value


def _lines_in(table: Table, group: Group) -> Iterator[bytes]:
    """The lines that begin in a group."""
    content = table.open(group.end - group.begin + SLACK_BYTES, max(0, group.begin - 1))
    if group.begin:
        content.readline()  # with a newline before the group, its first line begins with it
    while content.tell() < group.end and (line := content.readline()):
        yield line
