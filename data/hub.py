"""Data sets on the Hub, which `datasets` downloads and caches."""

from __future__ import annotations

import codecs
import errno
import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
from datasets import DatasetBuilder, DownloadConfig, DownloadManager, IterableDataset
from datasets.packaged_modules.cache.cache import Cache
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.text.text import Text

from data.columns import Column
from data.errors import DataError, TextUnreachable
from data.locks import NO_LOCKS
from data.once import temporary_name
from data.tables import row_pieces
from data.urls import is_transient

CACHE_ERRORS = (*NO_LOCKS, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk on which `datasets` cannot cache its downloads."""


def hub_pieces(
    name: str, column: Column, cache_dir: Path, say: Callable[[str], None]
) -> list[Path] | tuple[IterableDataset, str]:
    """The split `train` of a data set on the Hub, from the cache of `datasets`.

    For a data set of text files, the files themselves, because its rows, one per line, do not
    preserve the text exactly; for any other, its rows and the version that was downloaded. If the
    Hub cannot be reached, an earlier download is used; `cache_dir` records the text files of it.

    Raises DataError if the data set cannot be loaded.
    """
    digest = hashlib.sha256(f"{name}\0{column.key}".encode()).hexdigest()[:16]
    record = cache_dir / "hub" / f"{digest}.json"
    try:
        builder = _builder(name, column)
        if isinstance(builder, Text):
            return _record_files(record, _files_of(builder, name, column))
        builder.download_and_prepare()
        rows = builder.as_dataset(split="train")
    except DataError:
        raise
    except Exception as error:  # many unrelated types: of the Hub, the network, the builder
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, OSError) and error.errno in CACHE_ERRORS:
            raise DataError(
                f"data.source={name} cannot be cached in {datasets.config.HF_DATASETS_CACHE}: "
                f"{reason}. Name a folder on another disk in HF_DATASETS_CACHE."
            ) from error
        if files := _recorded_files(record):
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
    return row_pieces(name, rows.to_iterable_dataset(), column), str(builder.cache_dir)


def _builder(name: str, column: Column) -> DatasetBuilder:
    """The builder of a data set; of its cached rows if the Hub cannot be reached."""
    options = column.csv_options()
    try:
        builder = datasets.load_dataset_builder(name)
    except Exception:
        with suppress(
            Exception
        ):  # the builder above does not find rows that were read with options
            return _cached(name, options)
        raise
    if isinstance(builder, Csv):
        return datasets.load_dataset_builder(name, **options)
    if isinstance(builder, Cache) and builder.info.builder_name == "csv":
        return _cached(name, options)  # rows that were read without them lack texts such as "NA"
    if isinstance(builder, Cache) and builder.info.builder_name == "text":
        raise ConnectionError("the cached rows of datasets have lost their line ends")
    return builder


def _cached(name: str, options: dict[str, Any]) -> DatasetBuilder:
    dataset_name = name.rpartition("/")[2]
    return Cache(repo_id=name, dataset_name=dataset_name, version="auto", hash="auto", **options)


def _record_files(record: Path, files: list[Path]) -> list[Path]:
    with suppress(OSError):  # the record is optional: the text itself is cached
        record.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(record)
        temporary.write_text(json.dumps([str(file) for file in files]) + "\n")
        temporary.rename(record)
    return files


def _recorded_files(record: Path) -> list[Path]:
    try:
        files = [Path(name) for name in json.loads(record.read_text())]
    except (OSError, ValueError, TypeError):
        return []
    return files if all(file.is_file() for file in files) else []


def _files_of(builder: Text, name: str, column: Column) -> list[Path]:
    """The files of the split `train`, downloaded and unpacked."""
    config = builder.config
    column.find(name, list(config.features or ("text",)))
    if codecs.lookup(config.encoding).name != "utf-8":
        raise DataError(
            f"data.source={name} has text in {config.encoding}; only UTF-8 is read. "
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
            use_etag=False,  # the URL contains the commit
        ),
    )
    extracted = downloads.download_and_extract(config.data_files["train"])
    return [Path(str(file)) for file in downloads.iter_files(extracted)]
