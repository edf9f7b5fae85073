"""Data sets of the Hub: the files of a commit, and what `datasets` downloads and reads.

A stream reads the files of one commit in ranges. They are listed with the connections, timeouts and
retries of all other reads; requests of the Hub's client have no timeout.

The files of a prepared text are downloaded and cached by `datasets`.
"""

from __future__ import annotations

import codecs
import errno
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import datasets
from datasets import (
    BuilderConfig,
    DatasetBuilder,
    DownloadConfig,
    DownloadManager,
)
from datasets.packaged_modules.cache.cache import Cache
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.json.json import Json
from datasets.packaged_modules.parquet.parquet import Parquet
from datasets.packaged_modules.text.text import Text
from fsspec.utils import glob_translate

from data.columns import TextColumn
from data.errors import DataError, TextUnreachable
from data.reading.access import Access, local_file
from data.reading.content import suffixes
from data.reading.formats import format_of, is_table
from data.reading.groups import TRAIN, DataFile, names_in_folder
from data.reading.http import LOG_IN, OID, check_transient
from data.reading.table import reason_of
from data.reading.waiting import is_transient
from data.shared_files import NO_LOCKS, digest_of, keep, kept, temporary_name

NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+(/[\w.-]+)*))?")
"""A data set; one split of its default configuration is read."""
HF = re.compile(
    r"hf://datasets/(?P<name>[\w.-]+/[\w.-]+)"
    r"(@(?P<revision>refs/(pr|convert)/[\w.-]+|[\w.-]+))?(/(?P<path>.*))?"
)
"""Some files of a data set, by path or pattern, in the notation of `huggingface_hub`."""
CACHE_ERRORS = (*NO_LOCKS, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
"""Disk errors that keep `datasets` from caching its downloads."""


def hub_files(
    access: Access,
    source: str,
    revision: str | None,
    split: str,
    is_data: Callable[[Path], bool],
) -> tuple[str, list[DataFile]]:
    """The commit, and the files that a source names, sorted by their paths in the repo.

    Of a whole data set they are those of a `split`, of a folder those that `is_data`. A commit's
    files are kept on the disk, so that a start with its `revision` requests nothing.
    Raises DataError if they cannot be listed.
    """
    found = NAME.fullmatch(source) or HF.fullmatch(source)
    if found is None:
        raise DataError(
            f"data.source={source} is neither a file or folder here nor a name of the Hub: "
            "owner/name, owner/name@revision or "
            "hf://datasets/owner/name@revision/folder/*.parquet."
        )
    name, path = found["name"], found.groupdict().get("path")
    is_whole = NAME.fullmatch(source) is not None
    commit = revision or _commit_of(access, source, name, found["revision"] or "main")
    key = digest_of(_endpoint(), source, commit, split)
    record = access.cache_dir / "streams" / f"{key}.files"
    content = kept(record)
    if content is None:
        tree = dict(_tree(access, source, name, commit))
        if is_whole:
            paths = _paths_of_split(access, source, name, commit, split)
        else:
            paths = _matching(path or "", tree, is_data)
        chosen = [[path, *tree[path]] for path in sorted(paths) if path in tree]
        content = json.dumps(chosen).encode()
        keep(record, content)
    base = f"{_endpoint()}/datasets/{name}/resolve/{quote(commit, safe='')}/"
    return commit, [
        DataFile(base + quote(path), path, size, OID + oid)
        for path, size, oid in json.loads(content)
    ]


def _endpoint() -> str:
    return str(datasets.config.HF_ENDPOINT)


def _api(name: str) -> str:
    return f"{_endpoint()}/api/datasets/{name}"


def _commit_of(access: Access, source: str, name: str, revision: str) -> str:
    url = f"{_api(name)}/revision/{quote(revision, safe='')}"
    found, _ = access.ask(source, url, lambda: access.http.get_from_hub(url))
    return str(found["sha"])


def _tree(
    access: Access, source: str, name: str, commit: str
) -> Iterator[tuple[str, tuple[int, str]]]:
    """Path, size and id of every file of a commit."""
    url: str | None = f"{_api(name)}/tree/{commit}?recursive=true&expand=false"
    while url:
        lines, url = access.ask(source, url, partial(access.http.get_from_hub, url))
        for line in lines:
            if line["type"] == "file":
                large: dict[str, Any] = line.get("lfs") or {}
                yield line["path"], (int(line["size"]), str(large.get("oid") or line["oid"]))


def _matching(path: str, tree: dict[str, Any], is_data: Callable[[Path], bool]) -> list[str]:
    """The file at a path, the files that match a pattern, or the data files in a folder."""
    if any(mark in path for mark in "*?["):
        pattern = re.compile(glob_translate(path))
        return [file for file in tree if pattern.match(file)]
    if path in tree:
        return [path]
    folder = f"{path.rstrip('/')}/".lstrip("/")
    return [
        file
        for file in tree
        if file.startswith(folder) and is_data(Path(file.removeprefix(folder)))
    ]


def _paths_of_split(access: Access, source: str, name: str, commit: str, split: str) -> list[str]:
    """The files of a split of the default configuration, as `datasets` selects them."""

    def load() -> Any:
        try:
            return datasets.load_dataset_builder(name, revision=commit)
        except Exception as error:
            if (response := getattr(error, "response", None)) is not None:
                check_transient(response.status_code, response.headers)
            raise

    try:
        builder = access.ask(source, _api(name), load)
    except TextUnreachable:
        raise
    except Exception as error:  # many unrelated types: of the Hub, the network, the builder
        raise _kind_of(error)(
            f"data.source={source} has no default configuration that could be read from the Hub: "
            f"{reason_of(error)}. Name its files instead, for example "
            f"data.source=hf://datasets/{name}/folder/*.parquet. {LOG_IN}"
        ) from error
    files = builder.config.data_files or {}
    if split not in files:
        remedy = (
            f"Name its files instead, for example data.source=hf://datasets/{name}/test*.parquet."
        )
        raise DataError(
            f"data.source={source} has no split {split!r}. Its splits: "
            f"{', '.join(map(str, files))}. "
            + (remedy if split == TRAIN else "Set data.held_out_split to one of them, or to null.")
        )
    if options := _options_of(builder):
        raise _needs_a_copy(name, f"its card reads the files with {', '.join(options)}")
    prefix = f"hf://datasets/{name}@{commit}/"
    return [str(url).removeprefix(prefix) for url in files[split]]


def downloaded_files(
    name: str, column: TextColumn, cache_dir: Path, say: Callable[[str], None]
) -> list[DataFile]:
    """The texts or tables of the split `train` of a data set, in the cache of `datasets`.

    If the Hub cannot be reached, those of an earlier download, which `cache_dir` records. Raises
    DataError if the data set cannot be loaded, or has no such files.
    """
    digest = hashlib.sha256(f"{name}\0{column.key}".encode()).hexdigest()[:16]
    record = cache_dir / "hub" / f"{digest}.json"
    try:
        builder = datasets.load_dataset_builder(name)
        if isinstance(builder, Cache):  # rows that `datasets` has cached, not the texts of files
            raise ConnectionError("the Hub cannot be reached")
        splits = builder.config.data_files or {}
        if splits and "train" not in splits:
            raise ValueError(f"it has the splits {', '.join(map(str, splits))}")
        is_text = isinstance(builder, Text)
        files = _texts_of(builder, name, column) if is_text else _tables_of(builder, name)
        return _record_files(record, files)
    except DataError:
        raise
    except Exception as error:  # many unrelated types: of the Hub, the network, the builder
        reason = reason_of(error)
        if isinstance(error, OSError) and error.errno in CACHE_ERRORS:
            raise DataError(
                f"data.source={name} cannot be cached in {datasets.config.HF_DATASETS_CACHE}: "
                f"{reason}. Name a folder on another disk in HF_DATASETS_CACHE."
            ) from error
        if found := _recorded_files(name, record):
            say(f"warning: {name} is read from an earlier download: {reason}")
            return found
        raise _kind_of(error)(
            f"data.source={name} is neither a file here nor a data set whose split 'train' could "
            f"be loaded from the Hub: {reason}. For a private one log in with `hf auth "
            "login`, or set HF_TOKEN."
        ) from error


def _needs_a_copy(name: str, reason: str) -> DataError:
    """The error for a data set whose files are not read as they are."""
    return DataError(
        f"data.source={name} is not read: {reason}. Stream the copy that the Hub converts to "
        f"Parquet: data.streaming=true data.source=hf://datasets/{name}@refs/convert/parquet/"
        "default/train/*.parquet"
    )


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
    downloads = _downloads(builder)
    extracted = downloads.download_and_extract(config.data_files["train"])
    paths = [str(file) for file in downloads.iter_files(extracted)]
    return [local_file(name, Path(path), path) for path in paths]


def _tables_of(builder: DatasetBuilder, name: str) -> list[DataFile]:
    """The tables of the `train` split, downloaded. Raises DataError if it has no plain ones."""
    if options := _options_of(builder):
        raise _needs_a_copy(name, f"its card reads the files with {', '.join(options)}")
    urls = [str(url) for url in (builder.config.data_files or {}).get("train", ())]
    kinds = {format_of(url) if is_table(url) else None for url in urls}
    if not isinstance(builder, (Csv, Json, Parquet)) or None in kinds or len(kinds) != 1:
        raise _needs_a_copy(name, "its split 'train' has no texts and no tables of one format")
    paths = _downloads(builder).download(urls)
    named = zip(paths, names_in_folder(urls), strict=True)
    return [local_file(name, Path(str(path)), file) for path, file in named]


def _options_of(builder: DatasetBuilder) -> list[str]:
    """What a card says of how to read its tables: `comment='#'`. A tab separates TSV anyway."""
    if not isinstance(builder, (Csv, Json, Parquet)):
        return []
    config, usual = builder.config, type(builder.config)()
    files = (config.data_files or {}).get("train", ())
    is_tsv = all(suffixes(str(url))[0] == ".tsv" for url in files)
    general = {field.name for field in fields(BuilderConfig)} | {"features"}
    return [
        f"{field.name}={value!r}"
        for field in fields(config)
        if (value := getattr(config, field.name)) != getattr(usual, field.name)
        and field.name not in general
        and not (is_tsv and field.name in ("sep", "delimiter") and value == "\t")
    ]


def _kind_of(error: Exception) -> type[DataError]:
    """TextUnreachable if a later start may succeed, by what `datasets` and the Hub raise."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    passes = isinstance(error, (ConnectionError, TimeoutError)) or is_transient(status)
    return TextUnreachable if passes else DataError


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
