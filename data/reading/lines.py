"""JSON lines and JSON arrays: the ranges of bytes that hold whole rows, and each row.

A row is an object; a text alone is a row with that text.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from json.decoder import WHITESPACE  # type: ignore[attr-defined]
from typing import IO, Any

from data.columns import DEFAULT_COLUMN, TextColumn
from data.errors import BadRow, DataError
from data.reading.content import refuse_content
from data.reading.groups import Group
from data.reading.table import UNREADABLE, OnBroken, Row, Table, check_length

TITLE = "JSON lines"
GROUP_BYTES = 16 << 20
"""The size of a group of a plain file."""
SLACK_BYTES = 1 << 18
"""Bytes read beyond a group, for the end of its last line."""
FIRST_BYTES = 16 << 20
"""One of the rows in the first bytes of a file must have the column."""
PIECE_BYTES = 1 << 20
CUT_TOKEN = 64
"""A parse error this close to the end of a piece may be caused by the cut."""
HEAD_BYTES = 1 << 10
MOST_COLUMNS = 1000
"""How many column names are collected for an error."""
REMEDY = "Each row must be an object on a line of its own, or all rows one array of objects"
Parsed = tuple[int, Any, str]
"""The number of a row, its value, and its JSON."""


def groups(table: Table) -> list[Group]:
    """Ranges of lines; a compressed file or an array is one group."""
    file = table.file
    if file.is_compressed or file.size <= GROUP_BYTES or _is_array(table):
        return table.whole()
    found = []
    for index, begin in enumerate(range(0, file.size, GROUP_BYTES)):
        end = min(begin + GROUP_BYTES, file.size)
        found.append(Group(table.number, index, None, None, begin, end, end - begin))
    return found


def rows(table: Table, group: Group, on_broken: OnBroken) -> Iterator[Row]:
    """The rows of a group. A line that is not a row is reported and skipped."""
    for number, value, text in _parsed(table, group, on_broken):
        try:
            yield Row(number, _row(value, text, table.column))
        except BadRow as error:
            on_broken(number, error)


def columns(table: Table) -> dict[str, str]:
    """The keys of the first row, each with its Python type."""
    first = next(_first_rows(table), {})
    return {name: type(value).__name__ for name, value in first.items()}


class ColumnsSeen:
    """The columns of the rows that were read, for an error that lists them."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.has_column = False
        self.names: dict[str, None] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        """Note the columns of a row."""
        if not self.has_column:
            self.has_column = bool(self.table.column.among(row))
            self.names.update(dict.fromkeys(islice(row, MOST_COLUMNS - len(self.names))))

    def check(self) -> None:
        """Raise DataError if there were rows and none had the column."""
        if self.names and not self.has_column:
            raise self.table.column.missing(self.table.where, self.names)


def check_text(table: Table) -> None:
    """Raise DataError if no row that a file begins with has the column, or of a small file a text.

    A remote file is read for this only once.
    """
    table.kept("text", lambda: _checked(table), table.column.key)


def _checked(table: Table) -> bytes:
    """The check; the empty file that is kept records that it passed."""
    seen = ColumnsSeen(table)
    for row in _first_rows(table):
        with suppress(BadRow):  # whoever reads the row reports it
            if not table.column.document(row):
                seen.add(row)
                continue
        return b""
    file = table.file
    if seen.has_column and not file.is_compressed and file.size <= FIRST_BYTES:
        raise table.no_text()
    seen.check()
    return b""


def _first_rows(table: Table) -> Iterator[Mapping[str, Any]]:
    """The rows in the first `FIRST_BYTES`. Raises BrokenText for a broken row."""
    begin = Group(0, 0, None, None, 0, table.file.size, table.file.size)
    number = size = 0

    def refuse(number: int, error: BadRow) -> None:
        raise table.broken_row(begin, number, error) from error

    try:
        for number, value, text in _parsed(table, begin, refuse, SLACK_BYTES):
            try:
                yield _row(value, text, table.column)
            except BadRow as error:
                refuse(number, error)
            size += len(text)
            if size > FIRST_BYTES:
                return
    except UNREADABLE as error:
        if isinstance(error, DataError):
            raise
        raise table.unreadable(begin, number, error) from error


def _is_array(table: Table) -> bool:
    """Whether a plain file begins as an array."""
    return _begins_array(table.kept("head", lambda: bytes(table.read(0, HEAD_BYTES))))


