"""Errors of rows, with the file and the number of the row as a person counts.

Rows count from 1: of JSON lines the lines, of an array its elements, of CSV the records after the
header, of Parquet the rows of the file.
"""

from __future__ import annotations

import shlex
from pathlib import PurePosixPath

from data.columns import Column
from data.errors import BadRow, BrokenText
from data.reading.access import URL
from data.reading.content import MOST_GROUP_BYTES
from data.reading.groups import Group, StreamFile

PIECE_BYTES = 1 << 20
LONG_WINDOW = "Frame requires too much memory"
"""What Zstandard says of a file that was compressed with more than `--long=27`."""


def broken_row(
    source: str, file: StreamFile, group: Group, number: int, error: BadRow
) -> BrokenText:
    """The error for a row of a group that is no document."""
    row = row_in_words(file, group, number)
    remedy = error.remedy_for(file.name if URL.match(file.url) else file.url)
    return BrokenText(f"data.source={source}: {row} cannot be read: {reason_of(error)}. {remedy}.")


def unreadable(
    source: str, file: StreamFile, group: Group, after: int, error: Exception
) -> BrokenText:
    """The error for a group that cannot be decoded after so many of its rows."""
    what = group_in_words(file, group)
    if after:
        what = f"the part after {row_in_words(file, group, after)}"
    remedy = "It is damaged or incomplete: copy it again, or leave it out"
    if LONG_WINDOW in str(error):
        packed = shlex.quote(file.name if URL.match(file.url) else file.url)
        name = shlex.quote(f"short-{PurePosixPath(file.name).name}")
        remedy = f"Recompress it: zstd -dc --long=31 {packed} | zstd > {name}"
    return BrokenText(f"data.source={source}: {what} cannot be read: {reason_of(error)}. {remedy}.")


def no_text(source: str, column: Column, file: StreamFile) -> BrokenText:
    """The error for a file of which no row has a text."""
    return BrokenText(
        f"data.source={source}: no row of {file.name} has a text in {column.shown}. Leave the file "
        "out, or name another column with data.text_column."
    )


def twice(source: str, file: StreamFile, name: str) -> BrokenText:
    """The error for a table with two columns of the name that is read."""
    return BrokenText(f"data.source={source}: {file.name} has {name} twice. Rename one column.")


def too_large(source: str, file: StreamFile, group: Group) -> BrokenText:
    """The error for a group that does not fit into memory."""
    return BrokenText(
        f"data.source={source}: the text of {group_in_words(file, group)} has more than "
        f"{MOST_GROUP_BYTES / 1e9:.0f} GB, and is read as a whole. Split it into several files "
        "(Parquet: smaller row groups), or set data.streaming=false."
    )


def row_in_words(file: StreamFile, group: Group, number: int, counted: bool = True) -> str:
    """Row `number` of a group as a person finds it in its file.

    Of lines in the midst of a file, those before are `counted`, but not those of a remote one.
    """
    if group.first_row is not None:
        return f"row {group.first_row + number:,} of {file.name}"
    if group.begin == 0:
        return f"row {number:,} of {file.name}"
    if URL.match(file.url) or not counted:
        return f"row {number:,} of {file.name} from byte {group.begin:,} on"
    return f"row {_lines_before(file.url, group.begin) + number:,} of {file.name}"


def group_in_words(file: StreamFile, group: Group) -> str:
    """The rows of a group."""
    if group.first_row is not None and group.rows is not None:
        first, last = group.first_row + 1, group.first_row + group.rows
        return f"rows {first:,} to {last:,} of {file.name}"
    if (group.begin, group.end) == (0, file.size):
        return file.name
    return f"the rows of {file.name} from byte {group.begin:,} to {group.end:,}"


def reason_of(error: Exception) -> str:
    """The first line of an error, without a full stop."""
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def _lines_before(path: str, end: int) -> int:
    """How many lines begin before byte `end`, which is not 0."""
    lines, left = 1, end - 1
    with open(path, "rb") as opened:
        while left and (piece := opened.read(min(PIECE_BYTES, left))):
            lines += piece.count(b"\n")
            left -= len(piece)
    return lines
