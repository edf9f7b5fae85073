"""Data sets of the Hub: the files of a commit, and what `datasets` downloads and reads.

A stream reads the files of one commit in ranges. They are listed with the connections, timeouts and
retries of all other reads; requests of the Hub's client have no timeout.

The files of a prepared text are downloaded and cached by `datasets`, whose builders also read the
data sets that have no plain files.
"""

from __future__ import annotations

import codecs
import errno
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Collection, Iterator
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
    IterableDataset,
)
from datasets.exceptions import DatasetGenerationError
from datasets.packaged_modules.cache.cache import Cache
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.json.json import Json
from datasets.packaged_modules.parquet.parquet import Parquet
from datasets.packaged_modules.text.text import Text
from fsspec.utils import glob_translate

from data.columns import TextColumn
from data.errors import BadRow, DataError, TextUnreachable
from data.pieces import Piece, pieces_of
from data.reading.access import Access, local_file
from data.reading.content import suffixes
from data.reading.csv import DELIMITERS
from data.reading.formats import format_of, is_table
from data.reading.groups import TRAIN, DataFile, names_in_folder
from data.reading.http import LOG_IN, OID, check_transient
from data.reading.parquet import Restore, restorer
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
    # The key differs from that of older records, which list other files for a folder.
    of_split = (split,) if split != TRAIN else () if is_whole else ("data",)
    key = digest_of(_endpoint(), source, commit, *of_split)
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
    if options := _options_of(builder, DELIMITERS[".csv"]):
        raise DataError(
            f"data.source={source} cannot be streamed: its card reads the files with "
            f"{', '.join(options)}, which a stream does not. Set data.streaming=false, or stream "
            "a copy that needs no options."
        )
    prefix = f"hf://datasets/{name}@{commit}/"
    return [str(url).removeprefix(prefix) for url in files[split]]


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
        with warnings.catch_warnings():
            # With `index_col` pandas drops a field too many, with a ParserWarning.
            warnings.filterwarnings("error", "Length of header or names does not match")
            builder.download_and_prepare()
        rows = builder.as_dataset(split="train").to_iterable_dataset()
    except DataError:
        raise
    except Exception as error:  # many unrelated types: of the Hub, the network, the builder
        reason = reason_of(error)
        if isinstance(error, DatasetGenerationError) and isinstance(error.__cause__, Exception):
            raise _kind_of(error.__cause__)(
                f"data.source={name} is not read by `datasets`: {reason_of(error.__cause__)}. "
                "Correct its files, or convert them to JSON lines, and give their path."
            ) from error
        if isinstance(error, OSError) and error.errno in CACHE_ERRORS:
            raise DataError(
                f"data.source={name} cannot be cached in {datasets.config.HF_DATASETS_CACHE}: "
                f"{reason}. Name a folder on another disk in HF_DATASETS_CACHE."
            ) from error
        if files := _recorded_files(name, record):
            say(f"warning: {name} is read from an earlier download: {reason}")
            return files
        raise _kind_of(error)(
            f"data.source={name} is neither a file here nor a data set whose split 'train' could "
            f"be loaded from the Hub: {reason}. For a private one log in with `hf auth "
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
    # In rows with a field too many, it makes the first one an index, and shifts the others.
    options["index_col"] = False
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
    files = (builder.config.data_files or {}).get("train", ())
    has_tables = all(is_table(str(url)) for url in files)
    if not isinstance(builder, (Csv, Json, Parquet)) or not has_tables:
        return False
    return len({format_of(str(url)) for url in files}) == 1 and not _options_of(builder)


def _options_of(builder: DatasetBuilder, of_csv: Collection[str] = ()) -> list[str]:
    """What a card says of how to read its tables: `comment='#'`.

    A usual separator is left out: of CSV those in `of_csv`, of TSV the tab.
    """
    if not isinstance(builder, (Csv, Json, Parquet)):
        return []
    config, usual = builder.config, type(builder.config)()
    files = (config.data_files or {}).get("train", ())
    if all(suffixes(str(url))[0] == ".tsv" for url in files):
        of_csv = DELIMITERS[".tsv"]
    general = {field.name for field in fields(BuilderConfig)} | {"features"}
    return [
        f"{field.name}={value!r}"
        for field in fields(config)
        if (value := getattr(config, field.name)) != getattr(usual, field.name)
        and field.name not in general
        and not (field.name in ("sep", "delimiter") and value in of_csv)
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
