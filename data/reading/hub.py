"""Data sets of the Hub: the files of a commit, of which a stream reads ranges.

`datasets` says which files belong to a split; it is imported only for that.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
from fsspec.utils import glob_translate
from huggingface_hub import constants

from common.failures import Unanswered, failure_of
from common.printable import reason_of
from common.shared_files import digest_of, keep, kept
from data.errors import DataError
from data.reading.access import OID, Access
from data.reading.content import suffixes
from data.reading.groups import TRAIN, DataFile
from data.reading.waiting import LOG_IN

NAME = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(@(?P<revision>[\w.-]+(/[\w.-]+)*))?")
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
    repo = _Repo(access, source, found["name"])
    commit = revision or repo.commit_of(found["revision"] or "main")
    if NAME.fullmatch(source):
        return commit, repo.files_of_split(commit, split)
    choose = partial(_matching, found["path"] or "", is_data)
    return commit, repo.files(commit, split, choose)


class _Repo:
    """A data set of the Hub, which `source` names."""

    def __init__(self, access: Access, source: str, name: str) -> None:
        self.access, self.source, self.name = access, source, name
        self.api = f"{constants.ENDPOINT}/api/datasets/{name}"

    def commit_of(self, revision: str) -> str:
        url = f"{self.api}/revision/{quote(revision, safe='')}"
        is_none = " is neither a file here nor a data set that can be read: on the Hub it"
        return str(self._ask(url, is_none)[0]["sha"])

    def files_of_split(self, commit: str, split: str) -> list[DataFile]:
        """The files of a split of the default configuration, as `datasets` selects them."""
        return self.files(commit, split, lambda _: self._paths_of_split(commit, split))

    def files(
        self, commit: str, split: str, choose: Callable[[dict[str, Any]], list[str]]
    ) -> list[DataFile]:
        """The files of a commit that `choose` returns of all its paths.

        They are kept on the disk, so that a later start with this commit requests nothing.
        """
        key = digest_of(constants.ENDPOINT, self.source, commit, split)
        record = self.access.cache_dir / "streams" / f"{key}.files"
        content = kept(record)
        if content is None:
            tree = dict(self._tree(commit))
            chosen = [[path, *tree[path]] for path in sorted(choose(tree)) if path in tree]
            content = json.dumps(chosen).encode()
            keep(record, content)
        base = f"{constants.ENDPOINT}/datasets/{self.name}/resolve/{quote(commit, safe='')}/"
        return [
            DataFile(base + quote(path), path, size, OID + oid)
            for path, size, oid in json.loads(content)
        ]

    def _tree(self, commit: str) -> Iterator[tuple[str, tuple[int, str]]]:
        """Path, size and id of every file of a commit."""
        url: str | None = f"{self.api}/tree/{commit}?recursive=true&expand=false"
        while url:
            lines, url = self._ask(url, f": the list of the files of {commit}")
            for line in lines:
                if line["type"] == "file":
                    large: dict[str, Any] = line.get("lfs") or {}
                    yield line["path"], (int(line["size"]), str(large.get("oid") or line["oid"]))

    def _ask(self, url: str, subject: str) -> tuple[Any, str | None]:
        """An answer of the Hub in JSON, and the URL of its next page, if any."""

        def ask() -> tuple[Any, str | None]:
            with self.access.get(url, of_hub=True) as response:
                response.read()
                return response.json(), response.links.get("next", {}).get("url")

        return self.access.waiting.until_answered(self.source, ask, subject)

    def _paths_of_split(self, commit: str, split: str) -> list[str]:
        builder = self.access.waiting.until_answered(self.source, partial(self._builder, commit))
        files, of_hub = builder.config.data_files or {}, f"hf://datasets/{self.name}"
        if split not in files:
            remedy = "Set data.held_out_split to one of them, or to null."
            if split == TRAIN:
                remedy = f"Name its files: data.source={of_hub}/test*.parquet"
            raise DataError(
                f"data.source={self.source} has no split {split!r}. Its splits: "
                f"{', '.join(map(str, files))}. {remedy}"
            )
        if reason := _needs_a_copy(builder):
            raise DataError(
                f"data.source={self.source} is not read: {reason}. Name the copy that the Hub "
                f"converts to Parquet: data.source={of_hub}@refs/convert/"
                "parquet/default/train/*.parquet"
            )
        return [str(url).removeprefix(f"{of_hub}@{commit}/") for url in files[split]]

    def _builder(self, commit: str) -> Any:
        """What `datasets` knows of the default configuration."""
        import datasets
        from datasets.packaged_modules.cache.cache import Cache

        try:
            builder = datasets.load_dataset_builder(self.name, revision=commit)
        except Exception as error:  # many unrelated types: of the Hub, the network, the builder
            failure = failure_of(error)
            of_network = isinstance(failure.cause, ConnectionError | httpx2.TransportError)
            if failure.may_pass and (failure.status or failure.timed_out or of_network):
                raise
            files = f"hf://datasets/{self.name}/folder/*.parquet"
            remedy = f"{LOG_IN} Or name its files: data.source={files}"
            if isinstance(error, OSError) and error.errno:  # of the disk
                remedy = "Name a folder on another disk in HF_HOME."
            raise DataError(
                f"data.source={self.source} has no default configuration that could be read from "
                f"the Hub: {reason_of(error)}. {remedy}"
            ) from error
        if isinstance(builder, Cache):  # rows that `datasets` has cached, not the files
            raise Unanswered("the Hub cannot be reached")
        return builder


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


def _needs_a_copy(builder: Any) -> str:
    """Why the files of a data set are not read as they are; empty if they are."""
    from datasets import BuilderConfig
    from datasets.packaged_modules.csv.csv import Csv
    from datasets.packaged_modules.json.json import Json
    from datasets.packaged_modules.parquet.parquet import Parquet
    from datasets.packaged_modules.text.text import Text

    if not isinstance(builder, (Csv, Json, Parquet, Text)):
        return "it has no texts and no tables of one format"
    config, usual = vars(builder.config), vars(type(builder.config)())
    urls = [str(url) for files in builder.config.data_files.values() for url in files]
    # Texts are read whole, and the files of a split are known.
    ignored = {"features", "keep_linebreaks", "sample_by", *vars(BuilderConfig())}
    if all(suffixes(url)[0] == ".tsv" for url in urls):
        ignored |= {"sep", "delimiter"}
    if codecs.lookup(config.get("encoding") or "utf-8").name == "utf-8":
        ignored |= {"encoding"}
    options = [
        f"{name}={value!r}"
        for name, value in config.items()
        if name not in ignored and value != usual.get(name)
    ]
    return f"its card reads the files with {', '.join(options)}" if options else ""
