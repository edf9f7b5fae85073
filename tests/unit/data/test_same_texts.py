"""Every text is what `json`, `csv` and pyarrow read: prepared and streamed, byte by byte.

By hypothesis: a few files by default, 2,000 and more with `-m slow`.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import table_files
from data.columns import MessagesColumn, TextColumn
from data.errors import DataError
from data.reading.access import Access
from data.reading.rows import list_source, open_source, read_group, tables_of
from stream_data import TEXTS, lines_of, parquet_of

COMPARED = {"files": 0, "rows": 0}
FEW = settings(max_examples=40, deadline=None)
MANY = settings(
    max_examples=1_400, deadline=None, suppress_health_check=[HealthCheck.data_too_large]
)


def prepared(source, column, cache):
    """The documents as a preparation has them."""
    documents, rest = [], ""
    for part, ends_document in open_source(str(source), column, cache).read():
        rest += part
        if ends_document:
            documents.append(rest)
            rest = ""
    return documents


def streamed(source, cache):
    access = Access(cache)
    listing = list_source(str(source), "text", access)
    return [text for group in listing.groups for text in read_group(listing, group, access)]


def outcome(read, *given):
    """What is read, or the error."""
    try:
        return read(*given)
    except DataError as error:
        return error


def document(text):
    return text if text.endswith("\n") else text + "\n"


def compare(made, group_bytes):
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.multiple("data.reading.lines", GROUP_BYTES=group_bytes, SLACK_BYTES=8),
        mock.patch.multiple("data.reading.table", AHEAD_BYTES=16 * group_bytes, PIECE_BYTES=64),
    ):
        (data := Path(folder) / "data").mkdir()
        table_files.write(data, made)
        cache = Path(folder) / "cache"
        is_text = ".txt" in made[0][0]
        found = outcome(prepared, f"{data}/*", TextColumn("text"), cache)
        also = outcome(streamed, f"{data}/*" if is_text else data, cache)
        texts = [row.get("text") for _, _, rows in made for row in rows]
        expected = [document(text) for text in texts if text]
    if isinstance(found, DataError) or isinstance(also, DataError):
        refusals = ("is not a column of", "is empty", "array of objects in a file whose")
        assert any(refusal in f"{found}{also}" for refusal in refusals)
        if "array of objects" in str(also):  # by another name, and larger than a group
            return
        assert not all(row.get("text") for _, _, rows in made for row in rows) or not expected
    else:
        assert also == expected
        alone = [text for text in texts if text]  # a text by itself is not changed
        assert found == (alone if is_text and len(made) == 1 else expected)
        COMPARED["files"] += len(made)
        COMPARED["rows"] += sum(len(rows) for _, _, rows in made)


@FEW
@given(table_files.files(), st.sampled_from([1, 40, 1 << 20]))
def test_texts_are_those_that_json_csv_and_pyarrow_read(made, group_bytes):
    compare(made, group_bytes)


@pytest.mark.slow
def test_texts_of_two_thousand_files_are_the_same():
    COMPARED.update(files=0, rows=0)
    MANY(given(table_files.files(), st.sampled_from([1, 40, 1 << 20]))(compare))()
    print(f"{COMPARED['files']:,} files, {COMPARED['rows']:,} rows: no difference")
    assert COMPARED["files"] >= 2000


@FEW
@given(table_files.files("messages", ("lines", "array", "parquet")))
def test_conversations_reach_a_template_as_json_has_them(made):
    column = MessagesColumn("text")
    with tempfile.TemporaryDirectory() as folder:
        table_files.write(Path(folder), made)
        for name, _, expected in made:
            source = str(Path(folder) / name)
            opened = open_source(source, column, Path(folder) / "cache")
            (table,) = tables_of(opened.listing, opened.access)
            rows = [row for group in table.whole() for _, row in table.reader.rows(table, group)]
            found = [repr(row.get("messages")) for row in rows]
            as_written = [row.get("messages") for row in expected]
            if name.endswith(".parquet"):  # a struct has a null where a message has no such key
                as_written = [present(one) for one in as_written]
            assert found == [repr(one) for one in as_written]


def present(messages):
    return messages and [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]


def test_texts_that_were_right_before_keep_their_fingerprints(prepare, tmp_path, monkeypatch):
    """Otherwise every run would be refused as one of another text."""
    (tmp_path / "a.jsonl").write_bytes(lines_of(TEXTS))
    (tmp_path / "b.csv").write_text("text\n" + "".join(f'"{text}"\n' for text in TEXTS))
    (tmp_path / "c.parquet").write_bytes(parquet_of())
    for path in sorted(tmp_path.iterdir()):
        assert prepare(path).info.fingerprint.startswith("5e461ac135a7ed81667ae250527ac39c8db1e0d4")

    monkeypatch.setattr("data.reading.lines.GROUP_BYTES", 1000)
    access = Access(tmp_path / "cache")
    listing = list_source(str(tmp_path / "a.jsonl"), "text", access)
    rows = repr([read_group(listing, group, access) for group in listing.groups])
    assert listing.fingerprint.startswith("b4e20bc1347ec657a44b20e826a21e58258d21f310b6cb00")
    assert hashlib.sha256(rows.encode()).hexdigest().startswith("b1cb8295379ffd1058c20afc2a56")
