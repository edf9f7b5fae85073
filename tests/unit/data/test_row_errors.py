"""What is wrong with data is said with its file, its row and a remedy, prepared and streamed."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
import subprocess

import pyarrow as pa
import pytest
from pyarrow import parquet

from data.columns import TextColumn
from data.errors import DataError
from data.reading.access import Access
from data.reading.listing import list_source
from data.reading.rows import read_group
from data.sources import open_source

READERS = ("prepared", "streamed")


def texts_of(reader, source, cache, column="text"):
    if reader == "prepared":
        pieces = open_source(str(source), TextColumn(column), cache).read()
        return "".join(piece["text"] for piece in pieces)
    access = Access(cache)
    listing = list_source(str(source), column, access)
    texts = [read_group(listing, group, access).texts for group in listing.groups]
    return "".join(text for group in texts for text in group)


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
LONG_ZSTD = bytes.fromhex("28b52ffd04a8010000")
"""A header that asks for a window of 2 GB, as `zstd --long=31` writes it."""
LATIN = "text,n\na,1\nb,2\ncafé,3\n".encode("latin-1")
WRONG = {
    "a number": ("a.jsonl", lines(A, A, {"text": 3}), "row 3 of a.jsonl .* int, not text: 3.* jq"),
    "a number in an array": (
        "a.json",
        json.dumps([A, {"text": 1.5}]).encode(),
        r"row 2 of a\.json .* holds float, not text: 1\.5\. Convert it to text",
    ),
    "after blank lines": ("a.jsonl", lines(A, "\n", "{\n"), "row 3 of a.jsonl .* not JSON"),
    "a key twice": (
        "a.jsonl",
        lines(A, '{"text": "a", "text": "b"}\n'),
        "row 2 of a.jsonl .* has text twice",
    ),
    "an array that is cut": ("a.json", b'[{"text": "a"}, {"te', "the part after row 1 of a.json"),
    "GeoJSON": (
        "a.json",
        json.dumps({"type": "FeatureCollection", "features": [{"properties": A}]}).encode(),
        r"rows seem to be in features: jq -c '\.\[\"features\"\]\[\]' a\.json > rows\.jsonl",
    ),
    "GeoJSON of several lines": (
        "a.json",
        json.dumps({"features": [A]}, indent=1).encode(),
        "row 1 of a.json .* not JSON .*rows seem to be in features",
    ),
    "more fields than the header": (
        "a.csv",
        b"text,n\na,1\nhello, world,2\n",
        f"row 2 of a.csv .* has 3 fields, and the header 2. {QUOTED}",
    ),
    "a stray quote": ("a.csv", b'text,n\na,1\n"b"c,2\n', "row 2 of a.csv .* quotes"),
    "a quote that never ends": ("a.csv", b'text,n\na,1\n"b,2\n', "row 2 of a.csv .* quotes"),
    "Latin-1": ("a.csv", LATIN, r"row 3 of a.csv .* byte 0xe9\. Convert .* CP1252 .* > utf8\.csv"),
    "UTF-16": ("a.csv", "text\na\n".encode("utf-16"), r"UTF-16\. .* iconv -f UTF-16 .* utf8\.csv"),
    "no such column": ("a.csv", b"txt,n\na,1\n", r"Its columns: txt, n\. Did you mean txt\?"),
    "very many columns": (
        "a.jsonl",
        lines({f"column {number}": 1 for number in range(3000)}),
        "column 0, column 1, .* and 980 more",
    ),
    "a cut gzip": (
        "a.jsonl.gz",
        gzip.compress(lines(*[A] * 9))[:-9],
        "a.jsonl.gz cannot be read: Compressed file ended .* copy it again",
    ),
    "a number in Parquet": ("a.parquet", table(1, 2), "a.parquet holds int64, not text"),
    "a value that is nested too deeply": (
        "a.json",
        b'[{"text": "a"}, {"text": "a", "n": ' + b"[" * 10**5 + b"]" * 10**5 + b"}]",
        "the part after row 1 of a.json .* nested too deeply",
    ),
    "a column twice in Parquet": (
        "a.parquet",
        packed(pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"])),
        r"a\.parquet has text twice\. Rename one column\.",
    ),
    "only empty texts in Parquet": ("a.parquet", table("", None, ""), "no row of a.parquet has"),
    "only nulls in Parquet": ("a.parquet", table(None, None), "no row of a.parquet has a text"),
    "a pointer of Git LFS": (
        "a.csv",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "a.csv is a Git LFS pointer.* git lfs pull",
    ),
    "not compressed": (
        "a.jsonl.gz",
        lines(A),
        r"a.jsonl.gz .*: it is not compressed as its name says\. .* a name without \.gz",
    ),
    "Zstandard with a long window": (
        "a.jsonl.zst",
        LONG_ZSTD,
        r"requires too much memory.*\. Recompress it: zstd -dc --long=31 \S+ \| zstd > short-a",
    ),
    "Zstandard by another name": (
        "a.jsonl",
        pa.compress(lines(A), "zstd", asbytes=True),
        r"zstd -dc .* > a-unpacked\.jsonl",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_with_file_row_and_remedy(tmp_path, case):
    name, content, sentence = WRONG[case]
    (tmp_path / name).write_bytes(content)
    said = [complaint(reader, tmp_path / name, tmp_path / "cache") for reader in READERS]
    for one in said:
        assert re.search(sentence, one), one
    assert said[1].removesuffix(" data.skip_broken=true leaves out what is broken.") == said[0]


@pytest.mark.parametrize("reader", READERS)
def test_a_row_in_the_midst_of_a_file_and_of_several_has_its_own_number(
    tmp_path, monkeypatch, reader
):
    monkeypatch.setattr("data.reading.lines.GROUP_BYTES", 100)
    (tmp_path / "a.jsonl").write_bytes(lines(*[A] * 50))
    (tmp_path / "b.jsonl").write_bytes(lines(*[A] * 20, "\n", *[A] * 20, "oops\n", *[A] * 20))
    assert "row 42 of b.jsonl cannot" in complaint(reader, tmp_path / "*.jsonl", tmp_path / "cache")

    into = [pa.array(["a"] * 7 + [b"caf\xe9"], pa.binary()).view(pa.string())]
    parquet.write_table(pa.table(into, ["text"]), tmp_path / "c.parquet", row_group_size=3)
    sentence = complaint(reader, tmp_path / "c.parquet", tmp_path / "cache")
    assert "the part after row 7 of c.parquet cannot be read: 'utf-8'" in sentence


def test_the_advised_commands_make_a_file_that_is_read(tmp_path):
    """In a folder of its own: they write to the present one."""
    cases = {
        "latin.csv": (LATIN, "a\nb\ncafé\n"),
        "windows.csv": ("text\n“a”\n".encode("cp1252"), "“a”\n"),
        "numbers.jsonl": (lines(A, {"text": 3}, {"text": None}), "a\n3\n"),
        "geo.json": (json.dumps({"features": [A, A]}).encode(), "a\na\n"),
    }
    for name, (content, expected) in cases.items():
        (folder := tmp_path / name.partition(".")[0]).mkdir()
        (folder / name).write_bytes(content)
        sentence = complaint("prepared", folder / name, tmp_path / "cache")
        command = sentence[sentence.index("iconv" if "csv" in name else "jq -c") :]
        command = command.partition("), ")[0].rstrip(".")
        if ">" not in command:
            command = f"{command} {shlex.quote(name)} > made.jsonl"
        if command.startswith("jq") and shutil.which("jq") is None:
            continue
        before = {*folder.iterdir()}
        subprocess.run(command, shell=True, cwd=folder, check=True)
        (made,) = {*folder.iterdir()} - before
        assert texts_of("prepared", made, tmp_path / "cache") == expected


ODD = {  # each of whose rows has its own text
    "a number, a list and an object in another column": (
        "a.jsonl",
        lines(*[{**A, "n": n} for n in (1, "x", [1], {"a": 1}, None, 2.5)]),
        6,
    ),
    "a key that comes late": ("a.jsonl", lines(*[A] * 9, {"late": {"new": 1}, **A}), 10),
    "the column comes late": ("a.jsonl", lines({"n": 1}, {"n": [2]}, A), 1),
    "a key of a message that comes late": (
        "a.jsonl",
        lines(*[{**A, "messages": [{"role": "user"}]}] * 9, {**A, "messages": [{"name": 1}]}),
        10,
    ),
    "an empty object, and one with keys": (
        "a.jsonl",
        lines({**A, "n": {}}, {**A, "n": {"b": 1}}),
        2,
    ),
    "a trailing comma in each line": ("a.csv", b"text,n,\na,1,\na,2,\n", 2),
    "semicolons": ("a.csv", b"n;text\n1;a\n2;a\n", 2),
    "tabs": ("a.csv", b"n\ttext\n1\ta\n2\ta\n", 2),
    "a file of tabs": ("a.tsv", b"n\ttext\n1\ta\n", 1),
    "lines that end with a return": ("a.csv", b"n,text\r1,a\r2,a\r", 2),
    "zero bytes after gzip": ("a.jsonl.gz", gzip.compress(lines(A, A)) + bytes(512), 2),
    "an array of texts": ("a.json", b'["a", "a", "a"]', 3),
    "bytes that are not UTF-8 in another column": ("a.csv", b"text,n\na,caf\xe9\na,1\n", 2),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("case", ODD)
def test_what_is_in_other_columns_and_rows_leaves_a_text_alone(tmp_path, reader, case):
    name, content, count = ODD[case]
    (tmp_path / name).write_bytes(content)
    assert texts_of(reader, tmp_path / name, tmp_path / "cache") == "a\n" * count


@pytest.mark.parametrize("reader", READERS)
def test_texts_do_not_depend_on_the_rows_beside_them(tmp_path, reader):
    """Quotes, escapes and dates: `datasets` wrote some of them anew, as JSON or as times."""
    telling = ['say "yes"', "a\\nb", "2024-01-27", "2024-01-27T10:00:00Z", "[1]", "007"]
    (tmp_path / "a.jsonl").write_bytes(lines(*[{"text": one} for one in telling] * 20))
    odd = [{"text": one, "n": n} for n, one in enumerate([*telling, "x"])]
    (tmp_path / "b.jsonl").write_bytes(lines(*odd, {"text": "x", "n": {"a": 1}}))
    found = texts_of(reader, tmp_path / "*.jsonl", tmp_path / "cache")
    assert found == "".join(f"{one}\n" for one in telling * 21) + "x\nx\n"


@pytest.mark.parametrize("reader", READERS)
def test_a_parquet_file_with_other_columns_is_read_with_the_others(tmp_path, reader):
    parquet.write_table(pa.table({"text": ["a"], "n": [1]}), tmp_path / "a.parquet")
    parquet.write_table(
        pa.table({"n": [[1.5]], "text": ["a"], "x": [{"y": 1}]}), tmp_path / "b.parquet"
    )
    assert texts_of(reader, tmp_path / "*.parquet", tmp_path / "cache") == "a\na\n"


SKIPPED = {
    "a.csv": b'text,n\na,1\na,b,2\n"a"b,3\na,4\n',
    "a.json": json.dumps([A, 3, {"text": 3}, A]).encode(),
    "a.jsonl.gz": gzip.compress(lines(A, "oops\n", {"text": [1]}, A)),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_broken_rows_alone_are_skipped_and_the_others_keep_their_numbers(tmp_path, name):
    (tmp_path / name).write_bytes(SKIPPED[name])
    access = Access(tmp_path / "cache")
    listing = list_source(str(tmp_path / name), "text", access, skip_broken=True)
    (found,) = (read_group(listing, group, access, True) for group in listing.groups)
    assert (found.texts, found.rows, found.without_text) == (["a\n", "a\n"], [0, 3], 0)
    assert found.broken.startswith(f"row 2 of {name} (")
    assert found.broken.endswith(") and 1 more after it")
