"""Every kind of `data.source` on this machine, and the sentence for every mistake."""

from __future__ import annotations

import gzip
import io
import os
import re
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data.prepare
import data.reading.table
from data.columns import TextColumn
from data.errors import DataError
from data.reading.rows import open_source
from table_files import COMPRESS, pack

TEXT = "First line, é ü 日本 🙂\nsecond line\r\nthird \0 line without an end"


@pytest.fixture
def text_of(tmp_path):
    def text_of(source, text_column="text"):
        opened = open_source(str(source), TextColumn(text_column), tmp_path / "cache")
        text, again = ("".join(part for part, _ in opened.read()) for _ in range(2))
        assert text == again
        return text

    return text_of


@pytest.fixture
def complaint(prepare):
    """The one sentence that a person reads, whether at opening or in the middle."""

    def complaint(source):
        with pytest.raises(DataError) as caught:
            prepare(source, block_size=4)
        sentence = str(caught.value)
        assert str(source) in sentence
        assert "cache_dir" not in sentence  # the text is at fault
        return sentence

    return complaint


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_texts_come_with_python(prepare, text_of):
    corpus = prepare("python-docs")
    assert corpus.info.documents > 70
    assert 400_000 < corpus.info.characters < 600_000
    assert len(text_of("python-stdlib")) > 5_000_000


@pytest.mark.parametrize("compression", ["", *COMPRESS])
def test_one_text_file_is_taken_to_the_letter(text_of, tmp_path, monkeypatch, compression):
    monkeypatch.setattr(data.reading.table, "PIECE_BYTES", 16)
    for name in ("a.txt", "A.TXT", "a.log", "nothing"):
        whole = pack(compression, f"\ufeff{TEXT}".encode())
        assert text_of(put(tmp_path / f"{name}{compression}", whole)) == TEXT


def test_a_home_and_a_compressed_text_are_the_same_corpus(prepare, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    plain = prepare(put(tmp_path / "a.txt", TEXT))
    put(tmp_path / "b.txt.gz", gzip.compress(TEXT.encode()))
    other = prepare("~/b.txt.gz")
    assert (other.info.name, other.info.fingerprint) == ("~/b.txt.gz", plain.info.fingerprint)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("[ab].t?t", "of a\nof b, ended\n"),
        ("**/*.txt", "of a\nof b, ended\nof c\n"),
    ],
)
def test_a_pattern_joins_its_files_by_name(prepare, text_of, tmp_path, pattern, expected):
    texts = {"b": "of b, ended\n", "a": "of a", "deep/er/c": "of c", "0": "", ".hidden": "never"}
    for name, text in texts.items():
        put(tmp_path / f"{name}.txt", text)
    put(tmp_path / "deep/not.md", "never")
    (tmp_path / "folder.txt").mkdir()

    assert text_of(f"{tmp_path}/{pattern}") == expected
    assert prepare(f"{tmp_path}/{pattern}").info.documents == expected.count("of")


def test_links_are_followed_to_their_files(text_of, tmp_path):
    """As in the cache of the Hub client, of which every file is a link."""
    put(tmp_path / "blobs/1", '{"body": "a", "text": 1}\n{}\n{"body": "b"}')
    (tmp_path / "data").mkdir()
    (tmp_path / "data/A.JsonL").symlink_to(tmp_path / "blobs/1")
    assert text_of(tmp_path / "data", "body") == text_of(tmp_path / "data/*", "body") == "a\nb\n"


# What is not there, or no file.


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "missing.JSONL",
            r"does not exist .*a data set of the Hub is named owner/name",
        ),
        ("not a name of anything", "does not exist"),
        ("nobody/has-this", "neither a file here nor a data set"),
        ("~nobody-has-this-name/x.txt", "does not exist"),
        ("*.nothing", "names no file"),
        ("hf://datasets/a", "is not a name of the Hub: owner/name, owner/name@revision"),
        ("/dev/null/a.txt", "cannot be read: .*Not a directory"),
        ("\udcff.txt", "does not exist"),
        ("/dev/zero", "names no file"),  # it would be read for ever
        ("?.txt", "names no file"),
        ("*.md", r"does not exist .*/a\.md"),
        ("links", r"does not exist .*/links/a\.jsonl"),
        ("folder", r"texts are named by a pattern such as \*\.txt"),
        ("mixed/*", "mixes formats"),
    ],
)
def test_what_is_not_there_or_no_file_is_told(complaint, tmp_path, monkeypatch, source, reason):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    os.mkfifo(tmp_path / "a.txt")
    (tmp_path / "a.md").symlink_to(tmp_path / "gone.md")
    for name in ("folder/notes.txt", "mixed/a.txt", "mixed/b.jsonl", "links/b.jsonl"):
        put(tmp_path / name, TEXT)
    (tmp_path / "links/a.jsonl").symlink_to(tmp_path / "gone.jsonl")

    assert re.search(reason, complaint(source))


