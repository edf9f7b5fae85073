"""Every kind of `data.source` on this machine, and the sentence for every mistake."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import re
import tarfile
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data.prepare
import data.reading.text
import data.sources
from data.columns import TextColumn
from data.errors import DataError
from data.sources import open_source

TEXT = "First line, é ü 日本 🙂\nsecond line\r\nthird \0 line without an end"
ROWS = ["the first row", 'second, with "quotes"\n', "日本 and\ntwo lines", "last of four", "007"]
ROWS += ["NA", "None", "null", "nan", "N/A", "True", "2024-01-27"]
"""Words that mean something else elsewhere are texts."""
JOINED = "".join(row if row.endswith("\n") else f"{row}\n" for row in ROWS)
COMPRESS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda content: pa.compress(content, "zstd", asbytes=True),
}


@pytest.fixture
def text_of(tmp_path):
    def text_of(source, text_column="text"):
        opened = open_source(str(source), TextColumn(text_column), tmp_path / "cache")
        text, again = ("".join(part for part, _ in opened.read()) for _ in range(2))
        assert text == again
        return text

    return text_of


@pytest.fixture
def prepare(prepare):
    return lambda source, **changes: prepare(source, **{"block_size": 4, **changes})


@pytest.fixture
def complaint(prepare):
    """The one sentence that a person reads, whether at opening or in the middle."""

    def complaint(source, **more):
        with pytest.raises(DataError) as caught:
            prepare(source, **more)
        sentence = str(caught.value)
        assert str(source) in sentence
        assert "cache_dir" not in sentence  # the text is at fault
        return sentence

    return complaint


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def packed(name, content):
    return COMPRESS.get(name.lower().rpartition(".")[2], bytes)(content.encode())


def table(name, rows, column="text"):
    """A table in the format that a name says."""
    if name.lower().endswith(".parquet"):
        into = io.BytesIO()
        pq.write_table(pa.table({"n": [*range(len(rows))], column: rows}), into, row_group_size=3)
        return into.getvalue()
    if "csv" in name.lower():
        quoted = (f'{i},"' + (row or "").replace('"', '""') + '"\n' for i, row in enumerate(rows))
        return packed(name, f"n,{column}\n" + "".join(quoted))
    values = [{"n": i, column: row} for i, row in enumerate(rows)]
    is_array = name.lower().endswith(".json")
    return packed(name, json.dumps(values) if is_array else "\n".join(map(json.dumps, values)))


def test_texts_come_with_python(prepare, text_of, monkeypatch):
    corpus = prepare("python-docs")
    assert corpus.info.documents > 70
    assert 400_000 < corpus.info.characters < 600_000

    paths = data.sources._python_stdlib()
    assert len(paths) > 400
    assert not any({"site-packages", "test"} & set(path.parts) for path in paths)
    monkeypatch.setattr(data.sources, "_python_stdlib", lambda: paths[:1])
    assert text_of("python-stdlib") == paths[0].read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["a.txt", "A.TXT", "a.py", "a.log", "nothing", "A.Md.XZ"])
@pytest.mark.parametrize("compression", ["", *(f".{end}" for end in COMPRESS)])
def test_one_text_file_is_taken_to_the_letter(text_of, tmp_path, monkeypatch, name, compression):
    for piece_bytes in (3, 5, 64):  # a character across the border of pieces is whole
        monkeypatch.setattr(data.reading.text, "PIECE_BYTES", piece_bytes)
        whole = packed(name + compression, "\ufeff" + TEXT)
        assert text_of(put(tmp_path / f"{name}{compression}", whole)) == TEXT
        if name != "a.txt":
            break


def test_a_home_and_a_compressed_text_are_the_same_corpus(prepare, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    plain = prepare(put(tmp_path / "a.txt", TEXT))
    put(tmp_path / "b.txt.gz", gzip.compress(TEXT.encode()))
    other = prepare("~/b.txt.gz")
    assert (other.info.name, other.info.fingerprint) == ("~/b.txt.gz", plain.info.fingerprint)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.txt", "of a\nof b, ended\n"),
        ("[ab].t?t", "of a\nof b, ended\n"),
        ("**/*.txt", "of a\nof b, ended\nof c\n"),
    ],
)
def test_a_pattern_joins_its_files_by_name(prepare, text_of, tmp_path, pattern, expected):
    for name, text in {"b": "of b, ended\n", "a": "of a", "deep/er/c": "of c", "0": ""}.items():
        put(tmp_path / f"{name}.txt", text)
    put(tmp_path / "deep/not.md", "never")
    (tmp_path / "folder.txt").mkdir()

    assert text_of(f"{tmp_path}/{pattern}") == expected
    assert prepare(f"{tmp_path}/{pattern}").info.documents == expected.count("of")


@pytest.mark.parametrize("column", ["text", "body"])
@pytest.mark.parametrize(
    "name", ["a.jsonl", "A.Json", "a.ndjson.gz", "A.CSV", "a.csv.zst", "a.JSONL.bz2", "a.parquet"]
)
def test_each_row_of_a_table_that_has_text_is_a_document(prepare, text_of, tmp_path, name, column):
    rows = [None, *ROWS[:2], "", *ROWS[2:], None]
    path = put(tmp_path / name, table(name, rows, column))

    assert text_of(path, column) == JOINED
    assert prepare(path, text_column=column).info.documents == len(ROWS)
    put(tmp_path / f"b{name}", table(name, ROWS[:2], column))
    assert text_of(f"{tmp_path}/*", column).startswith(JOINED)


# What is not there, or no file.


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("missing.JSONL", "there is no such file"),
        ("missing.TXT.GZ", "there is no such file"),
        ("not a name of anything", "there is no such file"),
        ("nobody/has-this", "neither a file here nor a data set"),
        ("nor-this", "neither a file here nor a data set"),
        ("x" * 300, "neither a file here nor a data set"),
        ("x" * 300 + ".txt", "cannot be opened: File name too long"),
        ("~nobody-has-this-name/x.txt", "there is no such file"),
        ("~nobody-has-this-name/*.txt", "matches no file"),
        ("/tmp/" + "y/" * 3000 + "*.txt", "cannot be opened: File name too long"),
        ("*.nothing", "matches no file"),
        ("owner/name@a@b", "there is no such file"),
        ("hf://a/model.parquet", "is not a name of the Hub: owner/name, owner/name@revision"),
        ("[", "matches no file"),
        ("/dev/null/a.txt", "cannot be opened: Not a directory"),
        ("\udcff.txt", "there is no such file"),
        ("/dev/zero", "/dev/zero is not a regular file"),  # it would be read for ever
        ("/dev/zer[o]", "/dev/zero is not a regular file"),
        ("a.txt", "a.txt is not a regular file"),
        ("?.txt", "a.txt is not a regular file"),
        ("*.md", "cannot read .*/a.md: No such file"),
        ("folder", r"Texts are named by a pattern such as \*\.txt"),
        ("mixed/*", "mixes formats"),
        ("twice/*", "has one file twice"),
    ],
)
def test_what_is_not_there_or_no_file_is_told(complaint, tmp_path, monkeypatch, source, reason):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    os.mkfifo(tmp_path / "a.txt")
    (tmp_path / "a.md").symlink_to(tmp_path / "gone.md")
    put(tmp_path / "folder/notes.txt", "a text")
    for name in ("mixed/a.txt", "mixed/b.jsonl"):
        put(tmp_path / name, TEXT)
    put(tmp_path / "twice/a.txt", TEXT)
    (tmp_path / "twice/b.txt").symlink_to(tmp_path / "twice/a.txt")

    assert re.search(reason, complaint(source))


# What is no text.


def archive(kind):
    content = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(content, "w") as opened:
            opened.writestr("a.txt", TEXT)
    else:
        with tarfile.open(fileobj=content, mode="w") as opened:
            opened.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    return content.getvalue()


NAMED, NUL = "Give it a name that ends in ", "NUL bytes for the most part. Unpack it"
CONTENTS = {
    "zip": (archive("zip"), "a ZIP archive. Unpack it first"),
    "jsonl": (archive("zip"), "a ZIP archive. Unpack it first"),
    "tar": (archive("tar"), NUL),
    "tar.gz": (gzip.compress(archive("tar")), NUL),
    "hole": (bytes(5000) + TEXT.encode(), NUL),
    "zst.txt": (COMPRESS["zst"](TEXT.encode()), f"compressed by Zstandard. {NAMED}.zst"),
    "txt": (gzip.compress(TEXT.encode()), f"compressed by gzip. {NAMED}.gz"),
    "bz2.txt": (bz2.compress(TEXT.encode()), f"compressed by bzip2. {NAMED}.bz2"),
    "xz.txt": (lzma.compress(TEXT.encode()), f"compressed by xz. {NAMED}.xz"),
    "pdf": (b"%PDF-1.7\n%\xe2\xe3", "a PDF document. Convert it"),
    "arrow": (b"ARROW1" + bytes(99), "an Arrow table. Convert it to Parquet"),
    "md": (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer. .*git lfs pull"),
    "data": (b"PAR1" + bytes(99), f"a Parquet table. {NAMED}.parquet"),
    "csv": ("text\na\n".encode("utf-16"), "UTF-16 or UTF-32. Convert it to UTF-8"),
    "1.txt.gz": (gzip.compress(TEXT.encode("utf-32")), "UTF-16 or UTF-32. Convert it"),
    "2.txt": (b"\xfe\xff" + TEXT.encode("utf-16-be"), "UTF-16 or UTF-32. Convert it"),
    "3.txt": (b"\x00\x00\xfe\xff" + TEXT.encode("utf-32-be"), "UTF-16 or UTF-32. Convert it"),
    "4.txt": ("a plain text".encode("utf-16-le"), NUL),
    "5.txt": ("a plain text".encode("utf-32-be"), NUL),
}


@pytest.mark.parametrize("ending", CONTENTS)
def test_what_is_no_text_is_called_what_it_is(complaint, tmp_path, ending):
    content, what = CONTENTS[ending]
    path = put(tmp_path / f"a.{ending}", content)
    sentence = complaint(path)
    assert re.search(rf"data\.source={path}: a\.{ending} is not UTF-8 text, but .*{what}", sentence)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.csv", "a.parquet"])
def test_a_source_without_text_is_called_empty(complaint, tmp_path, name):
    for rows in ([], [None, "", None]):
        is_table = not name.startswith("a.txt")
        content = table(name, pa.array(rows, pa.string()).to_pylist() if is_table else [], "text")
        if name == "a.parquet" and not rows:
            continue  # of a column without a type
        path = put(tmp_path / name, content if is_table else packed(name, ""))
        assert re.search("is empty|no rows|no row of a.* has a text", complaint(path))


@pytest.mark.parametrize("piece_bytes", [3, 4, 7, 1 << 20])
@pytest.mark.parametrize(
    ("content", "offset"),
    [
        (b"caf\xe9 is latin", 3),
        ("日本".encode() + b"abc\xff", 9),
        (b"abcde\xe6\x97", 5),  # the first two bytes of three
        ("é".encode() + b"\xf0\x9f\x99", 2),
    ],
)
def test_a_byte_that_is_not_utf8_is_named_by_its_offset(
    complaint, tmp_path, monkeypatch, content, offset, piece_bytes
):
    monkeypatch.setattr(data.reading.text, "PIECE_BYTES", piece_bytes)
    sentence = complaint(put(tmp_path / "a.txt", content))
    assert f"a.txt is not UTF-8: byte {offset} " in sentence


# Compressed texts.


@pytest.mark.parametrize("kind", COMPRESS)
def test_a_file_of_several_streams_is_read_to_its_end(tmp_path, text_of, kind):
    """As pbzip2, pigz and `cat` write them."""
    parts = [COMPRESS[kind](line.encode()) for line in TEXT.splitlines(keepends=True)]
    path = put(tmp_path / f"a.txt.{kind}", b"".join(parts))
    assert text_of(path) == TEXT


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize(
    "fault", ["another beginning", "truncated", "followed by text", "not compressed"]
)
def test_damage_is_not_the_end_of_a_compressed_text(tmp_path, complaint, kind, fault):
    first, second = (COMPRESS[kind](TEXT.encode() * many) for many in (1, 100))
    end = {"truncated": second[:-9], "followed by text": second + b"plain"}
    content = first + end.get(fault, b"?" + second[1:])
    path = put(tmp_path / f"a.txt.{kind}", b"plain" if fault == "not compressed" else content)
    assert "cannot be read" in complaint(path)


# Tables that are broken: more of them in test_row_errors.py.


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "latin1.csv", "a.parquet", "a.jsonl.gz"])
def test_a_broken_table_is_told_wherever_it_is_broken(complaint, tmp_path, name):
    """After more than a reader reads at once."""
    rows = [f"sentence number {i}, " + "which is long " * 20 for i in range(9_000)]
    content = bytearray(table(name, [*rows, "caf\u00e9"]))
    if name == "a.parquet":
        file = pq.ParquetFile(io.BytesIO(content)).metadata
        at = file.row_group(file.num_row_groups - 1).column(1).data_page_offset
        content[at : at + 60] = b"\xff" * 60
    elif name == "latin1.csv":
        content = bytes(content).decode().encode("latin1")
    elif name == "a.jsonl.gz":
        content = content[:-12]
    else:
        content += b'\n{"text": oops}\n' if name == "a.jsonl" else b"1,2,3,4\n"
    assert "cannot be read" in complaint(put(tmp_path / name, bytes(content)))


# A text that changes while it is prepared.


def appended(more):
    def change(path):
        with open(path, "a") as opened:
            opened.write(more)

    return change


def truncated(by):
    return lambda path: os.truncate(path, path.stat().st_size - by)


def rewritten(path):
    path.write_bytes(path.read_bytes().replace(b"line", b"lime"))
    os.utime(path, ns=(0, 0))


CHANGES = {
    "grown": appended("more of it\n"),
    "grown by new characters": appended("月火水\n"),
    "shrunk": truncated(100),
    "cut in a character": truncated(2),
    "rewritten": rewritten,
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("before", ["_scan", "_write"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_text_that_changes_while_it_is_prepared_is_told(
    complaint, prepare, tmp_path, monkeypatch, change, before
):
    text = "".join(f"line {i} of the text, é ü 日本\n" for i in range(400))
    path = put(tmp_path / "a.txt", text)
    really = getattr(data.prepare, before)

    def later(*arguments):
        CHANGES[change](path)
        return really(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(data.prepare, before, later)
        what = " changed while it was read." if change != "gone" else ": .*No such file|vanished"
        assert re.search(what, complaint(path))
    left = [p for p in (tmp_path / "cache").iterdir() if not p.name.endswith(".lock")]
    assert not left

    put(path, text)
    assert prepare(path).info.characters == len(text)  # when it is at rest
