"""Groups of rows of Parquet and JSON lines on this machine: which rows there are, and how odd."""

from __future__ import annotations

import bz2
import gzip
import shutil
from typing import ClassVar

import fsspec
import pyarrow as pa
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import parquet

from data.errors import BrokenText, DataError
from data.reading import lines
from data.reading.access import Access
from data.reading.formats import FORMATS
from data.reading.rows import list_source, read_group
from data.reading.table import reader_of
from stream_data import ROWS, TEXTS, lines_of, write_parquet


def zstd(content):
    return pa.compress(content, "zstd", asbytes=True)


def list_here(source, cache, column="text"):
    return list_source(str(source), column, Access(cache))


def read(source, cache, **options):
    """The texts of all groups of a source."""
    listing = list_here(source, cache)
    return [read_group(listing, group, Access(cache), **options) for group in listing.groups]


def texts_of(source, cache):
    return [text for group in read(source, cache) for text in group]


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
@pytest.mark.parametrize("use_dictionary", [True, False])
def test_every_row_of_parquet_that_has_text_is_read_once(tmp_path, compression, use_dictionary):
    file = tmp_path / "a.parquet"
    texts = [text or None for text in TEXTS]
    write_parquet(file, texts, compression=compression, use_dictionary=use_dictionary)

    listing = list_here(file, tmp_path)
    assert [group.rows for group in listing.groups] == [40] * 7 + [20]
    found = [
        text for group in listing.groups for text in read_group(listing, group, Access(tmp_path))
    ]
    assert found == [text for _, text in ROWS]


@pytest.mark.parametrize("size", [1, 50, 1000, 1 << 24])
@pytest.mark.parametrize(("slack", "end"), [(1, b""), (64, b"\n"), (1 << 18, b"\n")])
def test_every_line_is_read_once_wherever_the_groups_are_cut(
    tmp_path, monkeypatch, size, slack, end
):
    monkeypatch.setattr(lines, "GROUP_BYTES", size)
    monkeypatch.setattr(lines, "SLACK_BYTES", slack)
    few = TEXTS[:12]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines_of(few)[:-1] + end)

    assert texts_of(tmp_path / "a.jsonl", tmp_path) == [f"{text}\n" for text in few if text]


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.jsonl.gz", gzip.compress),
        ("padded.jsonl.gz", lambda content: gzip.compress(content) + bytes(512)),
        ("a.json.gz", lambda content: gzip.compress(content[:999]) + gzip.compress(content[999:])),
        ("a.ndjson.zst", zstd),
        ("A.JSONL.ZST", lambda content: zstd(content[:999]) + zstd(content[999:])),
        ("a.jsonl.bz2", bz2.compress),
    ],
)
def test_a_compressed_file_is_one_group(tmp_path, monkeypatch, name, pack):
    monkeypatch.setattr("data.reading.table.AHEAD_BYTES", 100)
    monkeypatch.setattr(lines, "PIECE_BYTES", 100)
    (tmp_path / name).write_bytes(pack(lines_of(TEXTS)))

    assert read(tmp_path / name, tmp_path) == [[text for _, text in ROWS]]


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\n\ntwo, é".encode())
    (tmp_path / "b.TXT.gz").write_bytes(gzip.compress(b"three\n"))
    (tmp_path / "c.txt").write_bytes(b"")
    listing = list_here(f"{tmp_path}/*", tmp_path / "cache")
    assert (listing.format, len(listing.files), len(listing.groups)) == ("text", 3, 2)
    assert texts_of(f"{tmp_path}/*.*", tmp_path / "cache") == ["one\r\n\ntwo, é\n", "three\n"]

    (tmp_path / "c.txt").write_bytes(b"caf\xe9")
    with pytest.raises(BrokenText, match=r"c\.txt is not UTF-8: byte 3 .*skip_broken=true"):
        read(f"{tmp_path}/*.*", tmp_path / "cache")
    groups = read(f"{tmp_path}/*.*", tmp_path / "cache", skip_broken=True)
    assert [len(texts) for texts in groups] == [1, 1, 0]


@pytest.mark.parametrize("name", sorted({*FORMATS.values()}))
def test_every_format_is_a_module_with_its_functions(name):
    reader = reader_of(name)
    assert all(map(callable, (reader.groups, reader.rows, reader.columns)))