# What is no text.


def tar():
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as opened:
        opened.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    return content.getvalue()


BINARY, NAME = "it is UTF-16 or binary", "byte .* is not UTF-8 .* give it a name that says"
CONTENTS = {
    "tar.gz": (gzip.compress(tar()), BINARY),
    "hole": (bytes(5000) + TEXT.encode(), BINARY),
    "zst.txt": (pack(".zst", TEXT.encode()), NAME),
    "txt": (gzip.compress(TEXT.encode()), NAME),
    "md": (
        b"version https://git-lfs.github.com/spec/v1\n",
        "it is a Git LFS pointer.*git lfs pull",
    ),
    "data": (b"PAR1" + bytes(99), BINARY),
    "2.txt": (b"\xfe\xff" + TEXT.encode("utf-16-be"), BINARY),
    "5.txt": ("a plain text".encode("utf-32-be"), BINARY),
}


@pytest.mark.parametrize("ending", CONTENTS)
def test_what_is_no_text_is_called_what_it_is(complaint, tmp_path, ending):
    content, what = CONTENTS[ending]
    path = put(tmp_path / f"a.{ending}", content)
    assert re.search(rf"data\.source={path}: .*a\.{ending} .*{what}", complaint(path))


def parquet_of(texts):
    into = io.BytesIO()
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), into)
    return into.getvalue()


EMPTY = {
    "a.txt": b"",
    "a.txt.gz": gzip.compress(b""),
    "a.jsonl": b"\n",
    "b.jsonl": b'{"text": null}\n{"text": ""}\n',
    "a.csv": b"text\n",
    "b.csv": b'n,text\n1,""\n2\n',
    "a.parquet": parquet_of([]),
    "b.parquet": parquet_of([None, ""]),
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_source_without_text_is_called_empty(complaint, tmp_path, name):
    assert "is empty" in complaint(put(tmp_path / name, EMPTY[name]))


def test_a_table_of_parquet_without_a_byte_is_damaged(complaint, tmp_path):
    put(tmp_path / "data/a.parquet", parquet_of(["a text"]))
    put(tmp_path / "data/b.parquet", "")
    assert "b.parquet cannot be read: Parquet file size is 0" in complaint(tmp_path / "data")


@pytest.mark.parametrize(
    "content", [b"caf\xe9 is latin", b"abcde\xe6\x97", b"PDF " * 9999 + b"\xe9"]
)
def test_a_byte_that_is_not_utf8_is_named(complaint, tmp_path, monkeypatch, content):
    monkeypatch.setattr(data.reading.table, "PIECE_BYTES", 16)
    assert "a.txt cannot be read: byte 0xe" in complaint(put(tmp_path / "a.txt", content))


# Compressed texts.


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("fault", ["another beginning", "truncated", "not compressed"])
def test_damage_is_not_the_end_of_a_compressed_text(tmp_path, complaint, kind, fault):
    second = COMPRESS[kind](TEXT.encode() * 100)
    content = {"truncated": second[:-9], "not compressed": b"plain"}.get(fault, b"?" + second[1:])
    path = put(tmp_path / f"a.txt{kind}", content)
    assert "cannot be read" in complaint(path)


@pytest.mark.parametrize("kind", [".gz", ".bz2"])  # lzma.open takes both for the end
@pytest.mark.parametrize("begin", [b"?", b""])
def test_damage_behind_a_stream_is_not_the_end(tmp_path, complaint, kind, begin):
    first = COMPRESS[kind](TEXT.encode() * 100)
    second = begin + first[len(begin) : 20] + b"damage" + first[26:]
    assert "cannot be read" in complaint(put(tmp_path / f"a.txt{kind}", first + second))


# A text that changes while it is prepared.


CHANGES = {
    "grown": lambda path: path.write_text(path.read_text() + "more\n"),
    "shrunk": lambda path: os.truncate(path, path.stat().st_size - 100),
    "rewritten": lambda path: path.write_bytes(path.read_bytes().replace(b"line", b"lime")),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_text_that_changes_while_it_is_prepared_is_told(
    complaint, prepare, tmp_path, monkeypatch, change
):
    text = "".join(f"line {i} of the text, é ü 日本\n" for i in range(400))
    path = put(tmp_path / "a.txt", text)
    really = data.prepare.write_tokens

    def later(*arguments):
        CHANGES[change](path)
        return really(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(data.prepare, "write_tokens", later)
        assert re.search("has changed since|does not exist", complaint(path))
    left = [p for p in (tmp_path / "cache").iterdir() if not p.name.endswith(".lock")]
    assert not left

    put(path, text)
    assert prepare(path).info.characters == len(text)  # when it is at rest
