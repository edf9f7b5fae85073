"""Formats and compressions of files: what their names say, and their first bytes."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable
from typing import IO, Any

TEXT, LINES, CSV, PARQUET = "text", "lines", "csv", "parquet"
FORMATS = {
    **dict.fromkeys((".txt", ".text", ".md", ".py"), TEXT),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), LINES),
    **dict.fromkeys((".csv", ".tsv"), CSV),
    ".parquet": PARQUET,
}
"""By file extension, the module of this package that reads the format, with the functions of
`Format` in data/reading/table.py. A new format is a module and its line here."""
BROKEN_COMPRESSION = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""Raised by reading a broken compressed file."""
HEAD_BYTES = 512


def _open_zstd(file: Any) -> Any:
    import pyarrow as pa  # a second of a start that reads no such file

    return pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")


COMPRESSIONS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}
"""By file extension, what wraps an open binary file."""
LFS_POINTER = b"version https://git-lfs"
"""Begins the small text that a clone without Git LFS has in the place of a file."""
LFS_REMEDY = "a Git LFS pointer. Fetch the file itself: git lfs pull"


def suffixes(path: str) -> tuple[str, str]:
    """The file extensions of format and compression, '' for none.

    In lower case: `A.TXT.GZ` has the format of `a.txt.gz`.
    """
    name = path.lower().rpartition("/")[2]
    ends = [f".{end}" for end in name.lstrip(".").split(".")[1:]]
    compression = ends.pop() if ends and ends[-1] in COMPRESSIONS else ""
    return ends[-1] if ends else "", compression


def format_of(name: str) -> str | None:
    """The format of a file, by its extension; None if it has no known one."""
    suffix, compression = suffixes(name)
    kind = FORMATS.get(suffix)
    return None if kind == PARQUET and compression else kind  # it is compressed inside


def is_data(path: str) -> bool:
    """Whether a file in a folder belongs to the data set: a table that is not hidden."""
    parts = path.split("/")
    is_hidden = any(part.startswith((".", "_")) for part in parts)
    return not is_hidden and format_of(parts[-1]) not in (None, TEXT)


def decompressed(name: str, file: Any) -> IO[bytes]:
    """An open file of bytes, decompressed according to its name."""
    compression = suffixes(name)[1]
    return COMPRESSIONS[compression](file) if compression else file


def other_content(head: bytes) -> str | None:
    """What the first bytes of a content are and what to do; None if they can be of a text."""
    if head.startswith(LFS_POINTER):
        return LFS_REMEDY
    # NUL is a character of UTF-8, but no text has many: a tar archive, UTF-16, a torn copy do.
    if head.count(0) * 4 > len(head):
        return "NUL bytes for the most part. Unpack it, convert it to UTF-8, or copy it again"
    return None