def test_a_listing_depends_on_content_and_not_on_the_folder(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "deeper").mkdir(parents=True)
    write_parquet(first / "b.parquet")
    write_parquet(first / "deeper" / "a.parquet")
    (first / ".hidden.parquet").write_bytes(b"nothing")
    (first / "README.md").write_text("of another format")
    shutil.copytree(first, second)
    folder, pattern = list_here(first, tmp_path), list_here(f"{second}/**/*.parquet", tmp_path)

    assert [file.name for file in folder.files] == ["b.parquet", "deeper/a.parquet"]
    assert folder.fingerprint == pattern.fingerprint
    write_parquet(second / "b.parquet", TEXTS[::-1])
    assert list_here(second, tmp_path).fingerprint != folder.fingerprint
    (first / "b.parquet").rename(first / "c.parquet")
    assert list_here(first, tmp_path).fingerprint != folder.fingerprint


def test_only_the_column_s_bytes_of_the_group_are_read(tmp_path, monkeypatch):
    texts = [f"{number}" * 500 for number in range(300)]
    file = write_parquet(tmp_path / "a.parquet", texts, compression="none")
    table = parquet.read_table(file).append_column("other", pa.array([b"x" * 9999] * 300))
    parquet.write_table(table, file, row_group_size=40, compression="none", use_dictionary=False)
    ranges = []
    original = Access.read

    def noted(self, source, file, begin, end):
        ranges.append((begin, end))
        return original(self, source, file, begin, end)

    access = Access(tmp_path)
    listing = list_source(str(file), "text", access)
    monkeypatch.setattr(Access, "read", noted)
    read_group(listing, listing.groups[3], access)
    assert ranges == [(listing.groups[3].begin, listing.groups[3].end)]
    assert ranges[0][1] - ranges[0][0] < file.stat().st_size / 20


def test_a_file_of_a_store_is_read_as_one_of_this_disk(tmp_path):
    store = fsspec.filesystem("memory")
    content = write_parquet(tmp_path / "a.parquet").read_bytes()
    for name in ("a", "b"):
        store.pipe_file(f"/{tmp_path.name}/{name}.parquet", content)
    source = f"memory://{tmp_path.name}"
    for other in ("README.md", "_delta_log/0.json", ".hidden.jsonl"):
        store.pipe_file(f"/{tmp_path.name}/{other}", b"of another format")
    try:
        both = [text for _, text in ROWS] * 2
        assert texts_of(source, tmp_path) == texts_of(f"{source}/*.parquet", tmp_path) == both
        access = Access(tmp_path)  # in a run, what lists a file also reads it
        listing = list_source(f"{source}/a.parquet", "text", access)
        read_group(listing, listing.groups[0], access)
        store.pipe_file(f"/{tmp_path.name}/a.parquet", content + bytes(9))
        with pytest.raises(DataError, match=r"a\.parquet has changed since"):
            read_group(listing, listing.groups[1], access)
        store.rm(f"/{tmp_path.name}", recursive=True)
        with pytest.raises(DataError, match=r"a\.parquet has vanished since"):
            read_group(listing, listing.groups[1], access)
    finally:
        store.store.clear()


class Hosted(MemoryFileSystem):
    """A file system of a host, which its URLs name."""

    protocol = "hosted"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]

    def __init__(self, host, **options):
        super().__init__(**options)

    @classmethod
    def _strip_protocol(cls, path):
        _, has_host, rest = path.partition("hosted://")
        return super()._strip_protocol(f"/{rest.partition('/')[2]}" if has_host else path)

    @staticmethod
    def _get_kwargs_from_urls(path):
        return {"host": path.removeprefix("hosted://").partition("/")[0]}


@pytest.mark.parametrize("end", ["", "/", "/*.jsonl", "/a.jsonl"])
def test_a_store_with_a_host_in_its_urls_is_read(tmp_path, end):
    fsspec.register_implementation("hosted", Hosted, clobber=True)
    Hosted("a-host").pipe_file("/rows/a.jsonl", lines_of(TEXTS))
    assert texts_of(f"hosted://a-host/rows{end}", tmp_path) == [text for _, text in ROWS]


