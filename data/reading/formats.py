"""Formats of files. A new one is a file next to this one, and its lines here.

The file has a class with the methods of `Format` in data/reading/table.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

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
"""By file extension."""


def reader_of(name: str) -> Format:
    """What reads a format. Imported here: most starts read no table, and pyarrow takes a second."""
    from data.reading.delimited import Delimited
    from data.reading.lines import Lines
    from data.reading.parquet import Parquet
    from data.reading.text import Text

    readers: dict[str, Format] = {
        TEXT: Text(),
        LINES: Lines(),
        CSV: Delimited(),
        PARQUET: Parquet(),
    }
    return readers[name]


def format_of(name: str) -> str | None:
    """The format of a file, by its extension; None if it has no known one."""
    suffix, compression = suffixes(name)
    kind = FORMATS.get(suffix)
    return None if kind == PARQUET and compression else kind


def is_table(name: str) -> bool:
    """Whether a file has rows and columns, by its extension."""
    return format_of(name) not in (None, TEXT)


def mixed_formats(source: str, names: Iterable[str]) -> DataError:
    """The error for files of several formats."""
    ends = sorted({suffixes(name)[0] or name for name in names})
    return DataError(
        f"data.source={source} mixes formats ({', '.join(ends)}). Name files of one format."
    )
