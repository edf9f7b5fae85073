"""What is wrong with data is said with its file, its row and a remedy, prepared and streamed."""

from __future__ import annotations

import gzip
import json
import re
from random import Random

import pyarrow as pa
import pytest
import xxhash
from pyarrow import parquet

from data.errors import BrokenText
from data.reading.access import Access
from data.reading.rows import list_source, read_group
from table_files import COMPRESS
from wrong_rows import READERS, WRONG, A, complaint, lines, texts_of


@pytest.mark.parametrize(("name", "content", "sentence"), WRONG)
def test_what_is_wrong_is_said_with_file_row_and_remedy(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    prepared, streamed = (
        complaint(reader, tmp_path / name, tmp_path / "cache") for reader in READERS
    )
    assert re.search(sentence, streamed), streamed
    assert prepared.startswith(("data.source=", "data.text_column="))
    same = streamed.removesuffix(" data.skip_broken=true leaves out what is broken.")
    assert same == prepared or name == "a.parquet"  # whose groups are parts of the file


@pytest.mark.parametrize("reader", READERS)
def test_each_row_has_its_own_number_in_several_files(tmp_path, monkeypatch, reader):
    monkeypatch.setattr("data.reading.lines.GROUP_BYTES", 100)
    (tmp_path / "a.jsonl").write_bytes(lines(*[A] * 50))
    (tmp_path / "b.jsonl").write_bytes(lines(*[A] * 20, "\n", *[A] * 20, "oops\n", *[A] * 20))
    row = "row 42" if reader == "prepared" else r"row 5 of b.jsonl from byte 500 on"
    assert row in complaint(reader, tmp_path / "*.jsonl", tmp_path / "cache")


ODD = {  # each of whose rows has its own text; other columns: test_same_texts.py
    "lines that end with a return": ("a.csv", b"n,text\r1,a\r2,a\r", 2),
    "zero bytes after gzip": ("a.jsonl.gz", gzip.compress(lines(A, A)) + bytes(512), 2),
    "an array of texts": ("a.json", b'["a", "a", "a"]', 3),
    "bytes that are not UTF-8 in another column": ("a.csv", b"text,n\na,caf\xe9\na,1\n", 2),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("case", ODD)
def test_what_is_odd_around_a_text_leaves_it_alone(tmp_path, reader, case):
    name, content, count = ODD[case]
    (tmp_path / name).write_bytes(content)
    assert texts_of(reader, tmp_path / name, tmp_path / "cache") == "a\n" * count


SKIPPED = {  # the content, the texts, and what is said of the rest
    "a.csv": (b"text,n\na,1\na,b,2\na,b,3\na,4\n", ["a\n", "a\n"], "row 2 of a.csv (it has 3"),
    "b.csv": (b'text,n\na,1\na,b,2\n"a"b,3\na,4\n', ["a\n", "a\n"], "row 2 of b.csv (it has 3"),
    "a.json": (json.dumps([A, 3, {"text": 3}, A]).encode(), ["a\n", "a\n"], "row 2 of a.json (it"),
    "a.jsonl": (lines("oops\n", A, {"text": [1]}), ["a\n"], "row 1 of a.jsonl (it is not JSON"),
    "b.jsonl.gz": (gzip.compress(lines(A, "oops\n", A))[:-9], [], "b.jsonl.gz: Compressed file"),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_what_is_broken_is_left_out_where_the_user_says_so(tmp_path, name):
    """By a process that says nothing else, each time the same."""
    content, texts, left_out = SKIPPED[name]
    (tmp_path / name).write_bytes(content)
    warnings = []
    access = Access(tmp_path / "cache", None, warnings.append)
    listing = list_source(str(tmp_path / name), "text", access)
    with pytest.raises(BrokenText, match=r"data\.skip_broken=true leaves out what is broken\.$"):
        read_group(listing, listing.groups[0], access)
    for _ in range(2):
        assert read_group(listing, listing.groups[0], access, skip_broken=True) == texts
    (warning,) = warnings  # although it was read twice
    assert warning.startswith(f"warning: data.source={tmp_path / name}: left out: {left_out}")
    assert warning.endswith(") and 1 more after it") or not texts


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_compressed_file_with_a_flipped_bit_is_left_out_whole(tmp_path, compression):
    """Its checksums come after rows that were never written, or are behind right ones."""
    random = Random(0)
    rows = lines(*({"text": random.randbytes(60).hex()} for _ in range(20_000)))
    content = bytearray(COMPRESS[compression](rows))
    if compression == ".zst":  # with a checksum, which the command writes and pyarrow does not
        content[4] |= 4
        content += xxhash.xxh64_digest(rows)[:3:-1]
    content[len(content) * 2 // 3] ^= 1
    (tmp_path / (name := f"a.jsonl{compression}")).write_bytes(content)
    access = Access(tmp_path / "cache", None, (warnings := []).append)
    listing = list_source(str(tmp_path / name), "text", access)
    assert read_group(listing, listing.groups[0], access, skip_broken=True) == []
    (warning,) = warnings
    assert f"left out: {name}: " in warning


def test_a_file_that_cannot_be_listed_is_left_out_as_well(tmp_path):
    (folder := tmp_path / "texts").mkdir()
    (folder / "a.parquet").write_bytes(b"PAR1 and no more")
    parquet.write_table(pa.table({"text": ["a"]}), folder / "b.parquet")
    warnings = []
    access = Access(tmp_path / "cache", None, warnings.append)
    with pytest.raises(BrokenText, match=r"a\.parquet cannot be read: Parquet magic"):
        list_source(str(folder), "text", access)
    listing = list_source(str(folder), "text", access, skip_broken=True)
    assert [read_group(listing, group, access) for group in listing.groups] == [["a\n"]]
    (warning,) = warnings
    assert "left out: a.parquet: data.source=" in warning
