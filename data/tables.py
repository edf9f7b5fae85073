"""Tables (JSON lines, CSV, Parquet); each row is a document."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import datasets
from datasets import Features, IterableDataset, List, Value
from pyarrow.parquet import ParquetFile

from data.errors import BrokenText, DataError
from data.formats import refuse_other_content
from data.pieces import with_final_newline

ROWS_PER_PIECE = 64
PIECE_FEATURES = Features({"text": Value("large_string"), "ends": List(Value("int64"))})


def table_pieces(name: str, reader: str, files: list[Path], text_column: str) -> IterableDataset:
    """The rows of table files. Raises DataError if they cannot be read or lack the column."""
    options = csv_options(text_column) if reader == "csv" else {}
    try:
        for file in files if reader != "parquet" else ():
            refuse_other_content(str(file))
        if reader == "parquet" and not any(ParquetFile(file).metadata.num_rows for file in files):
            raise _no_rows(name)
        # Nothing stays there, but the usual cache may be read-only, or on a disk without locks.
        with tempfile.TemporaryDirectory() as scratch:
            rows = datasets.load_dataset(
                reader,
                data_files=[str(file) for file in files],
                split="train",
                streaming=True,
                cache_dir=scratch,
                **options,
            )
        return row_pieces(name, rows, text_column)
    except DataError:
        raise
    except Exception as error:  # unrelated types of pyarrow, pandas and others
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BrokenText(f"data.source={name} cannot be read as {reader}: {reason}") from error


def csv_options(text_column: str) -> dict[str, Any]:
    """Options for CSV, without which pandas drops texts such as "NA" and turns "007" into 7."""
    return {"keep_default_na": False, "converters": {text_column: str}}


def row_pieces(name: str, rows: IterableDataset, text_column: str) -> IterableDataset:
    """Rows joined into pieces. Raises DataError if the first row lacks the column."""
    first = next(iter(rows), None)
    if first is None:
        raise _no_rows(name)
    if text_column not in first:
        raise no_column(name, text_column, list(first))
    _check_text(first[text_column], text_column, name)
    return rows.select_columns([text_column]).map(
        _join_rows,
        batched=True,
        batch_size=ROWS_PER_PIECE,
        remove_columns=[text_column],
        fn_kwargs={"column": text_column, "name": name},
        features=PIECE_FEATURES,
    )


def no_column(name: str, text_column: str, columns: list[str]) -> DataError:
    """The error for a text column that does not exist."""
    return DataError(
        f"data.text_column={text_column} is not a column of {name}. "
        f"Its columns: {', '.join(columns)}."
    )


def _no_rows(name: str) -> DataError:
    return BrokenText(f"data.source={name} is empty: it has no rows.")


def _join_rows(batch: dict[str, list], column: str, name: str) -> dict[str, list]:
    parts: list[str] = []
    ends: list[int] = []
    length = 0
    for row in batch[column]:
        _check_text(row, column, name)
        if not row:  # null or empty: not a document
            continue
        parts.append(with_final_newline(row))
        length += len(parts[-1])
        ends.append(length)
    return {"text": ["".join(parts)], "ends": [ends]}


def _check_text(value: object, column: str, name: str) -> None:
    if not isinstance(value, str | None):
        raise DataError(
            f"data.text_column={column} of {name} holds {type(value).__name__}, not text: "
            f"{value!r:.40}. Name a column of text."
        )
