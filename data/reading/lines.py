"""JSON lines and JSON arrays: the ranges of bytes that hold whole rows, and each row."""

from __future__ import annotations

import codecs
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import IO, Any

from data.columns import DEFAULT_COLUMN, Column
from data.errors import BadRow, DataError
from data.reading.access import URL, Access
from data.reading.array import elements_of
from data.reading.content import (
    UNREADABLE,
    check_length,
    is_compressed,
    open_content,
    whole_file,
)
from data.reading.formats import refuse_content
from data.reading.groups import Group, StreamFile
from data.reading.kept import digest_of, keep, kept
from data.reading.places import broken_row, no_text, unreadable
from data.reading.table import OnBroken, Row

GROUP_BYTES = 16 << 20
"""Of a plain file, the bytes of a group."""
SLACK_BYTES = 1 << 18
"""Read with a group, for the end of its last line."""
FIRST_BYTES = 16 << 20
"""Of a file, the rows of which one has to have the column."""
PIECE_BYTES = 1 << 20
HEAD_BYTES = 1 << 10
MOST_COLUMNS = 1000
"""Names that are collected for an error."""
MOST_ADVISED_BYTES = 64 << 20
"""Of a file that is read whole to find out where its rows may be."""
REMEDY = "Each row must be an object on a line of its own, or all rows one array of objects"
Parsed = tuple[int, int, Any, str]
"""Index and number of a row, its value, and its JSON."""


class Lines:
    """Objects of JSON, one a line; or one array of them. A text alone is a row with that text."""

    def groups(
        self, access: Access, source: str, column: Column, number: int, file: StreamFile
    ) -> list[Group]:
        """Ranges of lines; a compressed file and an array are one group."""
        if is_compressed(file) or file.size <= GROUP_BYTES or _is_array(access, source, file):
            return whole_file(number, file)
        groups = []
        for index, begin in enumerate(range(0, file.size, GROUP_BYTES)):
            end = min(begin + GROUP_BYTES, file.size)
            groups.append(Group(number, index, None, None, begin, end, end - begin))
        return groups

    def rows(
        self,
        access: Access,
        source: str,
        column: Column,
        file: StreamFile,
        group: Group,
        on_broken: OnBroken,
    ) -> Iterator[Row]:
        """The rows of a group. A line that is no row is reported and passed over."""

        def report(number: int, error: BadRow) -> None:
            if number == 1 and group.begin == 0:
                error.remedy = _advice(access, source, file) or error.remedy
            on_broken(number, error)

        for index, number, value, text in _parsed(access, source, file, group, report):
            try:
                yield Row(index, number, _row(value, text, column))
            except BadRow as error:
                report(number, error)

    def columns(
        self, access: Access, source: str, column: Column, file: StreamFile
    ) -> dict[str, str]:
        """The keys of the first row, each with its Python type."""
        first = next(_first_rows(access, source, column, file), {})
        return {name: type(value).__name__ for name, value in first.items()}


def check_text(access: Access, source: str, column: Column, file: StreamFile) -> None:
    """Raise DataError if no row that a file begins with has the column, or of a small file a text.

    A remote file is read for this only once.
    """
    path = access.cache_dir / "streams" / f"{digest_of(file.url, file.version, column.key)}.text"
    if kept(path) is not None:
        return
    seen: dict[str, None] = {}
    has_column = False
    for row in _first_rows(access, source, column, file):
        with suppress(BadRow):  # whoever reads the row reports it
            if not column.document(row):
                has_column |= bool(column.among(row))
                seen.update(dict.fromkeys(islice(row, MOST_COLUMNS - len(seen))))
                continue
        if URL.match(file.url):
            keep(path, b"")
        return
    if has_column and not is_compressed(file) and file.size <= FIRST_BYTES:
        raise no_text(source, column, file)
    if seen and not has_column:
        raise without_column(access, source, column, file, seen)


def without_column(
    access: Access, source: str, column: Column, file: StreamFile, seen: Iterable[str]
) -> DataError:
    """The error for a file none of whose rows has the column; `seen` are those that they have."""
    error = column.missing(file.of(source), seen)
    advice = _advice(access, source, file)
    return DataError(f"{error} {advice}.") if advice else error


