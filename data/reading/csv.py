"""CSV and TSV: records of fields, after a header that names them.

Records are those of RFC 4180, which `csv` reads: quotes are doubled, and fields may have newlines
in them. So a file is one group: nobody knows whether a newline is in a field without reading what
is before it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import NamedTuple

from data.errors import BadRow, BrokenText
from data.reading.content import suffixes
from data.reading.groups import Group
from data.reading.table import MOST_ROW_BYTES, OnBroken, Row, Table

TITLE = "CSV"
DELIMITERS = {".csv": (",", "commas"), ".tsv": ("\t", "tabs")}
"""By extension, what separates fields, and its name."""
HEADER_BYTES = 1 << 16
"""Bytes requested to read a header."""

csv.field_size_limit(MOST_ROW_BYTES)  # of the process: the module has no other limit


class Opened(NamedTuple):
    """A file whose header has been read."""

    header: list[str]
    records: Iterator[list[str]]
    separators: str
    """What separates fields, in words."""


def groups(table: Table) -> list[Group]:
    """The file. Raises DataError if its header lacks the column."""
    return table.whole() if table.file.size and _opened(table, HEADER_BYTES).header else []


def rows(table: Table, group: Group, on_broken: OnBroken) -> Iterator[Row]:
    """The records after the header, without blank lines."""
    header, records, separators = _opened(table)
    number = 0
    while True:
        try:
            fields = next(records)
            if not fields:
                continue
            number += 1
            yield Row(number, _row(header, fields, separators))
        except StopIteration:
            return
        except csv.Error as error:
            number += 1
            reason = f"its quoting is not valid CSV ({error})"
            on_broken(number, BadRow(reason, 'Quote a field that has quotes: "say ""yes"""'))
        except BadRow as error:
            on_broken(number, error)


def columns(table: Table) -> dict[str, str]:
    """The names in the header."""
    return dict.fromkeys(_opened(table, HEADER_BYTES).header, "text")


def _opened(table: Table, ahead: int | None = None) -> Opened:
    """A file whose header has been read. Raises DataError if it lacks the column."""
    content, _ = table.open(ahead)
    # `csv` requires newline="". Bytes that are not UTF-8 are an error only in the columns that are
    # read, so they are kept here and checked there.
    lines = io.TextIOWrapper(content, "utf-8-sig", errors="surrogateescape", newline="")
    delimiter, separators = DELIMITERS[suffixes(table.file.name)[0]]
    records = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        header = next((fields for fields in records if fields), [])
    except csv.Error as error:
        raise BrokenText(
            f"data.source={table.source}: the header of {table.file.name} cannot be read: {error}."
        ) from error
    for name in table.column.find(table.where, header) if header else ():
        if header.count(name) > 1:
            raise table.twice(name)
    return Opened(header, records, separators)


def _row(header: list[str], fields: list[str], separators: str) -> dict[str, str]:
    """A row, which may have fewer fields than the header. Raises BadRow for one with more."""
    if len(fields) > len(header):
        raise BadRow(
            f"it has {len(fields):,} fields, and the header {len(header):,}",
            f"Quote a field that has {separators} in it, or name every column in the header",
        )
    return dict(zip(header, fields, strict=False))
