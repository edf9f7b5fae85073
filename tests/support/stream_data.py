"""Small data sets for the tests of streaming: as files, on the loopback Hub."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from loopback_hub import LoopbackHub

TEXTS = [f"row {number} of é ü 日本 " * (number % 7) for number in range(300)]
"""Every seventh is empty."""
ROWS = [(number, f"{text}\n") for number, text in enumerate(TEXTS) if text]
DATASET = "me/words"


def parquet_of(
    texts: Iterable[object] = TEXTS, column: str = "text", group: int = 40, **options: object
) -> bytes:
    """A Parquet file, of groups of so many rows."""
    values = list(texts)
    table = pa.table({"id": range(len(values)), column: values})
    file = io.BytesIO()
    parquet.write_table(table, file, row_group_size=group, **options)
    return file.getvalue()


def lines_of(texts: Iterable[object]) -> bytes:
    """JSON lines."""
    return b"".join(json.dumps({"id": 1, "text": text}).encode() + b"\n" for text in texts)


def write_parquet(path: Path, texts: Iterable[object] = TEXTS, **options: object) -> Path:
    path.write_bytes(parquet_of(texts, **options))
    return path


def publish_dataset(hub: LoopbackHub, files: dict[str, bytes], name: str = DATASET) -> str:
    """Commit files to a data set of the hub, which is made if it is not there; the commit."""
    if hub.repo(f"datasets/{name}") is None:
        hub.create(f"datasets/{name}")
    return hub.commit_files(f"datasets/{name}", files)