# What cannot be listed.


UNLISTED = {
    "nonesuch://a/b.parquet": "cannot be read: Protocol not known",
    "memory://none/a.parquet": "does not exist",
    "memory://none/*.parquet": "names no table",
    "zip://rows/*.jsonl::memory://none/rows.zip": "no URLs of their own|does not exist",
}


@pytest.mark.parametrize("source", UNLISTED)
def test_a_source_that_is_not_there_is_reported(tmp_path, source):
    with pytest.raises(DataError, match=UNLISTED[source]):
        list_here(source, tmp_path)


def contents(path):
    """What cannot be streamed, by name: contents, and what is said of each."""
    nested = pa.table({"text": [[{"role": "user", "content": "a"}]]})
    empty = pa.table({"text": pa.array([], pa.string())})
    tables = {"nested": nested, "empty": empty}
    for name, one in tables.items():
        parquet.write_table(one, path / name)
    whole = write_parquet(path / "whole").read_bytes()
    return {
        "a.parquet": {
            b"PAR1 and no more": "cannot be read as Parquet",
            whole[:-9]: "cannot be read as Parquet",
            b"": "cannot be read as Parquet",
            write_parquet(path / "x", [1, 2]).read_bytes(): "holds int64, not text",
            write_parquet(path / "x", [b"a"]).read_bytes(): "holds binary, not text",
            (path / "nested").read_bytes(): "holds list<.*, not text",
            write_parquet(path / "x", column="body").read_bytes(): "Its columns: id, body",
            (path / "empty").read_bytes(): "has no rows",
            whole: "smaller row groups",
        },
        "a.jsonl": {
            b"": "has no rows",
            b"3\n": "not an object",
            b'[\n{"body": "a"}, {"body":': "a.jsonl cannot be read: Expecting value",
            b'{"rows":\n [{"text": "a"}]}': "not JSON .*an object on a line of its own",
            b'{"body": "a"}': "Its columns: body",
        },
        "a.jsonl.gz": {b"{}" * 99: "Not a gzipped file"},
        "a.csv": {b"a,b\n1,2\n": "Its columns: a, b", b"\n": "has no rows"},
        "a.log": {b"text\n": "cannot be streamed"},
        "a.parquet.gz": {b"": "cannot be streamed"},
    }


@pytest.mark.parametrize(
    "name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.csv", "a.log", "a.parquet.gz"]
)
def test_a_file_that_cannot_be_streamed_is_reported(tmp_path, monkeypatch, name):
    for content, reason in contents(tmp_path)[name].items():
        if reason == "smaller row groups":
            monkeypatch.setattr("data.reading.rows.MOST_GROUP_BYTES", 100)
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=reason) as caught:
            read(tmp_path / name, tmp_path)
        assert str(caught.value).startswith(("data.source=", "data.text_column="))


def test_a_folder_may_be_named_like_a_file(tmp_path):
    """As some tools write tables, in parts."""
    (tmp_path / "data/2026.parquet").mkdir(parents=True)
    write_parquet(tmp_path / "data/2026.parquet/part-0.parquet")
    assert texts_of(tmp_path / "data", tmp_path) == [text for _, text in ROWS]


def test_a_broken_first_line_is_left_out_as_any_other(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": \n' + lines_of("ab"))
    with pytest.raises(BrokenText, match=r"row 1 of a\.jsonl cannot be read"):
        read(file, tmp_path)
    access = Access(tmp_path)
    listing = list_source(str(file), "text", access, skip_broken=True)
    (found,) = (read_group(listing, group, access, True) for group in listing.groups)
    assert found == ["a\n", "b\n"]


# Groups that cannot be decoded.


def damaged(path):
    content = bytearray(write_parquet(path, compression="zstd").read_bytes())
    second = list_here(path, path.parent).groups[1]
    content[second.begin + 40 : second.end - 40] = bytes(second.end - second.begin - 80)
    path.write_bytes(content)


def without_utf8(path):
    texts = [text.encode() for text in TEXTS]
    texts[50] = b"caf\xe9"
    array = pa.array(texts, pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"text": array}), path, row_group_size=40)


def line_of(line):
    return lambda path: path.write_bytes(lines_of(TEXTS[:5]) + line + b"\n")


