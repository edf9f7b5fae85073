"""Prepared Hub data sets: `datasets` downloads and caches them, and its builders read some."""

from __future__ import annotations

import codecs
import errno
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import datasets
from datasets import (
    BuilderConfig,
    DatasetBuilder,
    DownloadConfig,
    DownloadManager,
    IterableDataset,
)
from datasets.packaged_modules.cache.cache import Cache
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.json.json import Json
from datasets.packaged_modules.parquet.parquet import Parquet
from datasets.packaged_modules.text.text import Text

from data.columns import TextColumn
from data.errors import BadRow, DataError, TextUnreachable
from data.pieces import Piece, pieces_of
from data.reading.access import local_file
from data.reading.content import suffixes
from data.reading.formats import format_of
from data.reading.groups import DataFile
from data.reading.parquet import Restore, restorer
from data.reading.places import names_in_folder
from data.reading.waiting import is_transient
from data.shared_files import NO_LOCKS, temporary_name

CACHE_ERRORS = (*NO_LOCKS, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
"""Disk errors that keep `datasets` from caching its downloads."""


def hub_pieces(
    name: str, column: TextColumn, cache_dir: Path, say: Callable[[str], None]
) -> list[DataFile] | tuple[Callable[[], Iterator[Piece]], str]:
    """The split `train` of a data set on the Hub, downloaded to the cache of `datasets`.

    Its files, if they are texts or tables that need no options; for any other its rows, as
    `datasets` reads them, and the version that was downloaded. If the Hub cannot be reached, an
    earlier download is used; `cache_dir` records the files of it.

    Raises DataError if the data set cannot be loaded.
    """
    digest = hashlib.sha256(f"{name}\0{column.key}".encode()).hexdigest()[:16]
    record = cache_dir / "hub" / f"{digest}.json"
    try:
        builder = _builder(name, column)
        if isinstance(builder, Cache) and (files := _recorded_files(name, record)):
            return files
        if isinstance(builder, Text):
            return _record_files(record, _texts_of(builder, name, column))
        if tables := _tables_of(builder, name):
            return _record_files(record, tables)
        builder.download_and_prepare()
        rows = builder.as_dataset(split="train").to_iterable_dataset()
    except DataError:
        raise
    except Exception as error:  # many unrelated types: of the Hub, the network, the builder
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, OSError) and error.errno in CACHE_ERRORS:
            raise DataError(
                f"data.source={name} cannot be cached in {datasets.config.HF_DATASETS_CACHE}: "
                f"{reason}. Name a folder on another disk in HF_DATASETS_CACHE."
            ) from error
        if files := _recorded_files(name, record):
            say(f"warning: {name} is read from an earlier download: {reason}")
            return files
        status = getattr(getattr(error, "response", None), "status_code", 0)
        passes = isinstance(error, ConnectionError | TimeoutError) or is_transient(status)
        kind = TextUnreachable if passes else DataError
        raise kind(
            f"data.source={name} is neither a file here nor a data set whose split 'train' could "
            f"be loaded from the Hub: {reason.rstrip('.')}. For a private one log in with `hf auth "
            "login`, or set HF_TOKEN."
        ) from error
    found = column.find(name, rows.column_names or list(next(iter(rows), {})))
    restores = _restores(rows, found)
    rows = rows.select_columns(found)
    return partial(_row_pieces, name, rows, restores, column), str(builder.cache_dir)


def _restores(rows: IterableDataset, columns: list[str]) -> dict[str, Restore]:
    """By column, what restores its nested values. `datasets` has already decoded their JSON."""
    schema = rows.features.arrow_schema
    found = {name: restorer(schema.field(name).type, lambda value: value) for name in columns}
    return {name: restore for name, restore in found.items() if restore is not None}


def _row_pieces(
    name: str, rows: IterableDataset, restores: dict[str, Restore], column: TextColumn
) -> Iterator[Piece]:
    """The documents of rows that `datasets` has read. Raises DataError for a broken row."""

    def documents() -> Iterator[str]:
        for number, row in enumerate(rows, start=1):
            try:
                restored = {key: restore(row[key]) for key, restore in restores.items()}
                if document := column.document({**row, **restored}):
                    yield document
            except BadRow as error:
                raise DataError(
                    f"data.source={name}: row {number:,} cannot be read: {error}. {error.remedy}."
                ) from error

    return pieces_of(documents())


