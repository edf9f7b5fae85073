"""Data sets of benchmarks/streaming.py, and our stream of some."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from harness import ROOT
from pyarrow import parquet

sys.path.insert(0, str(ROOT))
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"

WEIGHTS = [0.7, 0.3]
ROW_BYTES = 2000


def made_up_rows(count: int, seed: int = 7, size: int = ROW_BYTES) -> Iterator[str]:
    """Rows of made-up words."""
    chosen = random.Random(seed)
    words = ["".join(chosen.choices("etaoinshrdlu", k=chosen.randrange(2, 9))) for _ in range(5000)]
    for _ in range(count):
        yield " ".join(chosen.choices(words, k=size // 6))


def write_parquet(path: Path, texts: list[str], group: int = 1000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table({"text": texts}), path, row_group_size=group)


def text_of(sources: list[Path], cache: Path, window_bytes: int) -> tuple[Any, Any]:
    """Our stream of sources, and what reads their bytes."""
    from data.reading.access import Access
    from data.reading.listing import list_source
    from data.reading.rows import read_group
    from data.streaming.streamed import fixed_tokenizer, stream_corpus
    from data.streaming.windows import StreamDefinition, StreamReading

    access = Access(cache)
    definition = StreamDefinition(
        [list_source(str(source), "text", access) for source in sources],
        WEIGHTS[: len(sources)],
        fixed_tokenizer("bpe:257"),
        seed=1,
        val_fraction=0.001,
        window_bytes=window_bytes,
        held_out_bytes=1,
    )
    reading = StreamReading(
        partial(read_group, access=access), cache, cache_bytes=10**9, prefetch_bytes=0
    )
    return stream_corpus(definition, reading).train, access
