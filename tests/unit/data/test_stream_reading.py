"""Groups of rows of Parquet and JSON lines on this machine and in stores: each row once."""

from __future__ import annotations

import gzip
import shutil
import zipfile
from typing import ClassVar

import fsspec
import pyarrow as pa
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import parquet

from data.errors import DataError
from data.reading import lines
from data.reading.access import Access
from data.reading.formats import FORMATS
from data.reading.groups import DataFile
from data.reading.rows import list_source, read_group
from data.reading.table import Table
from stream_data import ROWS, TEXTS, lines_of, write_parquet


def list_here(source, cache, column="text"):
    return list_source(str(source), column, Access(cache))


def read(source, cache, **options):
    """The texts of all groups of a source."""
    listing = list_here(source, cache)
    return [read_group(listing, group, Access(cache), **options) for group in listing.groups]


def texts_of(source, cache):
    return [text for group in read(source, cache) for text in group]


@pytest.mark.parametrize("skip_broken", [False, True])
def test_later_groups_of_a_file_may_have_no_text(tmp_path, monkeypatch, skip_broken):
    monkeypatch.setattr(lines, "GROUP_BYTES", 1000)
    file = tmp_path / "a.jsonl"
    file.write_bytes(lines_of(TEXTS[:50]) + b'{"meta": "a"}\n' * 200)
    groups = read(file, tmp_path, skip_broken=skip_broken)
    assert groups[-1] == []
    assert [text for group in groups for text in group] == [f"{one}\n" for one in TEXTS[:50] if one]


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\n\ntwo, é".encode())
    (tmp_path / "b.TXT.gz").write_bytes(gzip.compress(b"three\n"))
    (tmp_path / "c.txt").write_bytes(b"")
    listing = list_here(f"{tmp_path}/*", tmp_path / "cache")
    assert (len(listing.files), len(listing.groups)) == (3, 2)
    assert texts_of(f"{tmp_path}/*.*", tmp_path / "cache") == ["one\r\n\ntwo, é\n", "three\n"]


@pytest.mark.parametrize("name", sorted({*FORMATS.values()}))
def test_every_format_is_a_module_with_its_functions(name):
    suffix = next(suffix for suffix, kind in FORMATS.items() if kind == name)
    file = DataFile(f"a{suffix}", f"a{suffix}", 1, "")
    reader = Table(None, "a", None, file).reader
    assert reader.__name__ == f"data.reading.{name}"
    assert all(map(callable, (reader.groups, reader.rows)))


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
        with pytest.raises(DataError, match=r"a\.parquet does not exist"):
            read_group(listing, listing.groups[1], access)
    finally:
        store.store.clear()


class Hosted(MemoryFileSystem):
    """A file system of a host, which its URLs name, perhaps after a folder: of an account."""

    protocol = "hosted"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]

    def __init__(self, host, **options):
        super().__init__(**options)

    @classmethod
    def _strip_protocol(cls, path):
        _, has_host, rest = path.partition("hosted://")
        host, _, inside = rest.partition("/")
        folder = host.rpartition("@")[0]
        return super()._strip_protocol(f"{folder}/{inside}" if has_host else path)

    @staticmethod
    def _get_kwargs_from_urls(path):
        return {"host": path.removeprefix("hosted://").partition("/")[0].rpartition("@")[2]}


@pytest.mark.parametrize("end", ["", "/", "/*.jsonl", "/a.jsonl"])
@pytest.mark.parametrize("begin", ["a-host/rows", "rows@a-host"])
def test_a_store_with_a_host_in_its_urls_is_read(tmp_path, begin, end):
    fsspec.register_implementation("hosted", Hosted, clobber=True)
    Hosted("a-host").pipe_file("/rows/a.jsonl", lines_of(TEXTS))
    assert texts_of(f"hosted://{begin}{end}", tmp_path) == [text for _, text in ROWS]


@pytest.mark.parametrize("files", ["", "*.jsonl", "a.jsonl"])
def test_a_file_in_an_archive_is_read(tmp_path, files):
    with zipfile.ZipFile(tmp_path / "rows.zip", "w") as archive:
        archive.writestr("rows/a.jsonl", lines_of(TEXTS))
    source = f"zip://rows/{files}::file://{tmp_path}/rows.zip"
    assert texts_of(source, tmp_path) == [text for _, text in ROWS]


UNLISTED = {
    "nonesuch://a/b.parquet": "cannot be read: Protocol not known",
    "memory://none/a.parquet": "does not exist",
    "memory://none/*.parquet": "names no file",
    "zip://rows/*.jsonl::memory://none/rows.zip": "does not exist",
}


@pytest.mark.parametrize("source", UNLISTED)
def test_a_source_that_is_not_there_is_reported(tmp_path, source):
    with pytest.raises(DataError, match=UNLISTED[source]):
        list_here(source, tmp_path)


def test_a_group_that_is_too_large_for_a_stream_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("data.reading.rows.MOST_GROUP_BYTES", 100)
    file = write_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"Parquet: smaller row groups\), or set data\.streaming"):
        read(file, tmp_path, skip_broken=True)


def test_a_local_file_that_changes_in_a_run_ends_it(tmp_path):
    file = write_parquet(tmp_path / "a.parquet")
    listing = list_here(file, tmp_path)
    write_parquet(file, TEXTS[::-1] * 2)
    for skip_broken in (False, True):
        with pytest.raises(DataError, match=r"a\.parquet has changed since the run listed it"):
            read_group(listing, listing.groups[0], Access(tmp_path), skip_broken)
    file.unlink()
    with pytest.raises(DataError, match=r"a\.parquet does not exist"):
        read_group(listing, listing.groups[0], Access(tmp_path), skip_broken=True)
