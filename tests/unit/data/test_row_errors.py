"""What is wrong with data is said with its file, its row and a remedy, prepared and streamed."""

from __future__ import annotations

import gzip
import json
import random
import re

import pyarrow as pa
import pytest
from pyarrow import parquet

from data.columns import TextColumn
from data.reading.access import Access
from data.reading.parquet import groups
from data.reading.parquet import rows as rows_of_group
from data.reading.rows import list_source, read_group
from data.reading.table import Table
from wrong_rows import WRONG, A, complaint, lines, texts_of

READERS = ("prepared", "streamed")


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_with_file_row_and_remedy(tmp_path, case):
    name, content, sentence = WRONG[case]
    (tmp_path / name).write_bytes(content)
    said = [complaint(reader, tmp_path / name, tmp_path / "cache") for reader in READERS]
    for one in said:
        assert re.search(sentence, one), one
    assert said[1].removesuffix(" data.skip_broken=true leaves out what is broken.") == said[0]


@pytest.mark.parametrize("reader", READERS)
def test_each_row_has_its_own_number_in_several_files(tmp_path, monkeypatch, reader):
    monkeypatch.setattr("data.reading.lines.GROUP_BYTES", 100)
    (tmp_path / "a.jsonl").write_bytes(lines(*[A] * 50))
    (tmp_path / "b.jsonl").write_bytes(lines(*[A] * 20, "\n", *[A] * 20, "oops\n", *[A] * 20))
    row = "row 42" if reader == "prepared" else r"row 5 of b.jsonl from byte 500 on"
    assert row in complaint(reader, tmp_path / "*.jsonl", tmp_path / "cache")

    into = [pa.array(["a"] * 7 + [b"caf\xe9"], pa.binary()).view(pa.string())]
    parquet.write_table(pa.table(into, ["text"]), tmp_path / "c.parquet", row_group_size=3)
    sentence = complaint(reader, tmp_path / "c.parquet", tmp_path / "cache")
    assert "the part after row 7 of c.parquet cannot be read: 'utf-8'" in sentence


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
def test_parquet_files_with_other_columns_are_read_together(tmp_path, reader):
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
def test_only_broken_rows_are_skipped_and_numbers_stay(tmp_path, name):
    (tmp_path / name).write_bytes(SKIPPED[name])
    warnings = []
    access = Access(tmp_path / "cache", warnings.append)
    listing = list_source(str(tmp_path / name), "text", access, skip_broken=True)
    (found,) = (read_group(listing, group, access, True) for group in listing.groups)
    assert found == ["a\n", "a\n"]
    assert warnings[0].partition("left out: ")[2].startswith(f"row 2 of {name} (")
    assert warnings[0].endswith(") and 1 more after it")


def test_what_is_left_out_is_said_by_a_process_that_says_nothing_else(tmp_path):
    (tmp_path / "a.csv").write_bytes(SKIPPED["a.csv"])
    warnings = []
    access = Access(tmp_path / "cache", None, warnings.append)
    listing = list_source(str(tmp_path / "a.csv"), "text", access, skip_broken=True)
    read_group(listing, listing.groups[0], access, True)
    assert len(warnings) == 1


def test_an_unopened_parquet_file_is_fetched_once(tmp_path):
    """Row groups that lie next to each other, of more than one read ahead."""
    rng = random.Random(7)
    texts = [rng.randbytes(400).hex() for _ in range(20_000)]
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": texts}), path, row_group_size=100)
    access, asked = Access(tmp_path / "cache"), []
    read = access.read
    access.read = lambda *given: asked.append(given[3] - given[2]) or read(*given)
    listing = list_source(str(path), "text", access)
    table = Table(access, "it", TextColumn("text"), listing.files[0], unopened=True)
    found = [row["text"] for group in groups(table) for _, row in rows_of_group(table, group)]
    assert found == texts
    assert sum(asked) < 1.4 * path.stat().st_size


@pytest.mark.parametrize("reader", READERS)
def test_an_array_that_fills_the_memory_is_refused(tmp_path, monkeypatch, reader):
    monkeypatch.setattr("data.reading.lines.MOST_ARRAY_BYTES", 100)
    (tmp_path / "a.json").write_text(json.dumps([A] * 50))
    sentence = complaint(reader, tmp_path / "a.json", tmp_path / "cache")
    assert re.search(r"a\.json is an array of more than 1 GB.* JSON lines", sentence)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.parquet"])
def test_a_file_without_a_text_among_others_is_refused(tmp_path, reader, name):
    """Its 10 rows of 20 were left out without a word."""
    texts = [f"row {number}" for number in range(10)]
    for first, rows in (("0", texts), ("1", [None, ""] * 5)):
        if name == "a.parquet":
            table = pa.table({"text": pa.array(rows, pa.string())})
            parquet.write_table(table, tmp_path / f"{first}{name}", row_group_size=4)
            continue
        content = lines(*[{"id": 1, "text": row} for row in rows])
        if name == "a.csv":
            content = b"id,text\n" + b"".join(f"1,{row or ''}\n".encode() for row in rows)
        pack = gzip.compress if name.endswith("gz") else bytes
        (tmp_path / f"{first}{name}").write_bytes(pack(content))
    sentence = complaint(reader, tmp_path / f"*{name}", tmp_path / "cache")
    assert f"no row of 1{name} has a text" in sentence
