"""Formats of files. A new one is a module of this package, and its line here.

The module has the functions of `Format` in data/reading/table.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, cast

from data.errors import DataError
from data.reading.content import suffixes

if TYPE_CHECKING:
    from data.reading.table import Format

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
"""By file extension, the module of this package that reads the format."""
COMPRESSED_INSIDE = (PARQUET,)
"""Formats whose files are compressed inside, and not by another program."""


def reader_of(name: str) -> Format:
    """The module that reads a format, imported on first use: pyarrow takes a second."""
    return cast("Format", import_module(f"data.reading.{name}"))


def format_of(name: str) -> str | None:
    """The format of a file, by its extension; None if it has no known one."""
    suffix, compression = suffixes(name)
    kind = FORMATS.get(suffix)
    return None if kind in COMPRESSED_INSIDE and compression else kind


def is_table(name: str) -> bool:
    """Whether a file has rows and columns, by its extension."""
    return format_of(name) not in (None, TEXT)


def endings(tables: bool) -> str:
    """The extensions of tables, or those of texts, in words."""
    return listed(end for end, kind in FORMATS.items() if (kind != TEXT) == tables)


def listed(names: Iterable[str]) -> str:
    """Names in words: `.gz, .xz or .zst`."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def mixed_formats(source: str, names: Iterable[str]) -> DataError:
    """The error for files of several formats."""
    ends = sorted({suffixes(name)[0] or name for name in names})
    return DataError(
        f"data.source={source} mixes formats ({', '.join(ends)}). Name files of one format."
    )
