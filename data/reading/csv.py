"""CSV and TSV: records of fields, after a header that names them.

Records are those of RFC 4180, which `csv` reads: quotes are doubled, and fields may have newlines
in them. So a file is one group: nobody knows whether a newline is in a field without reading what
is before it.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator

from data.errors import BadRow
from data.reading.formats import suffixes
from data.reading.groups import Group
from data.reading.table import Row, Table

csv.field_size_limit(sys.maxsize)  # of the process: it refuses long texts otherwise


def groups(table: Table) -> list[Group]:
    """The file."""
    return table.whole()


def rows(table: Table, group: Group) -> Iterator[Row]:
    """The records after the header, without blank lines. Raises DataError without the column."""
    # Bytes that are not UTF-8 are an error only in the columns that are read, so they are kept here
    # and checked there.
    lines = table.open_text("surrogateescape")
    delimiter = "\t" if suffixes(table.file.name)[0] == ".tsv" else ","
    records = csv.reader(lines, delimiter=delimiter, strict=True)
    header = next(filter(None, records), [])
    if header and not table.column.among(header):
        raise table.column.missing(table.where, header)
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
            yield number, _row(header, fields)


def _row(header: list[str], fields: list[str]) -> dict[str, str] | BadRow:
    """A row, which may have fewer fields than the header, but not more."""
    if len(fields) <= len(header):
        return dict(zip(header, fields, strict=False))
    return BadRow(  # its text may be cut
        f"it has {len(fields):,} fields, and the header {len(header):,}",
        "Quote a field that has separators in it, or name every column in the header",
    )
