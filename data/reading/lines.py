"""JSON lines and JSON arrays: the ranges of bytes that hold whole rows, and each row.

A row is an object; a text alone is a row with that text.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import IO, Any

from data.columns import DEFAULT_COLUMN
from data.errors import BadRow
from data.reading.formats import HEAD_BYTES, suffixes
from data.reading.groups import Group
from data.reading.table import PIECE_BYTES, Row, Table, check_length

GROUP_BYTES = 16 << 20
"""The size of a group of a plain file."""
SLACK_BYTES = 1 << 18
"""Bytes read beyond a group, for the end of its last line."""
MOST_ARRAY_BYTES = 1 << 30
FIRST_ROWS = 10_000
"""A column may be missing in the first rows, but not in all of these."""
REMEDY = "Each row must be an object on a line of its own, or all rows one array of objects"


def groups(table: Table) -> list[Group]:
    """Ranges of lines; a compressed file or an array is one group."""
    if table.file.is_compressed or table.file.size <= GROUP_BYTES or _is_array(table):
        return table.whole()
    return table.parts(GROUP_BYTES)


def rows(table: Table, group: Group) -> Iterator[Row]:
    """The rows of a group."""
    if not table.is_whole(group):
        return _parsed(_lines_in(table, group), group)
    content, head = table.open()
    if _begins_array(head):
        return ((number, _row(value)) for number, value in enumerate(_array(table, content), 1))
    return _parsed(_lines_of(content), group)


def columns(table: Table) -> list[str]:
    """The keys of the first rows, up to one with the column."""
    names: dict[str, None] = {}
    for _, row in islice(rows(table, table.whole()[0]), FIRST_ROWS):
        if not isinstance(row, BadRow):
            names |= dict.fromkeys(row)
        if table.column.among(names):
            break
    return [*names]


def _is_array(table: Table) -> bool:
    """Whether a plain file begins as an array; of an unopened one, whether its name says so."""
    if table.unopened:
        return suffixes(table.file.name)[0] == ".json"
    return _begins_array(table.kept("head", lambda: bytes(table.read(0, HEAD_BYTES))))


def _begins_array(head: bytes) -> bool:
    return head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


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
    first = max(0, group.begin - 1)  # a newline there: a line begins with the group
    data = bytearray(table.read(first, group.end + SLACK_BYTES))
    if group.begin == 0:
        table.refuse_content(head := bytes(data[:HEAD_BYTES]))
        if _begins_array(head):  # of an unopened file
            raise table.broken(f"{table.file.name} is an array. Give it a name that ends in .json.")
    begin = data.find(b"\n") + 1 if group.begin else 0
    if group.begin and not 0 < begin < group.end - first:
        return  # one line fills the group, and began before it
    last = group.end - 1 - first  # the first newline from here ends the last line
    while (end := data.find(b"\n", last)) < 0 and first + len(data) < table.file.size:
        check_length(len(data) - last)
        here = first + len(data)
        data += table.read(here, here + len(data) - last)
    whole = bytes(data[begin : end if end >= 0 else len(data)])
    for line in whole.split(b"\n"):
        check_length(len(line))
        yield line


def _lines_of(content: IO[bytes]) -> Iterator[bytes]:
    rest = bytearray()
    while piece := content.read(PIECE_BYTES):
        *lines, last = piece.split(b"\n")
        for line in lines:
            yield bytes(rest + line) if rest else line
            rest.clear()
        rest += last
        check_length(len(rest))
    yield bytes(rest)


def _array(table: Table, content: IO[bytes]) -> list[Any]:
    """The array that a file consists of. Raises ValueError for what is not JSON."""
    array = bytearray()
    while piece := content.read(PIECE_BYTES):
        array += piece
        if len(array) > MOST_ARRAY_BYTES:
            raise table.broken(
                f"{table.file.name} is an array of more than 1 GB, and is read as a whole. Write "
                "it as JSON lines, one element on each line, into a .jsonl file."
            )
    try:
        return json.loads(array.decode("utf-8-sig", "surrogateescape"))
    except RecursionError as error:
        raise ValueError("an element is nested too deeply") from error
