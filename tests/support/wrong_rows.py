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
from data.reading.rows import list_source, open_source, read_group

READERS = ("prepared", "streamed")


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


def packed(table, group=2):
    into = pa.BufferOutputStream()
    parquet.write_table(table, into, row_group_size=group)
    return into.getvalue().to_pybytes()


def table(*arrays):
    return packed(pa.table({"text": pa.array(arrays)}))


def without_utf8():
    values = pa.array([b"a"] * 7 + [b"caf\xe9"], pa.binary()).view(pa.string())
    return packed(pa.table({"text": values}), 3)


def with_a_damaged_page():
    content = bytearray(packed(pa.table({"text": [f"row {n}" for n in range(400)]}), 400))
    content[40:80] = bytes(40)
    return bytes(content)


A = {"text": "a"}
WRONG = [
    # JSON lines and arrays.
    ("a.jsonl", lines(A, A, {"text": 3}), r"row 3 of a.jsonl .* int, not text: 3\. Convert it"),
    ("a.jsonl", lines(A, {"text": ["a"]}), "row 2 of a.jsonl .* holds list, not text"),
    ("a.jsonl", lines(A, "3\n"), "row 2 of a.jsonl .* not an object: 3.*on a line of its own"),
    ("a.jsonl", lines(A, "\n", "{\n"), "row 3 of a.jsonl .* not JSON"),
    ("a.jsonl", lines(A, "[" * 10**5 + "\n"), "row 2 of a.jsonl .* not JSON"),
    ("a.jsonl", lines(A, '{"text": "\\ud800"}\n'), "row 2 of a.jsonl .* surrogates not allowed"),
    ("a.jsonl", lines(A) + b'{"text": "caf\xe9"}\n', "row 2 .* UTF-8: byte 0xe9. Convert the file"),
    ("a.jsonl", lines({"body": "a"}), "text is not a column of .*a.jsonl. Its columns: body"),
    ("a.jsonl", lines({f"c{n}": 1 for n in range(3000)}), r"c0, c1, .*, c19\. Name one of them"),
    ("a.json", json.dumps([A, {"text": 1.5}]).encode(), "row 2 of a.json .* holds float, not text"),
    ("a.json", b'[{"text": "a"}, {"te', "a.json cannot be read: Unterminated string"),
    ("a.json", b'{"type": "b",\n "rows": []}', "row 1 of a.json .* or all rows one array"),
    # CSV.
    (
        "a.csv",
        b"text,n\na,1\nhello, world,2\n",
        "row 2 of a.csv .* 3 fields, and the header 2.*Quo",
    ),
    (
        "a.csv",
        b'text,n\na,1\n"b"c,2\n',
        "row 2 of a.csv .* quotes",
    ),
    ("a.csv", b'text,n\na,1\n"b,2\n', "row 2 of a.csv .* quotes"),
    ("a.csv", "text,n\na,1\ncafé,3\n".encode("latin-1"), r"row 2 .* byte 0xe9\. Convert the file"),
    ("a.csv", b'"text"x,n\na,1\n', "a.csv cannot be read: ',' expected"),
    ("a.csv", b"n;text\n1;a\n", r"text is not a column .* Its columns: n;text\."),
    # Parquet.
    ("a.parquet", table(1, 2), "row 1 of a.parquet .* holds int, not text"),
    ("a.parquet", table([{"role": "user"}]), "row 1 of a.parquet .* holds list, not text"),
    ("a.parquet", packed(pa.table({"body": ["a"]})), "text is not a column .* Its columns: body"),
    ("a.parquet", table("a")[:-9], "a.parquet cannot be read: "),
    ("a.parquet", b"PAR1 and no more", "a.parquet cannot be read: .* Git LFS pointer"),
    ("a.parquet", without_utf8(), "a.parquet.* cannot be read: byte 0xe9"),
    ("a.parquet", with_a_damaged_page(), "a.parquet.* cannot be read: "),
    # Compressed.
    (
        "a.jsonl.gz",
        gzip.compress(lines(*[A] * 9), mtime=0)[:-9],
        "a.jsonl.gz .*: Compressed file ended .*",
    ),
    ("a.jsonl.gz", lines(A), "a.jsonl.gz .*: Not a gzipped file .* or not what its name says"),
    ("a.txt", b"caf\xe9", "a.txt cannot be read: byte 0xe9 is not UTF-8 .* convert"),
]
"""Names, contents, and what is said of each."""
