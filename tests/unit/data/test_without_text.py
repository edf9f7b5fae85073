"""A file without a text in any row is refused."""

from __future__ import annotations

import gzip
import json
from contextlib import closing
from functools import partial
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest
from pyarrow import parquet

import streams
from data.corpus import prepare_corpus
from data.errors import DataError
from data.reading.access import Access
from data.reading.rows import list_source, read_group
from data.streaming.streamed import fixed_tokenizer
from data.tokenizer import OF_BYTES

ROWS = [f"row {number}" for number in range(10)]


def lines(values, column="text"):
    return b"".join(json.dumps({"id": 1, column: value}).encode() + b"\n" for value in values)


def write_parquet(path, values):
    table = pa.table({"text": pa.array(values, pa.string())})
    parquet.write_table(table, path, row_group_size=4)


def prepare(source: str, folder: Path):
    settings = {"val_fraction": 0.1, "block_size": 4, "cache_dir": folder}
    return prepare_corpus(source, text_column="text", **settings)


def stream(source: str, folder: Path):
    with closing(Access(folder)) as access:
        corpus = streams.stream_of(
            [list_source(source, "text", access)],
            [1],
            partial(read_group, access=access),
            fixed_tokenizer(OF_BYTES),
            seed=1,
            val_fraction=0.3,
            window_bytes=10**6,
            cache_bytes=10**6,
            held_out_bytes=10**6,
            cache_dir=folder,
        )
        corpus.train.sources[0].open(0, 0)
    return corpus


WAYS = {"prepared": prepare, "streamed": stream}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["column", "nulls", "gzip", "parquet", "csv"])
def test_a_file_that_has_no_text_is_refused(tmp_path, way, kind):
    """Its 10 rows of 20 were left out without a word."""
    folder = tmp_path / "data"
    folder.mkdir()
    if kind == "parquet":
        write_parquet(folder / "a.parquet", ROWS)
        write_parquet(folder / "b.parquet", [None] * 10)
    elif kind == "csv":
        (folder / "a.csv").write_text("id,text\n" + "".join(f"1,{row}\n" for row in ROWS))
        (folder / "b.csv").write_text("id,text\n" + "1,\n" * 10)
    else:
        (folder / "a.jsonl").write_bytes(lines(ROWS))
        others = lines(ROWS, "body") if kind == "column" else lines([None, ""] * 5)
        name, content = "b.jsonl", others
        if kind == "gzip":
            name, content = "b.jsonl.gz", gzip.compress(others)
        (folder / name).write_bytes(content)
    reason = "is not a column" if kind == "column" else r"no row of .*b\.\S+ has a text in text"
    with pytest.raises(DataError, match=rf"(?s)(?=.*b\.).*{reason}"):
        WAYS[way](f"{folder}/*", tmp_path / "cache")


def noted(call, calls: list[int]):
    return lambda *given: (calls.append(1), call(*given))[1]


def test_a_listing_requests_the_first_rows_of_one_file(tmp_path, monkeypatch):
    store = fsspec.filesystem("memory")
    read: list[int] = []
    for name in "ab":
        store.pipe_file(f"/{tmp_path.name}/{name}.jsonl", lines([None, *ROWS]))
    try:
        for expected in (1, 1):
            with closing(Access(tmp_path)) as access:
                monkeypatch.setattr(access, "read", noted(access.read, read))
                list_source(f"memory://{tmp_path.name}", "text", access)
            assert len(read) == expected
            read.clear()
    finally:
        store.store.clear()
