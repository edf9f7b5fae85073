"""Formats and compressions of files: what their names say, and their first bytes."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable
from functools import partial
from typing import IO, Any

TEXT, LINES, CSV, PARQUET = "text", "lines", "csv", "parquet"
FORMATS = {
    ".txt": TEXT,
    ".text": TEXT,
    ".md": TEXT,
    ".py": TEXT,
    ".jsonl": LINES,
    ".ndjson": LINES,
    ".json": LINES,
    ".csv": CSV,
    ".tsv": CSV,
    ".parquet": PARQUET,
}
"""By file extension, the module of this package that reads the format, with the functions of
`Format` in data/reading/table.py. A new format is a module and its line here."""
COMPRESSED_INSIDE = (PARQUET,)
"""Formats whose files are compressed inside, and not by another program."""

BROKEN_COMPRESSION = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""Raised by reading a broken compressed file."""
HEAD_BYTES = 512


def _open_strictly(open_streams: Callable[[Any], Any], file: Any) -> Any:
    """Open a file of bzip2 or xz streams, and refuse anything else that follows one of them.

    `bz2.open` and `lzma.open` take it for the end of the file, so that the rest of a text would be
    missing without a word.
    """
    opened = open_streams(file)
    opened._buffer.raw._trailing_error = ()  # the errors that they ignore; Python 3.11 to 3.14
    return opened


def _open_zstd(file: Any) -> Any:
    import pyarrow as pa  # a second of a start that reads no such file

    return pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")


COMPRESSIONS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".bz2": partial(_open_strictly, bz2.open),
    ".xz": partial(_open_strictly, lzma.open),
    ".zst": _open_zstd,
}
"""By file extension, what wraps an open binary file."""
NAMED = "compressed by {}. Give it a name that ends in {}"
CONVERT = "UTF-16 or UTF-32. Convert it to UTF-8 first"
OTHER_FORMATS = (
    (b"\x1f\x8b", NAMED.format("gzip", ".gz")),
    (b"BZh91AY&SY", NAMED.format("bzip2", ".bz2")),
    (b"\xfd7zXZ\x00", NAMED.format("xz", ".xz")),
    (b"\x28\xb5\x2f\xfd", NAMED.format("Zstandard", ".zst")),
    (b"PK\x03\x04", "a ZIP archive. Unpack it first"),
    (b"%PDF-", "a PDF document. Convert it to text first"),
    (b"PAR1", "a Parquet table. Give it a name that ends in .parquet"),
    (b"ARROW1", "an Arrow table. Convert it to Parquet first"),
    (b"version https://git-lfs", "a Git LFS pointer. Fetch the file itself: git lfs pull"),
    (b"\xff\xfe", CONVERT),
    (b"\xfe\xff", CONVERT),
    (b"\x00\x00\xfe\xff", CONVERT),
)
"""The first bytes, the format that they indicate, and what to do."""


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
    return None if kind in COMPRESSED_INSIDE and compression else kind


def is_data(path: str) -> bool:
    """Whether a file in a folder belongs to the data set: a table that is not hidden."""
    parts = path.split("/")
    is_hidden = any(part.startswith((".", "_")) for part in parts)
    return not is_hidden and format_of(parts[-1]) not in (None, TEXT)


def decompressed(name: str, file: Any) -> IO[bytes]:
    """An open file of bytes, decompressed according to its name."""
    compression = suffixes(name)[1]
    return COMPRESSIONS[compression](file) if compression else file


def other_format(head: bytes) -> str | None:
    """The format that the first bytes of a content indicate, and what to do; None for a text."""
    for magic, what in OTHER_FORMATS:
        if head.startswith(magic):
            return what
    # NUL is a character of UTF-8, but no text has many: a tar archive, UTF-16, a torn copy do.
    if head.count(0) * 4 > len(head):
        return "NUL bytes for the most part. Unpack it, convert it to UTF-8, or copy it again"
    return None
