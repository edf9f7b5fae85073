"""CSV and TSV: records of fields, after a header that names them.

Records are those of RFC 4180, which `csv` reads: quotes are doubled, and fields may have newlines
in them. So a file is one group: nobody knows whether a newline is in a field without reading what
is before it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from data.errors import BadRow, BrokenText
from data.reading.content import suffixes
from data.reading.groups import Group
from data.reading.table import MOST_ROW_BYTES, OnBroken, Row, Table

TITLE = "CSV"
DELIMITERS = {".csv": (",", ";", "\t"), ".tsv": ("\t",)}
"""By extension, the possible delimiters. The first that gives the header the columns wins."""
HEADER_BYTES = 1 << 16
"""Bytes requested to read a header."""
NAMES = {",": "commas", ";": "semicolons", "\t": "tabs"}

csv.field_size_limit(MOST_ROW_BYTES)  # of the process: the module has no other limit


class Opened(NamedTuple):
    """A file whose header has been read."""

    header: list[str]
    records: Iterator[list[str]]
    delimiter: str


def groups(table: Table) -> list[Group]:
    """The file. Raises DataError if its header lacks the column."""
    return table.whole() if table.file.size and _opened(table, HEADER_BYTES).header else []


def rows(table: Table, group: Group, on_broken: OnBroken) -> Iterator[Row]:
    """The records after the header, without blank lines."""
    header, records, delimiter = _opened(table)
    index = -1
    while True:
        try:
            fields = next(records)
            if not fields:
                continue
            index += 1
            yield Row(index, index + 1, _row(header, fields, delimiter))
        except StopIteration:
            return
        except csv.Error as error:
            index += 1
            reason = f"its quoting is not valid CSV ({error})"
            on_broken(index + 1, BadRow(reason, 'Quote a field that has quotes: "say ""yes"""'))
        except BadRow as error:
            on_broken(index + 1, error)


def columns(table: Table) -> dict[str, str]:
    """The names in the header."""
    return dict.fromkeys(_opened(table, HEADER_BYTES).header, "text")


def _opened(table: Table, ahead: int | None = None) -> Opened:
    """A file whose header has been read. Raises DataError if it lacks the column."""
    content, _ = table.open(ahead)
    # `csv` requires newline="". Bytes that are not UTF-8 are an error only in the columns that are
    # read, so they are kept here and checked there.
    lines = io.TextIOWrapper(content, "utf-8-sig", errors="surrogateescape", newline="")
    beginning: list[str] = []
    delimiters = DELIMITERS[suffixes(table.file.name)[0]]
    try:
        headers = {delimiters[0]: _header(_recorded(lines, beginning), delimiters[0])}
        headers |= {one: _header(iter(beginning), one) for one in delimiters[1:]}
        is_there = (one for one in delimiters if table.column.among(headers[one]))
        delimiter = next(is_there, delimiters[0])
        records = csv.reader(chain(beginning, lines), delimiter=delimiter, strict=True)
        next((fields for fields in records if fields), None)
    except csv.Error as error:
        raise BrokenText(
            f"data.source={table.source}: the header of {table.file.name} cannot be read: {error}."
        ) from error
    header = headers[delimiter]
    for name in table.column.find(table.where, header) if header else ():
        if header.count(name) > 1:
            raise table.twice(name)
    return Opened(header, records, delimiter)


def _recorded(lines: Iterable[str], into: list[str]) -> Iterator[str]:
    for line in lines:
        into.append(line)
        yield line


def _header(lines: Iterator[str], delimiter: str) -> list[str]:
    """The first record that is not blank; empty if there is none."""
    return next((fields for fields in csv.reader(lines, delimiter=delimiter) if fields), [])


def _row(header: list[str], fields: list[str], delimiter: str) -> dict[str, str]:
    """A row, which may have fewer fields than the header. Raises BadRow for one with more."""
    if len(fields) > len(header):
        raise BadRow(
            f"it has {len(fields):,} fields, and the header {len(header):,}",
            f"Quote a field that has {NAMES[delimiter]} in it, or name every column in the header",
        )
    return dict(zip(header, fields, strict=False))