def _first_rows(
    access: Access, source: str, column: Column, file: StreamFile
) -> Iterator[Mapping[str, Any]]:
    """The rows that a file begins with, of `FIRST_BYTES`. Raises BrokenText for what is none."""
    begin = Group(0, 0, None, None, 0, file.size, file.size)
    number = size = 0

    def refuse(number: int, error: BadRow) -> None:
        if number == 1:
            error.remedy = _advice(access, source, file) or error.remedy
        raise broken_row(source, file, begin, number, error) from error

    try:
        for _, number, value, text in _parsed(access, source, file, begin, refuse, SLACK_BYTES):
            try:
                yield _row(value, text, column)
            except BadRow as error:
                refuse(number, error)
            size += len(text)
            if size > FIRST_BYTES:
                return
    except UNREADABLE as error:
        if isinstance(error, DataError):
            raise
        raise unreadable(source, file, begin, number, error) from error


def _is_array(access: Access, source: str, file: StreamFile) -> bool:
    """Whether a plain file begins as an array; of a remote file, kept on the disk."""
    path = access.cache_dir / "streams" / f"{digest_of(file.url, file.version)}.head"
    if (head := kept(path)) is None:
        head = bytes(access.read(source, file, 0, HEAD_BYTES))
        if URL.match(file.url):
            keep(path, head)
    return _begins_array(head)


def _begins_array(head: bytes) -> bool:
    return head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _parsed(
    access: Access,
    source: str,
    file: StreamFile,
    group: Group,
    on_broken: OnBroken,
    ahead: int | None = None,
) -> Iterator[Parsed]:
    """The values of a group that are JSON."""
    if (group.begin, group.end) == (0, file.size):
        content, head = open_content(access, source, file, ahead)
        if _begins_array(head):
            for index, (value, text) in enumerate(elements_of(content)):
                yield index, index + 1, value, text
            return
        lines = _lines_of(content)
    else:
        lines = _plain_lines(access, source, file, group)
    index = 0
    for number, line in enumerate(lines, start=1):
        is_first = number == 1 and group.begin == 0
        if not (line := (line.removeprefix(codecs.BOM_UTF8) if is_first else line).strip()):
            continue
        # Bytes that are not UTF-8 matter in the column that is read, and not in the others.
        text = line.decode(errors="surrogateescape")
        try:
            yield index, number, json.loads(text), text
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error
            on_broken(number, BadRow(f"it is not JSON ({reason}): {text!r:.40}", REMEDY))
        index += 1


def _row(value: Any, text: str, column: Column) -> dict[str, Any]:
    """A row. Raises BadRow for what is none, or has a column that is read twice."""
    if isinstance(value, str):
        value = {DEFAULT_COLUMN: value}
    if not isinstance(value, dict):
        raise BadRow(f"it is not an object: {value!r:.40}", REMEDY)
    for name in column.among(value):
        if text.count(f'"{name}"') > 1 and _times(text, name) > 1:
            raise BadRow(f"it has {name} twice", "Leave one of them out")
    return value


def _times(text: str, name: str) -> int:
    """How often an object has a key."""
    pairs = json.loads(text, object_pairs_hook=list)
    return sum(key == name for key, _ in pairs)


def _advice(access: Access, source: str, file: StreamFile) -> str:
    """What to do with a file that is one object with lists, as GeoJSON is; empty for others."""
    if file.size > MOST_ADVISED_BYTES:
        return ""
    try:
        whole = json.loads(open_content(access, source, file)[0].read(MOST_ADVISED_BYTES))
    except (*UNREADABLE, RecursionError):
        return ""
    values = whole.items() if isinstance(whole, dict) else ()
    names = [
        name
        for name, value in values
        if isinstance(value, list) and value and isinstance(value[0], dict)
    ]
    if not names:
        return ""
    rows = shlex.quote(f".[{json.dumps(names[0])}][]")
    return (
        f"The file is one object, whose rows seem to be in {names[0]}: "
        f"jq -c {rows} {shlex.quote(file.name)} > rows.jsonl"
    )


def _plain_lines(access: Access, source: str, file: StreamFile, group: Group) -> Iterator[bytes]:
    first = max(0, group.begin - 1)  # a newline there: a line begins with the group
    data = access.read(source, file, first, group.end + SLACK_BYTES)
    if group.begin == 0:
        refuse_content(file.name if URL.match(file.url) else file.url, bytes(data[:HEAD_BYTES]))
    begin = data.find(b"\n") + 1 if group.begin else 0
    if group.begin and not 0 < begin < group.end - first:
        return  # one line fills the group, and began before it
    last = group.end - 1 - first  # the first newline from here ends the last line
    end = data.find(b"\n", last)
    if end < 0 and first + len(data) < file.size:
        data = bytearray(data)
        while end < 0 and first + len(data) < file.size:
            check_length(len(data) - last)
            seen, more = len(data), max(SLACK_BYTES, len(data) - last)
            data += access.read(source, file, first + seen, first + seen + more)
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
