"""Files of rows with a mistake, and the sentence that each gets from both readers."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from data.columns import TextColumn
from data.errors import DataError
from data.reading.access import Access
from data.reading.rows import list_source, read_group
from data.sources import open_source


def texts_of(reader, source, cache, column="text"):
    if reader == "prepared":
        return "".join(
            text for text, _ in open_source(str(source), TextColumn(column), cache).read()
        )
    access = Access(cache)
    listing = list_source(str(source), column, access)
    return "".join(text for group in listing.groups for text in read_group(listing, group, access))


def complaint(reader, source, cache, column="text"):
    with pytest.raises(DataError) as caught:
        texts_of(reader, source, cache, column)
    sentence = str(caught.value)
    assert len(sentence) < 1500
    return sentence


def lines(*rows):
    return "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows).encode()


def packed(table):
    into = pa.BufferOutputStream()
    parquet.write_table(table, into, row_group_size=2)
    return into.getvalue().to_pybytes()


def table(*arrays):
    return packed(pa.table({"text": pa.array(arrays)}))


A = {"text": "a"}


QUOTED = "Quote a field that has commas in it, or name every column"


LATIN = "text,n\na,1\nb,2\ncafé,3\n".encode("latin-1")


WRONG = {
    "a number": (
        "a.jsonl",
        lines(A, A, {"text": 3}),
        r"row 3 of a.jsonl .* int, not text: 3\. Convert it to text, remove the row",
    ),
    "a number in an array": (
        "a.json",
        json.dumps([A, {"text": 1.5}]).encode(),
        r"row 2 of a\.json .* holds float, not text: 1\.5\. Convert it to text",
    ),
    "after blank lines": ("a.jsonl", lines(A, "\n", "{\n"), "row 3 of a.jsonl .* not JSON"),
    "an array that is cut": (
        "a.json",
        b'[{"text": "a"}, {"te',
        "a.json cannot be read: Unterminated string",
    ),
    "GeoJSON": (
        "a.json",
        json.dumps({"type": "FeatureCollection", "features": [{"properties": A}]}).encode(),
        "text is not a column of .*a.json. Its columns: type, features",
    ),
    "more fields than the header": (
        "a.csv",
        b"text,n\na,1\nhello, world,2\n",
        f"row 2 of a.csv .* has 3 fields, and the header 2. {QUOTED}",
    ),
    "a stray quote": ("a.csv", b'text,n\na,1\n"b"c,2\n', "row 2 of a.csv .* quotes"),
    "a quote that never ends": ("a.csv", b'text,n\na,1\n"b,2\n', "row 2 of a.csv .* quotes"),
    "Latin-1": (
        "a.csv",
        LATIN,
        r"row 3 of a.csv .* byte 0xe9\. Convert the file to UTF-8",
    ),
    "semicolons": ("a.csv", b"n;text\n1;a\n", r"text is not a column .* Its columns: n;text\."),
    "no such column": ("a.csv", b"txt,n\na,1\n", r"Its columns: txt, n\. Did you mean txt\?"),
    "very many columns": (
        "a.jsonl",
        lines({f"column {number}": 1 for number in range(3000)}),
        "column 0, column 1, .* and 2,980 more",
    ),
    "a cut gzip": (
        "a.jsonl.gz",
        gzip.compress(lines(*[A] * 9))[:-9],
        "a.jsonl.gz cannot be read: Compressed file ended .* copy it again",
    ),
    "a cut gzip of CSV": (
        "a.csv.gz",
        gzip.compress(b"text\na\n")[:-9],
        "a.csv.gz cannot be read: Compressed file ended .* copy it again",
    ),
    "a number in Parquet": ("a.parquet", table(1, 2), "a.parquet holds int64, not text"),
    "a value that is nested too deeply": (
        "a.jsonl",
        lines(A, '{"n": ' + "[" * 10**5 + "]" * 10**5 + "}\n"),
        "row 2 of a.jsonl cannot be read: it is not JSON",
    ),
    "only empty texts in Parquet": ("a.parquet", table("", None, ""), "no row of a.parquet has"),
    "only nulls in Parquet": ("a.parquet", table(None, None), "no row of a.parquet has a text"),
    "not compressed": (
        "a.jsonl.gz",
        lines(A),
        r"a.jsonl.gz .*: Not a gzipped file .* or not what its name says",
    ),
}
