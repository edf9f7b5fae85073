"""Each remedy in a sentence about data helps: the file is changed or the column named."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from data.reading.access import Access
from data.reading.rows import list_source, read_group
from wrong_rows import WRONG, complaint, lines, table, texts_of

A = {"text": "a"}
SKIPPABLE = (
    "a number",
    "a number in an array",
    "after blank lines",
    "more fields than the header",
    "a stray quote",
    "a quote that never ends",
    "Latin-1",
    "a value that is nested too deeply",
)


@pytest.mark.parametrize("case", SKIPPABLE)
def test_what_is_broken_is_left_out_where_the_sentence_says_so(tmp_path, case):
    name, content, _ = WRONG[case]
    (tmp_path / name).write_bytes(content)
    said = complaint("streamed", tmp_path / name, tmp_path / "cache")
    assert said.endswith("data.skip_broken=true leaves out what is broken.")
    warnings = []
    access = Access(tmp_path / "cache", warnings.append)
    listing = list_source(str(tmp_path / name), "text", access, skip_broken=True)
    found = [read_group(listing, group, access, True) for group in listing.groups]
    assert all({*texts} <= {"a\n", "b\n"} for texts in found)
    assert warnings


FOLLOWED = {
    "the column that is meant": (
        {"a.csv": b"txt,n\na,1\n"},
        "*",
        r"Did you mean (?P<column>\w+)\?",
        {},
        "a.csv",
    ),
    "a column of texts": (
        {"a.jsonl": lines({"text": 3, "body": "a"})},
        "*",
        r"name another column with data\.text_column",
        {"column": "body"},
        "a.jsonl",
    ),
    "a number written as a text": (
        {"a.jsonl": lines({"text": 3})},
        "*",
        r"Convert it to text",
        {"a.jsonl": lines({"text": "a"})},
        "a.jsonl",
    ),
    "a Parquet column written as texts": (
        {"a.parquet": table(1)},
        "*",
        r"convert this one to text",
        {"a.parquet": table("a")},
        "a.parquet",
    ),
    "a file without a text": (
        {"a.parquet": table("a"), "b.parquet": table(None)},
        "*",
        r"no row of b\.parquet has a text\. Leave the file out",
        {},
        "a.parquet",
    ),
    "files of two formats": (
        {"a.csv": b"text\na\n", "b.jsonl": lines(A)},
        "*",
        r"Name files of one format",
        {},
        "*.csv",
    ),
    "a folder": ({"a.txt": b"a\n"}, "", r"named by a pattern such as (?P<source>\*\.txt)", {}, ""),
    "commas in a field": (
        {"a.csv": b"text,n\nb, c,2\n"},
        "*",
        r"Quote a field that has commas in it",
        {"a.csv": b'text,n\n"a",2\n'},
        "a.csv",
    ),
    "columns with a name each": (
        {"a.csv": b"text,n\na, c,2\n"},
        "*",
        r"or name every column",
        {"a.csv": b"text,m,n\na, c,2\n"},
        "a.csv",
    ),
    "a name that says how it is compressed": (
        {"a.jsonl": gzip.compress(lines(A))},
        "*",
        r"Give it a name that ends in \.gz",
        {"a.jsonl.gz": gzip.compress(lines(A))},
        "a.jsonl.gz",
    ),
    "a text converted to UTF-8": (
        {"a.jsonl": lines(A).decode().encode("utf-16")},
        "*",
        "Convert it to UTF-8 first",
        {"a.jsonl": lines(A)},
        "a.jsonl",
    ),
    "a table by another name": (
        {"a.csv": table("a")},
        "*",
        r"Give it a name that ends in \.parquet",
        {"b.parquet": table("a")},
        "b.parquet",
    ),
    "a cut file that is left out": (
        {"a.jsonl": lines(A), "b.jsonl.gz": gzip.compress(lines(*[A] * 9))[:-9]},
        "*",
        r"copy it again, or leave it out",
        {},
        "*.jsonl",
    ),
    "rows in one array": (
        {"a.json": b'"a" "b"'},
        "*",
        r"Each row must be an object on a line of its own, or all rows one array",
        {"a.json": json.dumps([A]).encode()},
        "a.json",
    ),
    "rows in lines": (
        {"a.json": b"3\n"},
        "*",
        r"Each row must be an object on a line of its own",
        {"a.json": lines(A)},
        "a.json",
    ),
}
"""By case: files, the source that is refused, its advice, what that asks for (files written, or
another column), and the source that follows it."""


@pytest.mark.parametrize("case", FOLLOWED)
def test_a_remedy_about_files_and_columns_leads_to_the_texts(tmp_path, case):
    files, source, advice, changes, corrected = FOLLOWED[case]
    (folder := tmp_path / "texts").mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    said = complaint("prepared", folder / source, tmp_path / "cache")
    found = re.search(advice, said)
    assert found, said
    named = {"column": "text", "source": corrected} | {**changes, **found.groupdict()}
    for name in changes.keys() - {"column"}:
        (folder / name).write_bytes(changes[name])
    place = folder / named["source"]
    assert texts_of("prepared", place, tmp_path / "cache", named["column"]) == "a\n"
