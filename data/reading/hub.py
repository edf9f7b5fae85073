"""Lists the files of a Hub data set at one commit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import datasets
from fsspec.utils import glob_translate

from data.errors import DataError, TextUnreachable
from data.reading.access import Access
from data.reading.groups import TRAIN, DataFile
from data.reading.http import LOG_IN, OID, check_transient
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
            return datasets.load_dataset_builder(name, revision=commit).config.data_files
        except Exception as error:
            if (response := getattr(error, "response", None)) is not None:
                check_transient(response.status_code, response.headers)
            raise

    try:
        files = access.ask(source, _api(name), load)
    except TextUnreachable:
        raise
    except Exception as error:  # many unrelated types: of the Hub, the network, the builder
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        kind = TextUnreachable if isinstance(error, (ConnectionError, TimeoutError)) else DataError
        raise kind(
            f"data.source={source} has no default configuration that could be read from the Hub: "
            f"{reason.rstrip('.')}. Name its files instead, for example "
            f"data.source=hf://datasets/{name}/folder/*.parquet. {LOG_IN}"
        ) from error
    if split not in (files or {}):
        remedy = (
            f"Name its files instead, for example data.source=hf://datasets/{name}/test*.parquet."
        )
        raise DataError(
            f"data.source={source} has no split {split!r}. Its splits: "
            f"{', '.join(map(str, files or {}))}. "
            + (remedy if split == TRAIN else "Set data.held_out_split to one of them, or to null.")
        )
    prefix = f"hf://datasets/{name}@{commit}/"
    return [str(url).removeprefix(prefix) for url in files[split]]
