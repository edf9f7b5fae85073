"""JSON lines and JSON arrays: the ranges of bytes that hold whole rows, and each row.

A row is an object; a text alone is a row with that text.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from json.decoder import WHITESPACE  # type: ignore[attr-defined]
from typing import IO, Any

from data.columns import DEFAULT_COLUMN, TextColumn
from data.errors import BadRow
from data.reading.content import HEAD_BYTES, refuse_content
from data.reading.groups import Group
from data.reading.table import Row, Table, check_length

TITLE = "JSON lines"
GROUP_BYTES = 16 << 20
"""The size of a group of a plain file."""
SLACK_BYTES = 1 << 18
"""Bytes read beyond a group, for the end of its last line."""
MOST_ARRAY_BYTES = 1 << 30
PIECE_BYTES = 1 << 20
DECODER = json.JSONDecoder()
REMEDY = "Each row must be an object on a line of its own, or all rows one array of objects"
Parsed = tuple[int, Any, str]
"""The number of a row, its value, and its JSON."""


def groups(table: Table) -> list[Group]:
    """Ranges of lines; a compressed file or an array is one group."""
    size = table.file.size
    if table.file.is_compressed or size <= GROUP_BYTES or _is_array(table):
        return table.whole()
    found = []
    for index, begin in enumerate(range(0, size, GROUP_BYTES)):
        end = min(begin + GROUP_BYTES, size)
        found.append(Group(table.number, index, None, None, begin, end, end - begin))
    return found


def rows(table: Table, group: Group) -> Iterator[Row]:
    """The rows of a group."""
    if not table.is_whole(group):
        found = _parsed(_plain_lines(table, group), group)
    else:
        content, head = table.open()
        is_array = _begins_array(head)
        found = _elements_of(table, content) if is_array else _parsed(_lines_of(content), group)
    for number, value, text in found:
        yield number, _row(value, text, table.column)


def columns(table: Table) -> dict[str, str]:
    """The keys of the first row, each with its Python type."""
    (group,) = table.whole()
    found = rows(replace(table, ahead=SLACK_BYTES), group)
    first = next((row for _, row in found if not isinstance(row, BadRow)), {})
    return {name: type(value).__name__ for name, value in first.items()}


def _is_array(table: Table) -> bool:
    """Whether a plain file begins as an array."""
    return _begins_array(table.kept("head", lambda: bytes(table.read(0, HEAD_BYTES))))


def _begins_array(head: bytes) -> bool:
    return head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _parsed(lines: Iterable[bytes], group: Group) -> Iterator[Parsed]:
    """The values of the lines of a group; a BadRow for a line that is not JSON."""
    for number, line in enumerate(lines, start=1):
        is_first = number == 1 and group.begin == 0
        # Bytes that are not UTF-8 are an error only in the columns that are read.
        content = (line.removeprefix(codecs.BOM_UTF8) if is_first else line).strip()
        if not content:
            continue
        text = content.decode(errors="surrogateescape")
        try:
            yield number, json.loads(text), text
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error
            yield number, BadRow(f"it is not JSON ({reason}): {text!r:.40}", REMEDY), text


def _row(value: Any, text: str, column: TextColumn) -> dict[str, Any] | BadRow:
    """A row from its value and its JSON; a BadRow for what is none, or has its column twice."""
    if isinstance(value, BadRow):
        return value
    if isinstance(value, str):
        value = {DEFAULT_COLUMN: value}
    if not isinstance(value, dict):
        return BadRow(f"it is not an object: {value!r:.40}", REMEDY)
    for name in column.among(value):
        if text.count(f'"{name}"') > 1:  # perhaps in a value
            names = [key for key, _ in json.loads(text, object_pairs_hook=list)]
            if names.count(name) > 1:
                return BadRow(f"it has {name} twice", "Leave one of them out")
    return value


def _plain_lines(table: Table, group: Group) -> Iterator[bytes]:
    """The lines that begin in a group."""
    first = max(0, group.begin - 1)  # a newline there: a line begins with the group
    data = bytearray(table.read(first, group.end + SLACK_BYTES))
    if group.begin == 0:
        refuse_content(table.file.shown, bytes(data[:HEAD_BYTES]))
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


def _elements_of(table: Table, content: IO[bytes]) -> Iterator[Parsed]:
    """The elements of the array that a file consists of. It is read as a whole.

    Raises ValueError for what is not JSON, and as reading does.
    """
    array = bytearray()
    while piece := content.read(PIECE_BYTES):
        array += piece
        if len(array) > MOST_ARRAY_BYTES:
            raise table.broken(
                f"{table.file.name} is an array of more than 1 GB, and is read as a whole. Write "
                "its elements as JSON lines, one on each line."
            )
    text = array.decode("utf-8-sig", "surrogateescape")
    array.clear()  # frees its memory
    at, number = _after("[", text, 0), 0
    while text[at : at + 1] != "]":
        at = _after(",", text, at) if number else at
        try:
            value, end = DECODER.raw_decode(text, at)
        except RecursionError as error:
            raise ValueError("an element is nested too deeply") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"an element is not JSON ({error.msg})") from error
        number += 1
        yield number, value, text[at:end]
        at = WHITESPACE.match(text, end).end()
    if _after("]", text, at) < len(text):
        raise ValueError("more data follows the end of its array")


def _after(character: str, text: str, at: int) -> int:
    """The next place after a character that must follow, and after the white space around it."""
    at = WHITESPACE.match(text, at).end()
    if not text.startswith(character, at):
        raise ValueError(
            f"its array is cut off or not JSON: {character} expected, but {text[at : at + 40]!r}"
        )
    return int(WHITESPACE.match(text, at + 1).end())