BROKEN = {
    "a damaged page": ("a.parquet", damaged, "rows 41 to 80 of a.parquet cannot be read", 1),
    "not UTF-8, in Parquet": ("a.parquet", without_utf8, "after row 50 .* be read: .utf-8", 1),
    "not UTF-8": ("a.jsonl", line_of(b'{"text": "caf\xe9"}'), "not UTF-8", 0),
    "a half of a character": ("a.jsonl", line_of(b'{"text": "\\ud800"}'), "surrogates", 0),
    "not JSON": ("a.jsonl", line_of(b'{"text": '), "not JSON", 0),
    "nested too deeply": ("a.jsonl", line_of(b"[" * 100_000), "not JSON", 0),
    "a number": ("a.jsonl", line_of(b'{"text": 3}'), "holds int, not text: 3", 0),
    "a list": ("a.jsonl", line_of(b'{"text": ["a"]}'), "holds list, not text", 0),
    "no object": ("a.jsonl", line_of(b"3"), "not an object", 0),
    "cut gzip": (
        "a.jsonl.gz",
        lambda path: path.write_bytes(gzip.compress(lines_of(TEXTS))[:-20]),
        r"the part after row \d+ of a.jsonl.gz cannot be read: Compressed file ended before",
        0,
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_group_that_cannot_be_decoded_is_reported_or_skipped(tmp_path, monkeypatch, case):
    monkeypatch.setattr(lines, "PIECE_BYTES", 100)  # the first row of each can be read
    name, write, reason, broken = BROKEN[case]
    file = tmp_path / name
    write(file)
    row = rf"row 6 of {name} cannot be read: .*" if name == "a.jsonl" else ""
    with pytest.raises(BrokenText, match=rf"{row}{reason}.*data\.skip_broken=true"):
        read(file, tmp_path)

    warnings = []
    access = Access(tmp_path, warnings.append)
    listing = list_source(str(file), "text", access)
    groups = [read_group(listing, group, access, skip_broken=True) for group in listing.groups]
    if name == "a.jsonl":  # the line alone
        assert groups[broken] == [text for _, text in ROWS[:4]]
        what = "row 6 of a.jsonl ("
    else:
        assert groups[broken] == []
        what = f"rows 41 to 80 of {name}: " if broken else f"{name}: "
    assert groups == [read_group(listing, group, access, True) for group in listing.groups]
    (warning,) = warnings  # although it was read twice
    assert warning.startswith(f"warning: data.source={file}: left out: {what}")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_huge_row_is_reported_before_it_fills_the_memory(tmp_path, monkeypatch, name):
    monkeypatch.setattr("data.reading.table.MOST_ROW_BYTES", 10_000)
    monkeypatch.setattr(lines, "SLACK_BYTES", 100)
    monkeypatch.setattr(lines, "GROUP_BYTES", 500)
    monkeypatch.setattr(lines, "PIECE_BYTES", 500)
    content = lines_of(["a"]) + lines_of(["x" * 100_000]) + lines_of(["b"])
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    listing = list_here(tmp_path / name, tmp_path)
    asked = []
    original = Access.read
    monkeypatch.setattr(Access, "read", lambda *given: asked.append(given[-2:]) or original(*given))

    warnings = []
    access = Access(tmp_path, warnings.append)
    groups = [read_group(listing, group, access, True) for group in listing.groups]
    (warning,) = warnings
    assert "row has more than" in warning
    if name == "a.jsonl":
        assert max(end - begin for begin, end in asked) < 20_000
        assert groups[-1] == ["b\n"]


def test_a_local_file_that_changes_in_a_run_ends_it(tmp_path):
    file = write_parquet(tmp_path / "a.parquet")
    listing = list_here(file, tmp_path)
    write_parquet(file, TEXTS[::-1] * 2)
    for skip_broken in (False, True):
        with pytest.raises(DataError, match=r"a\.parquet has changed since the run listed it"):
            read_group(listing, listing.groups[0], Access(tmp_path), skip_broken)
    file.unlink()
    with pytest.raises(DataError, match=r"a\.parquet has vanished since the run listed it"):
        read_group(listing, listing.groups[0], Access(tmp_path), skip_broken=True)
