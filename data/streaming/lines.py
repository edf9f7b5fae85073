"""JSON lines: the ranges of bytes that hold whole lines, and the text of each."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from data.columns import no_column
from data.errors import BrokenText, DataError
from data.streaming.access import Access
from data.streaming.file_range import FileRange
from data.streaming.files import format_of
from data.streaming.groups import Group, StreamFile

GROUP_BYTES = 16 << 20
"""Of a plain file, the bytes of a group."""
SLACK_BYTES = 1 << 18
"""Read with a group, for the end of its last line."""
PACKED_BYTES = 32 << 20
"""Of a compressed file, what is requested at once."""
PIECE_BYTES = 1 << 20
MOST_ROW_BYTES = 256 << 20


def line_groups(number: int, file: StreamFile) -> Iterator[Group]:
    """The groups of a plain file."""
    for index, begin in enumerate(range(0, file.size, GROUP_BYTES)):
        end = min(begin + GROUP_BYTES, file.size)
        yield Group(number, index, None, None, begin, end, end - begin)


def rows_of(access: Access, source: str, file: StreamFile, group: Group) -> Iterator[bytes]:
    """The lines of a group that are not blank, each of which is a row.

    Raises BrokenText for one that is too long, and OSError for what cannot be decompressed.
    """
    compression = format_of(file.name)[1]
    if compression is None:
        lines = _plain_lines(access, source, file, group)
    else:
        lines = _packed_lines(access, source, file, compression)
    for number, line in enumerate(lines):
        is_first = number == 0 and group.begin == 0
        if line := (line.removeprefix(codecs.BOM_UTF8) if is_first else line).strip():
            yield line


def _plain_lines(access: Access, source: str, file: StreamFile, group: Group) -> Iterator[bytes]:
    first = max(0, group.begin - 1)  # a newline there: a line begins with the group
    data = access.read(source, file, first, group.end + SLACK_BYTES)
    begin = data.find(b"\n") + 1 if group.begin else 0
    if group.begin and not 0 < begin < group.end - first:
        return  # one line fills the group, and began before it
    last = group.end - 1 - first  # the first newline from here ends the last line
    end = data.find(b"\n", last)
    if end < 0 and first + len(data) < file.size:
        data = bytearray(data)
        while end < 0 and first + len(data) < file.size:
            _check_length(len(data) - last)
            seen, more = len(data), max(SLACK_BYTES, len(data) - last)
            data += access.read(source, file, first + seen, first + seen + more)
            end = data.find(b"\n", seen)
    whole = bytes(data[begin : end if end >= 0 else len(data)])
    for line in whole.split(b"\n"):
        _check_length(len(line))
        yield line


def _packed_lines(
    access: Access, source: str, file: StreamFile, compression: str
) -> Iterator[bytes]:
    packed = FileRange(access, source, file, ahead=PACKED_BYTES)
    rest = bytearray()
    with _decompressed(packed, compression) as opened:
        while piece := _read_piece(opened):
            *lines, last = piece.split(b"\n")
            for line in lines:
                yield bytes(rest) + line
                rest.clear()
            rest += last
            _check_length(len(rest))
    yield bytes(rest)


def _decompressed(packed: FileRange, compression: str) -> Any:
    if compression == "gzip":  # pyarrow refuses zero bytes after it, which gzip ignores
        return gzip.GzipFile(fileobj=packed)
    return pa.CompressedInputStream(pa.PythonFile(packed, mode="r"), compression)


def _read_piece(opened: Any) -> bytes:
    try:
        return bytes(opened.read(PIECE_BYTES))
    except (EOFError, zlib.error) as error:
        raise OSError(str(error)) from error


def _check_length(size: int) -> None:
    if size > MOST_ROW_BYTES:
        raise BrokenText(f"a row has more than {MOST_ROW_BYTES / 1e6:,.0f} MB")


def value_of(line: bytes, column: str) -> str | None:
    """The text of a line; None if it has none. Raises BrokenText for a line that is no row."""
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        raise BrokenText(f"a line is not UTF-8: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise BrokenText(f"a line is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise BrokenText(f"a line is not an object: {row!r:.40}")
    value = row.get(column)
    if not isinstance(value, str | None):
        raise BrokenText(f"{column} is not text, but {type(value).__name__}: {value!r:.40}")
    if value is not None and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BrokenText(f"{column} is not UTF-8: {error.reason}") from error
    return value


def first_row(access: Access, source: str, file: StreamFile) -> dict[str, Any] | None:
    """The first row of a file; None if its first line is blank. Raises BrokenText for no object."""
    first_line = Group(0, 0, None, None, 0, 1, 1)
    try:
        for line in rows_of(access, source, file, first_line):
            if isinstance(row := json.loads(line), dict):
                return row
            raise BrokenText(f"it is not an object: {row!r:.40}")
        return None
    except (ValueError, OSError, RecursionError) as error:
        if isinstance(error, DataError) and not isinstance(error, BrokenText):
            raise
        raise BrokenText(
            f"data.source={source}: the first row of {file.name} cannot be read as JSON: {error}. "
            "Each line has to be an object."
        ) from error


def check_first_row(access: Access, source: str, column: str, file: StreamFile) -> None:
    """Raise DataError if the first row of a file has no such column, or is none."""
    row = first_row(access, source, file)
    if row is not None and column not in row:
        raise no_column(source, column, list(row))
