"""CSV and TSV: records of fields, after a header that names them.

Records are those of RFC 4180, which `csv` reads: quotes are doubled, and fields may have newlines
in them. So a file is one group: nobody knows whether a newline is in a field without reading what
is before it.
"""

from __future__ import annotations

import csv
import io
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
    # `csv` requires newline="". Bytes that are not UTF-8 are an error only in the columns that are
    # read, so they are kept here and checked there.
    lines = io.TextIOWrapper(table.open(), "utf-8-sig", errors="surrogateescape", newline="")
    delimiter = "\t" if suffixes(table.file.name)[0] == ".tsv" else ","
    records = filter(None, csv.reader(lines, delimiter=delimiter, strict=True))
    header = next(records, [])
    if header and not table.column.among(header):
        raise table.column.missing(table.where, header)
    for number, fields in enumerate(records, start=1):
        if len(fields) > len(header):  # its text may be cut
            yield (
                number,
                BadRow(
                    f"it has {len(fields):,} fields, and the header {len(header):,}",
                    "Quote a field that has separators in it, or name every column in the header",
                ),
            )
        else:
            yield number, dict(zip(header, fields, strict=False))
