"""Each remedy in a sentence about data helps: the command is run, the file or the column named."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import shlex
import shutil
import subprocess
import zipfile

import pyarrow as pa
import pytest

from data.reading.access import Access
from data.reading.listing import list_source
from data.reading.rows import read_group
from wrong_rows import WRONG, complaint, lines, table, texts_of

TEXT = "naïve café\n" * 20
TABLE = "text,n\nnaïve café,1\na,2\n"
A = {"text": "a"}


def zstd(content):
    return pa.compress(content, "zstd", asbytes=True)


ENCODED = {
    **{
        f"{encoding} in {name}": (name, content.encode(encoding), content)
        for encoding in ("utf-16", "utf-32", "cp1252")
        for name, content in (("a.txt", TEXT), ("a b.csv", TABLE))
    },
    "packed UTF-16": ("a.csv.gz", gzip.compress(TABLE.encode("utf-16")), TABLE),
    "packed by xz": ("a.csv.xz", lzma.compress(TABLE.encode("utf-16")), TABLE),
    "packed by bzip2": ("a.csv.bz2", bz2.compress(TABLE.encode("utf-16")), TABLE),
    "packed by zstd": (
        "a.csv.zst",
        pa.compress(TABLE.encode("utf-16"), "zstd", asbytes=True),
        TABLE,
    ),
    "packed Latin-1": ("a.csv.gz", gzip.compress(TABLE.encode("latin-1")), TABLE),
    "gzip by another name": ("a.csv", gzip.compress(TABLE.encode()), TABLE),
    "bzip2 by another name": ("a.csv", bz2.compress(TABLE.encode()), TABLE),
    "xz by another name": ("a.txt", lzma.compress(TEXT.encode()), TEXT),
    "zstd by another name": ("a.txt", zstd(TEXT.encode()), TEXT),
}
"""By case: a file, its bytes, and the content that the advised command makes of it."""


@pytest.mark.parametrize("case", ENCODED)
def test_the_command_that_converts_a_file_makes_a_readable_one(tmp_path, case):
    name, content, expected = ENCODED[case]
    (tmp_path / name).write_bytes(content)
    said = complaint("prepared", tmp_path / name, tmp_path / "cache")
    command = re.search(r"(?:: )((?:iconv|gzip|bzip2|xz|zstd) .*> \S+?)\.?$", said)
    assert command, said
    tool = shlex.split(command[1])[0]
    if shutil.which(tool) is None:
        pytest.skip(f"there is no {tool}")
    before = {*tmp_path.iterdir()}
    subprocess.run(command[1], shell=True, cwd=tmp_path, check=True)
    (made,) = {*tmp_path.iterdir()} - before
    assert made.suffix == (".csv" if ".csv" in name else ".txt")
    assert made.read_text().lstrip("\ufeff") == expected
    read = expected if made.suffix == ".txt" else "naïve café\na\n"
    for reader in ("prepared", "streamed")[: 1 + (made.suffix == ".csv")]:
        assert texts_of(reader, made, tmp_path / "cache") == read


def test_the_command_that_unpacks_an_archive_makes_a_file(tmp_path):
    with zipfile.ZipFile(tmp_path / "packed.txt", "w") as opened:
        opened.writestr("inside.txt", TEXT)
    said = complaint("prepared", tmp_path / "packed.txt", tmp_path / "cache")
    command = said.partition("Unpack it first: ")[2]
    if shutil.which(shlex.split(command)[0]) is None:
        pytest.skip(f"there is no {command}")
    subprocess.run(command, shell=True, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert texts_of("prepared", tmp_path / "inside.txt", tmp_path / "cache") == TEXT


SKIPPABLE = (
    "a number",
    "a number in an array",
    "after blank lines",
    "a key twice",
    "an array that is cut",
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
    access = Access(tmp_path / "cache")
    listing = list_source(str(tmp_path / name), "text", access, skip_broken=True)
    found = [read_group(listing, group, access, True) for group in listing.groups]
    assert all({*one.texts} <= {"a\n", "b\n"} for one in found)
    assert any(one.broken for one in found)


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
        r"no row of b\.parquet has a text in text\. Leave the file out",
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
    "a folder": (
        {"a.txt": b"a\n"},
        "",
        r"named by a pattern such as (?P<source>\*\.txt)",
        {},
        "",
    ),
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
        {"a.jsonl.gz": lines(A)},
        "*",
        r"give it a name without \.gz",
        {"b.jsonl": lines(A)},
        "b.jsonl",
    ),
    "a table by another name": (
        {"a.csv": table("a")},
        "*",
        r"Rename it to a name that ends in \.parquet",
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
