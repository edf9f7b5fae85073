"""CSV and TSV: records of fields, after a header that names them.

Records are those of RFC 4180, which `csv` reads: quotes are doubled, and fields may have newlines
in them. So a file is one group: nobody knows whether a newline is in a field without reading what
is before it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from data.errors import BadRow
from data.reading.formats import suffixes
from data.reading.groups import Group
from data.reading.table import MOST_ROW_BYTES, Row, Table

DELIMITERS = {".csv": (",", "commas"), ".tsv": ("\t", "tabs")}
"""By extension, what separates fields, and its name."""

csv.field_size_limit(MOST_ROW_BYTES)  # of the process: the module has no other limit


def groups(table: Table) -> list[Group]:
    """The file. Raises DataError if its header lacks the column."""
    return table.whole() if table.unopened or columns(table) else []


def rows(table: Table, group: Group) -> Iterator[Row]:
    """The records after the header, without blank lines."""
    header, records = _opened(table)
    number = 0
    while True:
        try:
            fields = next(records)
        except StopIteration:
            return
        except csv.Error as error:
            number += 1
            reason = f"its quoting is not valid CSV ({error})"
            yield number, BadRow(reason, 'Quote a field that has quotes: "say ""yes"""')
            continue
        if fields:
            number += 1
            yield number, _row(header, fields, table)


def columns(table: Table) -> list[str]:
    """The names in the header. Raises DataError if it lacks the column."""
    return _opened(table)[0]


def _opened(table: Table) -> tuple[list[str], Iterator[list[str]]]:
    """The header, and the records after it. Raises DataError if it lacks the column."""
    content, _ = table.open()
    # `csv` requires newline="". Bytes that are not UTF-8 are an error only in the columns that are
    # read, so they are kept here and checked there.
    lines = io.TextIOWrapper(content, "utf-8-sig", errors="surrogateescape", newline="")
    delimiter, _ = DELIMITERS[suffixes(table.file.name)[0]]
    records = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        header = next((fields for fields in records if fields), [])
    except csv.Error as error:
        name = table.file.name
        raise table.broken(f"the header of {name} cannot be read: {error}.") from error
    if header:
        table.column.find(table.where, header)
    return header, records


def _row(header: list[str], fields: list[str], table: Table) -> dict[str, str] | BadRow:
    """A row, which may have fewer fields than the header, but not more."""
    if len(fields) <= len(header):
        return dict(zip(header, fields, strict=False))
    _, separators = DELIMITERS[suffixes(table.file.name)[0]]
    return BadRow(
        f"it has {len(fields):,} fields, and the header {len(header):,}",
        f"Quote a field that has {separators} in it, or name every column in the header",
    )
