"""Formats and compressions of files, which the extensions of their names select.

The module of a format has two functions, which take a table (data/reading/table.py):

    groups(table)         the groups of rows of the file, none if it has no rows
    rows(table, group)    the rows of a group in order, each with its number, from 1; a bad one is a
                          BadRow. Raises an error of `UNREADABLE` if the rest cannot be decoded
"""

from __future__ import annotations

import csv
import gzip
import lzma
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

TEXT, LINES, CSV, PARQUET = "text", "lines", "csv", "parquet"
FORMATS = {
    **dict.fromkeys((".txt", ".text", ".md", ".py"), TEXT),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), LINES),
    **dict.fromkeys((".csv", ".tsv"), CSV),
    ".parquet": PARQUET,
}
"""By file extension, the module of this package. A new format is a module and its line here."""


def _open_by_pyarrow(codec: str, file: Any) -> Any:
    import pyarrow as pa  # a second of a start that reads no such file

    return pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)


COMPRESSIONS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    # For bz2.open a damaged stream behind another one is the end. For lzma.open too, but pyarrow
    # reads no xz.
    ".bz2": partial(_open_by_pyarrow, "bz2"),
    ".xz": lzma.open,
    ".zst": partial(_open_by_pyarrow, "zstd"),
}
"""By file extension, what wraps an open binary file."""
UNREADABLE = (
    *(ValueError, NotImplementedError, RecursionError, csv.Error),  # the first two: pyarrow's too
    *(OSError, EOFError, lzma.LZMAError, zlib.error),
)
"""Errors of the decoders for a broken file."""


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
    return FORMATS.get(suffixes(name)[0])


def is_data(path: str) -> bool:
    """Whether a file in a folder belongs to the data set: a table that is not hidden."""
    parts = path.split("/")
    is_hidden = any(part.startswith((".", "_")) for part in parts)
    return not is_hidden and format_of(parts[-1]) not in (None, TEXT)
