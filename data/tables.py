"""Tables (JSON lines, CSV, Parquet); each row is a document."""

from __future__ import annotations

import tempfile
from pathlib import Path

import datasets
from datasets import Features, IterableDataset, List, Value
from pyarrow.parquet import ParquetFile

from data.columns import Column
from data.errors import BrokenText, DataError
from data.formats import refuse_other_content

ROWS_PER_PIECE = 64
PIECE_FEATURES = Features({"text": Value("large_string"), "ends": List(Value("int64"))})


def table_pieces(name: str, reader: str, files: list[Path], column: Column) -> IterableDataset:
    """The rows of table files. Raises DataError if they cannot be read or lack the column."""
    options = column.csv_options() if reader == "csv" else {}
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
        return row_pieces(name, rows, column)
    except DataError:
        raise
    except Exception as error:  # unrelated types of pyarrow, pandas and others
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BrokenText(f"data.source={name} cannot be read as {reader}: {reason}") from error


def row_pieces(name: str, rows: IterableDataset, column: Column) -> IterableDataset:
    """Rows joined into pieces. Raises DataError if the first row lacks the column."""
    first = next(iter(rows), None)
    if first is None:
        raise _no_rows(name)
    found = column.find(name, list(first))
    column.document({key: first[key] for key in found}, 1, name)
    return rows.select_columns(found).map(
        _join_rows,
        with_indices=True,
        batched=True,
        batch_size=ROWS_PER_PIECE,
        remove_columns=found,
        fn_kwargs={"column": column, "name": name},
        features=PIECE_FEATURES,
    )


def _no_rows(name: str) -> DataError:
    return BrokenText(f"data.source={name} is empty: it has no rows.")


def _join_rows(
    batch: dict[str, list], numbers: list[int], column: Column, name: str
) -> dict[str, list]:
    parts: list[str] = []
    ends: list[int] = []
    length = 0
    for number, *values in zip(numbers, *batch.values(), strict=True):
        document = column.document(dict(zip(batch, values, strict=True)), number + 1, name)
        if not document:
            continue
        parts.append(document)
        length += len(document)
        ends.append(length)
    return {"text": ["".join(parts)], "ends": [ends]}
