"""Data sets of the Hub: the files of a commit, of which a stream reads ranges.

The files of a prepared text are copied to `data.cache_dir`. `datasets` says which files belong to a
split; it is imported only for that.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
from fsspec.utils import glob_translate
from huggingface_hub import constants

from data.errors import DataError
from data.progress import Progress
from data.reading.access import OID, Access
from data.reading.content import suffixes
from data.reading.fetch import copy_files
from data.reading.groups import TRAIN, DataFile
from data.reading.table import reason_of
from data.reading.waiting import LOG_IN, Unanswered, failure_of
from data.shared_files import digest_of, keep, kept

NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+(/[\w.-]+)*))?")
"""A data set; one split of its default configuration is read."""
HF = re.compile(
    r"hf://datasets/(?P<name>[\w.-]+/[\w.-]+)"
    r"(@(?P<revision>refs/(pr|convert)/[\w.-]+|[\w.-]+))?(/(?P<path>.*))?"
)
"""Some files of a data set, by path or pattern, in the notation of `huggingface_hub`."""


def hub_files(
    access: Access,
    source: str,
    revision: str | None,
    split: str,
    is_data: Callable[[Path], bool],
) -> tuple[str, list[DataFile]]:
    """The commit, and the files that a source names, sorted by their paths in the repo.

    Of a whole data set they are those of a `split`, of a folder those that `is_data`. Raises
    DataError if they cannot be listed.
    """
    found = NAME.fullmatch(source) or HF.fullmatch(source)
    if found is None:
        raise DataError(
            f"data.source={source} is neither a file or folder here nor a name of the Hub: "
            "owner/name, owner/name@revision or "
            "hf://datasets/owner/name@revision/folder/*.parquet."
        )
    name = found["name"]
    commit = revision or _commit_of(access, source, name, found["revision"] or "main")
    if NAME.fullmatch(source):
        choose = partial(_paths_of_split, access, source, name, commit, split)
    else:
        choose = partial(_matching, found["path"] or "", is_data)
    return commit, _listed(access, source, name, commit, split, choose)


def copied_files(access: Access, name: str, progress: Progress) -> list[DataFile]:
    """Copies of the files of the split `train` of a data set.

    If the Hub cannot be reached, those of an earlier start, whose commit `data.cache_dir` keeps.
    Raises DataError if they cannot be listed or read.
    """
    record = access.cache_dir / "hub" / digest_of(_api(name))
    try:
        commit = _commit_of(access, name, name, "main")
    except DataError as error:
        if (earlier := kept(record)) is None:
            raise
        commit = earlier.decode()
        progress.say(f"warning: {name} is read from an earlier download: {error}")
    choose = partial(_paths_of_split, access, name, name, commit, TRAIN)
    files = _listed(access, name, name, commit, TRAIN, choose)
    copies = copy_files(access, name, files, progress)
    keep(record, commit.encode())
    return copies


def _api(name: str) -> str:
    return f"{constants.ENDPOINT}/api/datasets/{name}"


def _ask(access: Access, source: str, url: str, subject: str) -> tuple[Any, str | None]:
    """An answer of the Hub in JSON, and the URL of its next page, if any."""

    def ask() -> tuple[Any, str | None]:
        with access.get(url, of_hub=True) as response:
            response.read()
            try:
                return response.json(), response.links.get("next", {}).get("url")
            except ValueError as error:  # a proxy's page
                raise Unanswered("the answer is not JSON") from error

    return access.waiting.until_answered(source, ask, subject)


def _commit_of(access: Access, source: str, name: str, revision: str) -> str:
    url = f"{_api(name)}/revision/{quote(revision, safe='')}"
    is_none = " is neither a file here nor a data set that can be read: on the Hub it"
    return str(_ask(access, source, url, is_none)[0]["sha"])


def _tree(
    access: Access, source: str, name: str, commit: str
) -> Iterator[tuple[str, tuple[int, str]]]:
    """Path, size and id of every file of a commit."""
    url: str | None = f"{_api(name)}/tree/{commit}?recursive=true&expand=false"
    while url:
        lines, url = _ask(access, source, url, f": the list of the files of {commit}")
        for line in lines:
            if line["type"] == "file":
                large: dict[str, Any] = line.get("lfs") or {}
                yield line["path"], (int(line["size"]), str(large.get("oid") or line["oid"]))


def _listed(
    access: Access,
    source: str,
    name: str,
    commit: str,
    split: str,
    choose: Callable[[dict[str, Any]], list[str]],
) -> list[DataFile]:
    """The files of a commit that `choose` returns of all its paths.

    They are kept on the disk, so that a later start with this commit requests nothing.
    """
    key = digest_of(constants.ENDPOINT, source, commit, split)
    record = access.cache_dir / "streams" / f"{key}.files"
    content = kept(record)
    if content is None:
        tree = dict(_tree(access, source, name, commit))
        chosen = [[path, *tree[path]] for path in sorted(choose(tree)) if path in tree]
        content = json.dumps(chosen).encode()
        keep(record, content)
    base = f"{constants.ENDPOINT}/datasets/{name}/resolve/{quote(commit, safe='')}/"
    return [
        DataFile(base + quote(path), path, size, OID + oid)
        for path, size, oid in json.loads(content)
    ]


def _matching(path: str, is_data: Callable[[Path], bool], tree: dict[str, Any]) -> list[str]:
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


def _paths_of_split(
    access: Access, source: str, name: str, commit: str, split: str, tree: dict[str, Any]
) -> list[str]:
    """The files of a split of the default configuration, as `datasets` selects them."""
    builder = access.waiting.until_answered(source, partial(_builder_of, source, name, commit))
    files = builder.config.data_files or {}
    if split not in files:
        remedy = (
            "Name its files instead, for example data.streaming=true "
            f"data.source=hf://datasets/{name}/test*.parquet."
        )
        raise DataError(
            f"data.source={source} has no split {split!r}. Its splits: "
            f"{', '.join(map(str, files))}. "
            + (remedy if split == TRAIN else "Set data.held_out_split to one of them, or to null.")
        )
    if reason := _needs_a_copy(builder):
        raise DataError(
            f"data.source={source} is not read: {reason}. Stream the copy that the Hub converts to "
            f"Parquet: data.streaming=true data.source=hf://datasets/{name}@refs/convert/parquet/"
            "default/train/*.parquet"
        )
    prefix = f"hf://datasets/{name}@{commit}/"
    return [str(url).removeprefix(prefix) for url in files[split]]


def _builder_of(source: str, name: str, commit: str) -> Any:
    """What `datasets` knows about the default configuration. Its client repeats few failures."""
    import datasets
    from datasets.packaged_modules.cache.cache import Cache

    try:
        builder = datasets.load_dataset_builder(name, revision=commit)
    except Exception as error:  # many unrelated types: of the Hub, the network, the builder
        of_network = isinstance(error, (ConnectionError, TimeoutError, httpx2.TransportError))
        of_server = getattr(error, "response", None) is not None
        if of_network or (of_server and isinstance(failure_of(error), Unanswered)):
            raise
        remedy = f"{LOG_IN} Or name its files: data.source=hf://datasets/{name}/folder/*.parquet"
        if isinstance(error, OSError) and error.errno:  # of the disk
            remedy = "Name a folder on another disk in HF_HOME"
        raise DataError(
            f"data.source={source} has no default configuration that could be read from the Hub: "
            f"{reason_of(error)}. {remedy}."
        ) from error
    if isinstance(builder, Cache):  # rows that `datasets` has cached, not the files
        raise Unanswered("the Hub cannot be reached")
    return builder


def _needs_a_copy(builder: Any) -> str:
    """Why the files of a data set are not read as they are; empty if they are."""
    from datasets import BuilderConfig
    from datasets.packaged_modules.csv.csv import Csv
    from datasets.packaged_modules.json.json import Json
    from datasets.packaged_modules.parquet.parquet import Parquet
    from datasets.packaged_modules.text.text import Text

    if not isinstance(builder, (Csv, Json, Parquet, Text)):
        return "it has no texts and no tables of one format"
    config, usual = builder.config, type(builder.config)()
    urls = (url for files in (config.data_files or {}).values() for url in files)
    is_tsv = all(suffixes(str(url))[0] == ".tsv" for url in urls)
    # Whole texts are read, and their lines are not split.
    general = {field.name for field in fields(BuilderConfig)} | {"features"}
    general |= {"keep_linebreaks", "sample_by"}
    options = [
        f"{field.name}={value!r}"
        for field in fields(config)
        if (value := getattr(config, field.name)) != getattr(usual, field.name)
        and field.name not in general
        and not (is_tsv and field.name in ("sep", "delimiter") and value == "\t")
        and not (field.name == "encoding" and codecs.lookup(value).name == "utf-8")
    ]
    return f"its card reads the files with {', '.join(options)}" if options else ""
