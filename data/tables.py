"""Tables (JSON lines, CSV, Parquet) and data sets of the Hub, each row a document."""

from __future__ import annotations

import codecs
import errno
import tempfile
from pathlib import Path
from typing import Any

import datasets
from datasets import DownloadConfig, DownloadManager, Features, IterableDataset, List, Value
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.text.text import Text
from pyarrow.parquet import ParquetFile

from data.errors import BrokenText, DataError
from data.formats import refuse_other_content
from data.locks import NO_LOCKS
from data.pieces import ended

ROWS_PER_PIECE = 64
PIECE_FEATURES = Features({"text": Value("large_string"), "ends": List(Value("int64"))})
CLOSED = (*NO_LOCKS, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
"""What a disk answers on which `datasets` cannot keep what it downloads."""


def table_pieces(name: str, reader: str, files: list[Path], text_column: str) -> IterableDataset:
    """The rows of table files. Raises DataError where they cannot be read or lack the column."""
    options = _csv_options(text_column) if reader == "csv" else {}
    try:
        for file in files if reader != "parquet" else ():
            refuse_other_content(str(file))
        if reader == "parquet" and not any(ParquetFile(file).metadata.num_rows for file in files):
            raise _no_rows(name)
        # Nothing is kept there, but its own cache may be closed, or on a disk without locks.
        with tempfile.TemporaryDirectory() as scratch:
            rows = datasets.load_dataset(
                reader,
                data_files=[str(file) for file in files],
                split="train",
                streaming=True,
                cache_dir=scratch,
                **options,
            )
        return _row_pieces(name, rows, text_column)
    except DataError:
        raise
    except Exception as error:  # readers raise their own types: pyarrow's, pandas', OSError, ...
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BrokenText(f"data.source={name} cannot be read as {reader}: {reason}") from error


def _csv_options(text_column: str) -> dict[str, Any]:
    """Else pandas drops texts such as "NA" and turns "007" into 7."""
    return {"keep_default_na": False, "converters": {text_column: str}}


def hub_pieces(name: str, text_column: str) -> list[Path] | tuple[IterableDataset, str]:
    """The split `train` of a data set on the Hub, kept in the cache of `datasets`.

    Of a data set of texts the files themselves, which its rows, a line each, do not give to the
    letter; of any other its rows, and the version that was downloaded.

    Raises DataError when it cannot be had.
    """
    try:
        builder = datasets.load_dataset_builder(name)
        if isinstance(builder, Text):
            return _files_of(builder, name, text_column)
        if isinstance(builder, Csv):
            builder = datasets.load_dataset_builder(name, **_csv_options(text_column))
        builder.download_and_prepare()
        rows = builder.as_dataset(split="train")
    except DataError:
        raise
    except Exception as error:  # of many unrelated types: the Hub's, the network's, the builder's
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, OSError) and error.errno in CLOSED:
            raise DataError(
                f"data.source={name} cannot be kept in {datasets.config.HF_DATASETS_CACHE}: "
                f"{reason}. Name a folder on another disk in HF_DATASETS_CACHE."
            ) from error
        raise DataError(
            f"data.source={name} is neither a file here nor a data set whose split 'train' could "
            f"be loaded from the Hub: {reason.rstrip('.')}. For a private one log in with `hf auth "
            "login`, or set HF_TOKEN."
        ) from error
    return _row_pieces(name, rows.to_iterable_dataset(), text_column), str(builder.cache_dir)


def _files_of(builder: Text, name: str, text_column: str) -> list[Path]:
    """The files of the split `train`, downloaded and unpacked."""
    config = builder.config
    columns = list(config.features or ("text",))
    if text_column not in columns:
        raise _no_column(name, text_column, columns)
    if codecs.lookup(config.encoding).name != "utf-8":
        raise DataError(
            f"data.source={name} says that its text is in {config.encoding}; only UTF-8 is read. "
            "Download it, convert it and give its path."
        )
    if "train" not in config.data_files:
        raise ValueError(f"it has the splits {', '.join(map(str, config.data_files))}")
    downloads = DownloadManager(
        dataset_name=builder.dataset_name,
        download_config=DownloadConfig(
            cache_dir=builder._cache_downloaded_dir,
            token=builder.token,
            storage_options=builder.storage_options,
            use_etag=False,  # the address has the commit in it
        ),
    )
    there = downloads.download_and_extract(config.data_files["train"])
    return [Path(str(file)) for file in downloads.iter_files(there)]


def _row_pieces(name: str, rows: IterableDataset, text_column: str) -> IterableDataset:
    """Rows joined into pieces, their column checked by the first."""
    first = next(iter(rows), None)
    if first is None:
        raise _no_rows(name)
    if text_column not in first:
        raise _no_column(name, text_column, list(first))
    _check_text(first[text_column], text_column, name)
    return rows.select_columns([text_column]).map(
        _join_rows,
        batched=True,
        batch_size=ROWS_PER_PIECE,
        remove_columns=[text_column],
        fn_kwargs={"column": text_column, "name": name},
        features=PIECE_FEATURES,
    )


def _no_column(name: str, text_column: str, columns: list[str]) -> DataError:
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
        if not row:  # null or empty: no document
            continue
        parts.append(ended(row))
        length += len(parts[-1])
        ends.append(length)
    return {"text": ["".join(parts)], "ends": [ends]}


def _check_text(value: object, column: str, name: str) -> None:
    if not isinstance(value, str | None):
        raise DataError(
            f"data.text_column={column} of {name} holds {type(value).__name__}, not text: "
            f"{value!r:.40}. Name a column of text."
        )
