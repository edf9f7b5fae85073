"""Data sets of the Hub: the files of a commit, of which a stream reads ranges.

`datasets` says which files belong to a split; it is imported only for that.
"""

from __future__ import annotations

import codecs
import glob
import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import quote

import httpx2
from fsspec.utils import glob_translate
from huggingface_hub import constants

from common.failures import Unanswered, failure_of
from common.printable import reason_of
from common.shared_files import digest_of, keep, kept
from data.errors import DataError
from data.reading.access import LOG_IN, OID, Access
from data.reading.formats import format_of, is_data, suffixes
from data.reading.groups import TRAIN, DataFile

NAME = re.compile(r"(?P<name>\w[\w.-]*(/[\w.-]+)?)(@(?P<revision>[\w.-]+(/[\w.-]+)*))?")
"""A data set; one split of its default configuration is read."""
HF = re.compile(
    r"hf://datasets/(?P<name>[\w.-]+/[\w.-]+)"
    r"(@(?P<revision>refs/(pr|convert)/[\w.-]+|[\w.-]+))?(/(?P<path>.*))?"
)
"""Some files of a data set, by path or pattern, in the notation of `huggingface_hub`."""
COPY = "hf://datasets/{}@refs/convert/parquet/default/train/*.parquet"
"""The copy in Parquet that the Hub makes of a data set."""


def hub_files(
    access: Access, source: str, revision: str | None, split: str
) -> tuple[str, list[DataFile]]:
    """The commit, and the files that a source names, sorted by their paths in the repo.

    Of a whole data set they are those of a `split`. The list of a commit is kept on the disk, so
    that a later start with this commit requests nothing. Raises DataError if there is none.
    """
    named = NAME.fullmatch(source) or HF.fullmatch(source)
    if named is None:
        raise DataError(
            f"data.source={source} is not a name of the Hub: owner/name, owner/name@revision or "
            "hf://datasets/owner/name@revision/folder/*.parquet."
        )
    name, api = named["name"], f"{constants.ENDPOINT}/api/datasets/{named['name']}"
    commit = revision
    if commit is None:
        url = f"{api}/revision/{quote(named['revision'] or 'main', safe='')}"
        is_none = " is neither a file here nor a data set that can be read: on the Hub it"
        commit = str(_ask(access, source, url, is_none)[0]["sha"])
    record = access.cache_dir / "streams" / digest_of(constants.ENDPOINT, source, commit, split)
    content = kept(record)
    if content is None:
        tree = dict(_tree(access, source, f"{api}/tree/{commit}?recursive=true&expand=false"))
        if "path" in named.re.groupindex:
            paths = _matching(named["path"] or "", [*tree])
        else:
            paths = _paths_of_split(access, source, name, commit, split)
        content = json.dumps(
            [[path, *tree[path]] for path in sorted(paths) if path in tree]
        ).encode()
        keep(record, content)
    base = f"{constants.ENDPOINT}/datasets/{name}/resolve/{quote(commit, safe='')}/"
    return commit, [
        DataFile(base + quote(path), path, size, OID + oid)
        for path, size, oid in json.loads(content)
    ]


def _tree(access: Access, source: str, url: str | None) -> Iterator[tuple[str, tuple[int, str]]]:
    """Path, size and id of every file of a commit."""
    while url:
        lines, url = _ask(access, source, url, ": the list of its files")
        for line in lines:
            if line["type"] == "file":
                large: dict[str, Any] = line.get("lfs") or {}
                yield line["path"], (int(line["size"]), str(large.get("oid") or line["oid"]))


def _ask(access: Access, source: str, url: str, subject: str) -> tuple[Any, str | None]:
    """An answer of the Hub in JSON, and the URL of its next page, if any."""

    def ask() -> tuple[Any, str | None]:
        with access.get(url, of_hub=True) as response:
            response.read()
            return response.json(), response.links.get("next", {}).get("url")

    return access.until_answered(source, ask, subject)


def _matching(path: str, tree: list[str]) -> list[str]:
    """The file at a path, the files that match a pattern, or the data files in a folder."""
    if glob.has_magic(path):
        pattern = re.compile(glob_translate(path))
        return [file for file in tree if pattern.match(file)]
    if path in tree:
        return [path]
    folder = f"{path.rstrip('/')}/".lstrip("/")
    inside = (file for file in tree if file.startswith(folder))
    return [file for file in inside if is_data(file.removeprefix(folder))]


def _paths_of_split(access: Access, source: str, name: str, commit: str, split: str) -> list[str]:
    """The files of a split of the default configuration, as `datasets` selects them."""
    builder = access.until_answered(source, partial(_builder, source, name, commit))
    files, of_hub = builder.config.data_files or {}, f"hf://datasets/{name}"
    if split not in files:
        remedy = "Set data.held_out_split to one of them, or to null."
        if split == TRAIN:
            remedy = f"Name its files: data.source={of_hub}/test*.parquet"
        raise DataError(
            f"data.source={source} has no split {split!r}. Its splits: "
            f"{', '.join(map(str, files))}. {remedy}"
        )
    if reason := _needs_a_copy(builder):
        raise DataError(
            f"data.source={source} is not read: {reason}. Name the copy that the Hub converts to "
            f"Parquet: data.source={COPY.format(name)}"
        )
    return [str(url).removeprefix(f"{of_hub}@{commit}/") for url in files[split]]


def _builder(source: str, name: str, commit: str) -> Any:
    """What `datasets` knows of the default configuration."""
    import datasets
    from datasets.packaged_modules.cache.cache import Cache

    try:
        builder = datasets.load_dataset_builder(name, revision=commit)
    except Exception as error:  # many unrelated types: of the Hub, the network, the builder
        failure = failure_of(error)
        of_network = isinstance(failure.cause, ConnectionError | httpx2.TransportError)
        if failure.may_pass and (failure.status or failure.timed_out or of_network):
            raise
        remedy = f"{LOG_IN} Or name its files: data.source=hf://datasets/{name}/folder/*.parquet"
        if isinstance(error, OSError) and error.errno:  # of the disk
            remedy = "Name a folder on another disk in HF_HOME."
        raise DataError(
            f"data.source={source} has no default configuration that could be read from the Hub: "
            f"{reason_of(error)}. {remedy}"
        ) from error
    if isinstance(builder, Cache):  # rows that `datasets` has cached, not the files
        raise Unanswered("the Hub cannot be reached")
    return builder


def _needs_a_copy(builder: Any) -> str:
    """Why the files of a data set are not read as they are; empty if they are."""
    from datasets import BuilderConfig

    urls = [str(url) for files in builder.config.data_files.values() for url in files]
    if None in map(format_of, urls):
        return "it has no texts and no tables of one format"
    config, usual = vars(builder.config), vars(type(builder.config)())
    # Texts are read whole, and the files of a split are known.
    ignored = {"features", "keep_linebreaks", "sample_by", *vars(BuilderConfig())}
    if all(suffixes(url)[0] == ".tsv" for url in urls):
        ignored |= {"sep", "delimiter"}
    if codecs.lookup(config.get("encoding") or "utf-8").name == "utf-8":
        ignored |= {"encoding"}
    given = {key: config[key] for key in config if config[key] != usual.get(key)}
    options = [f"{key}={given[key]!r}" for key in given if key not in ignored]
    return f"its card reads the files with {', '.join(options)}" if options else ""
