"""Data sets of the Hub: the files of a commit, of which a stream reads ranges.

`datasets` says which files belong to a split; it is imported only for that.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import quote

from fsspec.utils import glob_translate
from huggingface_hub import constants

from common.failures import Unanswered
from common.shared_files import digest_of, read_cached, write_cached
from data.errors import DataError
from data.reading.access import OID, Access
from data.reading.formats import is_data
from data.reading.groups import HUB_NAME, HUB_URL, DataFile

FILES = re.compile(
    rf"{HUB_URL}(?P<name>[\w.-]+/[\w.-]+)"
    r"(@(?P<revision>refs/(pr|convert)/[\w.-]+|[\w.-]+))?(/(?P<path>.*))?"
)
"""Some files of a data set, by path or pattern, in the notation of `huggingface_hub`."""
UNUSED_OPTIONS = {
    *("name", "version", "description", "data_dir", "data_files"),
    *("features", "keep_linebreaks", "sample_by"),
}
"""What a configuration says that changes no text here: it is read whole."""


def hub_files(
    access: Access, source: str, revision: str | None, split: str
) -> tuple[str, list[DataFile]]:
    """The commit, and the files that a source names, sorted by their paths in the repo.

    Of a whole data set they are those of a `split`. The list of a commit is kept on the disk, and
    which was the newest: a resume at a listed commit requests nothing, another start only the
    commit, and without the Hub it reads the same files. Raises DataError if there is none.
    """
    named = HUB_NAME.fullmatch(source) or FILES.fullmatch(source)
    if named is None:
        raise DataError(
            f"data.source={source} is not a name of the Hub: owner/name, owner/name@revision or "
            f"{HUB_URL}owner/name@revision/folder/*.parquet."
        )
    name, api = named["name"], f"{constants.ENDPOINT}/api/datasets/{named['name']}"
    records = access.cache_dir / "hub"
    newest = records / digest_of(constants.ENDPOINT, source)
    commit = revision
    if commit is None:
        url = f"{api}/revision/{quote(named['revision'] or 'main', safe='')}"
        is_none = " is neither a file here nor a data set that can be read: on the Hub it"
        try:
            commit = str(_ask(access, source, url, is_none)[0]["sha"])
        except DataError as error:
            if (earlier := read_cached(newest)) is None:
                raise
            access.say(f"warning: {source} is read as at an earlier start: {error}")
            commit = earlier.decode()
    record = records / digest_of(constants.ENDPOINT, source, split, commit)
    content = read_cached(record)
    if content is None:
        tree = dict(_tree(access, source, f"{api}/tree/{commit}?recursive=true&expand=false"))
        if named.re is FILES:
            paths = _matching(named["path"] or "", [*tree])
        else:
            paths = _paths_of_split(access, source, name, commit, split)
        content = json.dumps([[path, *tree[path]] for path in sorted(paths)]).encode()
        write_cached(record, content)
    if revision is None:
        write_cached(newest, commit.encode())
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
    config = access.until_answered(source, partial(_config, name, commit), ": its configuration")
    if split not in config.data_files:
        raise DataError(
            f"data.source={source} has no split {split!r}. Its splits: "
            f"{', '.join(map(str, config.data_files))}. Set data.held_out_split to one of them, "
            f"or name files of another split: data.source={HUB_URL}{name}/test*.parquet"
        )
    usual = vars(type(config)())
    options = [
        f"{key}={value!r}"
        for key, value in vars(config).items()
        if key not in UNUSED_OPTIONS and value != usual.get(key)
    ]
    if options:
        raise DataError(
            f"data.source={source} is not read: its card reads the files with "
            f"{', '.join(options)}. Name the copy that the Hub converts to Parquet: data.source="
            f"{HUB_URL}{name}@refs/convert/parquet/default/{split}/*.parquet"
        )
    return [str(url).removeprefix(f"{HUB_URL}{name}@{commit}/") for url in config.data_files[split]]


def _config(name: str, commit: str) -> Any:
    """What `datasets` knows of the default configuration."""
    import datasets

    config = datasets.load_dataset_builder(name, revision=commit).config
    if not config.data_files:  # rows that `datasets` has cached, as it cannot reach the Hub
        raise Unanswered("the Hub cannot be reached")
    return config