def _builder(name: str, column: TextColumn) -> DatasetBuilder:
    """The builder of a data set, or of its cached rows if the Hub cannot be reached."""
    # By default pandas drops texts such as "NA" and turns "007" into 7.
    options = {"keep_default_na": False, "converters": dict.fromkeys(column.texts, str)}
    try:
        builder = datasets.load_dataset_builder(name)
    except Exception:
        with suppress(Exception):  # the builder above does not find what was read with options
            return _cached(name, options)
        raise
    if isinstance(builder, Csv) and not _tables_are_plain(builder):
        return datasets.load_dataset_builder(name, **options)
    if isinstance(builder, Cache) and builder.info.builder_name in ("json", "csv", "text"):
        raise ConnectionError("the cached rows of datasets are not the texts of its files")
    return builder


def _cached(name: str, options: dict[str, Any]) -> DatasetBuilder:
    dataset_name = name.rpartition("/")[2]
    return Cache(repo_id=name, dataset_name=dataset_name, version="auto", hash="auto", **options)


def _record_files(record: Path, files: list[DataFile]) -> list[DataFile]:
    with suppress(OSError):  # the record is optional: the text itself is cached
        record.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(record)
        temporary.write_text(json.dumps([[file.name, file.url] for file in files]) + "\n")
        temporary.rename(record)
    return files


def _recorded_files(name: str, record: Path) -> list[DataFile]:
    try:
        found = [(str(file), Path(path)) for file, path in json.loads(record.read_text())]
        return [local_file(name, path, file) for file, path in found]
    except (OSError, ValueError, TypeError):  # a DataError is a ValueError
        return []


def _texts_of(builder: Text, name: str, column: TextColumn) -> list[DataFile]:
    """The files of the `train` split, downloaded and unpacked."""
    config = builder.config
    column.find(name, list(config.features or ("text",)))
    if codecs.lookup(config.encoding).name != "utf-8":
        raise DataError(
            f"data.source={name} has text in {config.encoding}; only UTF-8 is read. "
            "Download it, convert it and give its path."
        )
    if "train" not in config.data_files:
        raise ValueError(f"it has the splits {', '.join(map(str, config.data_files))}")
    downloads = _downloads(builder)
    extracted = downloads.download_and_extract(config.data_files["train"])
    paths = [str(file) for file in downloads.iter_files(extracted)]
    return [local_file(name, Path(path), path) for path in paths]


def _tables_of(builder: DatasetBuilder, name: str) -> list[DataFile]:
    """The tables of the `train` split, downloaded; empty if only the builder can read them."""
    if not _tables_are_plain(builder):
        return []
    urls = [str(url) for url in builder.config.data_files["train"]]
    paths = _downloads(builder).download(urls)
    named = zip(paths, names_in_folder(urls), strict=True)
    return [local_file(name, Path(str(path)), file) for path, file in named]


def _tables_are_plain(builder: DatasetBuilder) -> bool:
    """Whether the `train` split has tables of one format that need no options."""
    config = builder.config
    files = (config.data_files or {}).get("train", ())
    kinds = {format_of(str(url)) for url in files}
    if not isinstance(builder, (Csv, Json, Parquet)) or len(kinds) != 1 or None in kinds:
        return False
    usual = type(config)()
    may_differ = {field.name for field in fields(BuilderConfig)} | {"features"}
    if all(suffixes(str(url))[0] == ".tsv" for url in files):
        may_differ |= {"sep"}
    return all(
        getattr(config, field.name) == getattr(usual, field.name)
        for field in fields(config)
        if field.name not in may_differ
    )


def _downloads(builder: DatasetBuilder) -> DownloadManager:
    return DownloadManager(
        dataset_name=builder.dataset_name,
        download_config=DownloadConfig(
            cache_dir=builder._cache_downloaded_dir,
            token=builder.token,
            storage_options=builder.storage_options,
            use_etag=False,  # the URL contains the commit
        ),
    )
