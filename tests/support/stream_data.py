"""Small data sets for the tests of streaming: as files, on the loopback Hub, behind a URL."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from loopback_hub import LoopbackHub
from loopback_texts import Answer, Asked

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


def ranges_of(
    contents: dict[str, bytes], asked: Asked, etags: dict[str, str]
) -> Callable[[str], Answer]:
    """What a server answers that knows ranges of bytes and etags."""

    def answer(path: str) -> Answer:
        content = contents.get(path.partition("?")[0])
        if content is None:
            return 404, {"Content-Length": "0"}, []
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", asked[-1][1].get("Range", ""))
        if found is None:
            return 200, {"Content-Length": str(len(content))}, [content]
        begin, end = int(found[1]), min(int(found[2]) + 1, len(content))
        if begin >= len(content):
            return 416, {"Content-Range": f"bytes */{len(content)}", "Content-Length": "0"}, []
        headers = {
            "Content-Range": f"bytes {begin}-{end - 1}/{len(content)}",
            "Content-Length": str(end - begin),
            "ETag": etags.get(path, '"first"'),
        }
        return 206, headers, [content[begin:end]]

    return answer
