"""Data sets to stream, whose rows hold their own ids, and a stream of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq

from config.schema import DataConfig, MixPart
from data.corpus import Corpus
from data.loader import StepBatches, window_loader, windows_of
from data.reading.access import Access
from data.reading.rows import list_source, read_group
from data.split import Split
from data.streaming import streamed
from data.streaming.streamed import fixed_tokenizer
from data.tokenizer import OF_BYTES, Tokenizer


def rows_of(name: str, first: int, count: int) -> list[str]:
    """Rows of different lengths, each with its id in front."""
    return [
        f"{name}{number}: {'the run resumes ' * (number % 7)}"
        for number in range(first, first + count)
    ]


def parquet_folder(folder: Path, name: str, files: int = 3, rows: int = 40) -> Path:
    """A data set of Parquet files, in groups of ten rows."""
    folder.mkdir(parents=True)
    for number in range(files):
        table = pa.table({"text": rows_of(name, number * rows, rows)})
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=10)
    return folder


def lines_folder(folder: Path, name: str, files: int = 2, rows: int = 40) -> Path:
    """A data set of JSON lines."""
    folder.mkdir(parents=True)
    for number in range(files):
        lines = [json.dumps({"text": text}) for text in rows_of(name, number * rows, rows)]
        (folder / f"part-{number}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def stream_of(listings, weights, read=read_group, tokenizer=OF_BYTES, **settings) -> Corpus:
    """A stream by its settings: keys of `data.*`, arguments of `open_stream`, and the folder.

    `read` is called instead of `read_group`; `held_out` are listings of another split.
    """
    access = Access(settings.pop("cache_dir"), settings.pop("say", None))
    held_out = settings.pop("held_out", None)
    own = {key: settings.pop(key) for key in ("seed", "reads_ahead") if key in settings}
    mix = [MixPart(listing.name, weight) for listing, weight in zip(listings, weights, strict=True)]
    split = None if held_out is None else "validation"
    data = DataConfig(mix=mix, held_out_split=split, **settings)
    found = tokenizer if isinstance(tokenizer, Tokenizer) else fixed_tokenizer(tokenizer)
    with patch.multiple(
        streamed, read_group=read, list_stream=lambda *_: held_out, fixed_tokenizer=lambda _: found
    ):
        return streamed.open_stream(data, listings, access, tokenizer, **own)


def corpus(folder: Path, *sources: Path, weights: tuple[float, ...] = (1.0,), **settings) -> Corpus:
    """A stream of local data sets, in bytes, with its cache in a folder."""
    access = Access(folder, settings.get("say"))
    options = {
        "seed": 1,
        "val_fraction": 0.1,
        "window_bytes": 3000,
        "reads_ahead": True,
        "stream_cache_bytes": 1_000_000,
        "held_out_bytes": 1000,
        "cache_dir": folder,
    }
    listings = [list_source(str(source), "text", access) for source in sources]
    return stream_of(listings, weights, **options | settings)


def steps_of(corpus: Corpus, batch: int, first: int = 1, block_size: int = 16) -> Iterator[Any]:
    """The batches of a run's steps, endlessly, each with what a snapshot after it stores."""
    windows = windows_of(corpus.train, block_size, -100, pack=False)
    steps = StepBatches(windows.order(0, batch), Split(batch), first)
    for step, (tensors, _) in enumerate(window_loader(windows, steps), start=first):
        yield tensors, corpus.train.finish(step)


def ids_in(corpus: Corpus, tokens: Any) -> list[str]:
    """The ids of the rows that end in some tokens."""
    rows = corpus.tokenizer.decode(tokens).split("<|endoftext|>")[:-1]
    return [row.partition(":")[0] for row in rows]


def held_out_ids(corpus: Corpus) -> list[str]:
    return ids_in(corpus, corpus.held_out.window(0, len(corpus.held_out)))