def _begins_array(head: bytes) -> bool:
    return head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _parsed(
    table: Table, group: Group, on_broken: OnBroken, ahead: int | None = None
) -> Iterator[Parsed]:
    """The JSON values of a group."""
    if table.is_whole(group):
        content, head = table.open(ahead)
        if _begins_array(head):
            for number, (value, text) in enumerate(_elements_of(content), start=1):
                yield number, value, text
            return
        lines = _lines_of(content)
    else:
        lines = _plain_lines(table, group)
    for number, line in enumerate(lines, start=1):
        is_first = number == 1 and group.begin == 0
        if not (line := (line.removeprefix(codecs.BOM_UTF8) if is_first else line).strip()):
            continue
        # Bytes that are not UTF-8 are an error only in the columns that are read.
        text = line.decode(errors="surrogateescape")
        try:
            yield number, json.loads(text), text
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error
            on_broken(number, BadRow(f"it is not JSON ({reason}): {text!r:.40}", REMEDY))


def _row(value: Any, text: str, column: TextColumn) -> dict[str, Any]:
    """A row. Raises BadRow for a value that is not a row, or has a column twice that is read."""
    if isinstance(value, str):
        value = {DEFAULT_COLUMN: value}
    if not isinstance(value, dict):
        raise BadRow(f"it is not an object: {value!r:.40}", REMEDY)
    for name in column.among(value):
        if text.count(f'"{name}"') > 1 and _times(text, name) > 1:
            raise BadRow(f"it has {name} twice", "Leave one of them out")
    return value


def _times(text: str, name: str) -> int:
    """Number of occurrences of a key in an object."""
    pairs = json.loads(text, object_pairs_hook=list)
    return sum(key == name for key, _ in pairs)


def _plain_lines(table: Table, group: Group) -> Iterator[bytes]:
    """The lines that begin in a group."""
    first = max(0, group.begin - 1)  # a newline there: a line begins with the group
    data = table.read(first, group.end + SLACK_BYTES)
    if group.begin == 0:
        refuse_content(table.file.shown, bytes(data[:HEAD_BYTES]))
    begin = data.find(b"\n") + 1 if group.begin else 0
    if group.begin and not 0 < begin < group.end - first:
        return  # one line fills the group, and began before it
    last = group.end - 1 - first  # the first newline from here ends the last line
    end = data.find(b"\n", last)
    size = table.file.size
    if end < 0 and first + len(data) < size:
        data = bytearray(data)
        while end < 0 and first + len(data) < size:
            check_length(len(data) - last)
            seen, more = len(data), max(SLACK_BYTES, len(data) - last)
            data += table.read(first + seen, first + seen + more)
            end = data.find(b"\n", seen)
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


def _elements_of(content: IO[bytes]) -> Iterator[tuple[Any, str]]:
    """The elements of the array that a file consists of, each with its JSON.

    Raises ValueError for what is no JSON, and as reading does.
    """
    text = _ArrayText(content)
    text.take("[")
    first = True
    while text.next_character() != "]":
        if not first:
            text.take(",")
            text.next_character()
        first = False
        yield text.value()
    text.take("]")
    if text.next_character():
        raise ValueError("more data follows the end of its array")


class _ArrayText:
    """The part of a text that has been read and not yet parsed."""

    def __init__(self, content: IO[bytes]) -> None:
        self._content = content
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self._json = json.JSONDecoder()
        self._text, self._at = "", 0
        self._ended = False

    def next_character(self) -> str:
        """Skip whitespace and return the next character; empty at the end."""
        while True:
            self._at = WHITESPACE.match(self._text, self._at).end()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._read()

    def take(self, character: str) -> None:
        if self.next_character() != character:
            raise ValueError(
                f"its array is cut off or not JSON: {character} expected, but "
                f"{self._text[self._at : self._at + 40]!r}"
            )
        self._at += 1

    def value(self) -> tuple[Any, str]:
        """Parse the next value; returns it and its JSON."""
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except RecursionError as error:
                raise ValueError("an element is nested too deeply") from error
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated")
                is_cut |= error.pos > len(self._text) - CUT_TOKEN
                if self._ended or not is_cut:
                    raise ValueError(f"an element is not JSON ({error.msg})") from error
            else:
                if end < len(self._text) or self._ended:  # a number may continue
                    start, self._at = self._at, end
                    return value, self._text[start:end]
            self._read()

    def _read(self) -> None:
        """Read a piece as long as what is left, so that a long value is parsed only a few times."""
        left = self._text[self._at :]
        check_length(len(left))
        piece = self._content.read(max(PIECE_BYTES, len(left)))
        self._ended = not piece
        self._text, self._at = left + self._decoder.decode(piece, final=self._ended), 0
