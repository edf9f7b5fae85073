"""The files that a source names: of this machine, of the Hub, of a server, or of a store."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from data.errors import DataError
from data.reading.access import HTTP, URL, Access, local_version, version_of, with_filesystem
from data.reading.fetch import file_name_of
from data.reading.formats import CSV, format_of, mixed_formats
from data.reading.groups import TRAIN, StreamFile
from data.reading.local import cannot_be_opened, common_folder, looks_like_files, matching_files
from data.urls import redact_urls

Found = list[tuple[str, StreamFile]]
"""Files in the order of their names, each with what identifies its content on every machine."""
File = TypeVar("File")
HUB_URL = "hf://"
SAMPLE_BYTES = 1 << 16
"""Of both ends of a local file: they identify its content, with its size."""


def find_files(
    access: Access, source: str, revision: str | None, split: str = TRAIN
) -> tuple[str | None, Found]:
    """The commit of a data set of the Hub, and the files of any source.

    Only a data set of the Hub that is named as a whole has another `split`. Raises DataError if
    they cannot be listed.
    """
    if split != TRAIN and (URL.match(source) or _is_local(source)):
        raise DataError(
            f"data.held_out_split={split} applies only to a data set of the Hub (owner/name), and "
            f"data.source={redact_urls(source)} is not one. Leave it out; data.val_fraction of "
            "the rows is held out instead."
        )
    if HTTP.match(source):
        return None, _http_file(access, source)
    if URL.match(source) and not source.startswith(HUB_URL):
        return None, _files_of_store(access, source)
    if not source.startswith(HUB_URL):
        try:
            if _is_local(source):
                return None, _local_files(access, source)
        except (OSError, RuntimeError) as error:  # an unreadable folder, an unknown ~user
            raise cannot_be_opened(source, error) from error
    from data.reading.hub import hub_files

    commit, files = hub_files(access, source, revision, split, is_data)
    chosen = files if glob.has_magic(source) else of_folder(files, lambda file: file.name)
    return commit, [(file.version, file) for file in chosen]


def _is_local(source: str) -> bool:
    return looks_like_files(source.partition("@")[0]) or Path(source).expanduser().exists()


def _http_file(access: Access, url: str) -> Found:
    name = file_name_of(url)
    size, version = access.ask(url, url, lambda: access.http.stat(url))
    return [(version, StreamFile(url, name, size, version))]


def _files_of_store(access: Access, source: str) -> Found:
    """Files of a file system of fsspec: one, those of a folder, or those that match a pattern."""

    def list_files(system: Any, path: str) -> dict[str, dict[str, Any]]:
        if glob.has_magic(path):
            found = system.glob(path, detail=True)
        elif system.isdir(path):
            found = system.find(path, detail=True)
            folder = path.rstrip("/") + "/"
            names = [name for name in found if is_data(Path(name.removeprefix(folder)))]
            found = {name: found[name] for name in of_folder(names, str)}
        else:
            found = {path: system.info(path)}
        return {_beginning(source, path) + name: info for name, info in found.items()}

    found = access.ask(source, source, lambda: with_filesystem(source, list_files))
    urls = {url: info for url, info in found.items() if info["type"] == "file"}
    folder = common_folder(urls)
    files = [
        StreamFile(url, url[len(folder) :], int(info["size"]), version_of(info))
        for url, info in urls.items()
        if format_of(url) or len(urls) == 1
    ]
    return [(file.version, file) for file in sorted(files, key=lambda file: file.name)]


def _beginning(source: str, path: str) -> str:
    """What of a URL comes before the path in its file system: protocol, host, account.

    Raises DataError for a URL whose files have no URLs that begin with it, such as a chained one.
    """
    whole, inside = source.rstrip("/"), path.rstrip("/")
    if not inside or not whole.endswith(inside):
        raise DataError(
            f"data.source={redact_urls(source)} cannot be streamed: the files in it have no URLs "
            "of their own. Name a file, a folder or a pattern of its file system."
        )
    return whole.removesuffix(inside)


def _local_files(access: Access, source: str) -> Found:
    folder = Path(source).expanduser()
    if folder.is_dir():
        found = (path for path in folder.rglob("*") if is_data(path.relative_to(folder)))
        paths = of_folder([path for path in found if not path.is_dir()], str)
    else:
        paths = matching_files(source)
    names = {path.absolute().as_posix(): path for path in paths}
    shared = common_folder(names)
    files = [
        StreamFile(name, name[len(shared) :], *local_version(source, path))
        for name, path in names.items()
    ]
    files.sort(key=lambda file: file.name)
    return [(_sample(access, source, file), file) for file in files]


def of_folder(files: Sequence[File], name_of: Callable[[File], str]) -> list[File]:
    """The data of a folder: next to other tables, CSV is of something else, labels for example."""
    kinds = [format_of(name_of(file)) for file in files]
    has_others = any(kind not in (None, CSV) for kind in kinds)
    return [
        file for file, kind in zip(files, kinds, strict=True) if not (has_others and kind == CSV)
    ]


def is_data(path: Path) -> bool:
    """Whether a file of a folder is a part of the data set; hidden files are not."""
    return format_of(path.name) is not None and not any(
        part.startswith((".", "_")) for part in path.parts
    )


def _sample(access: Access, source: str, file: StreamFile) -> str:
    begin = access.read(source, file, 0, SAMPLE_BYTES)
    end = access.read(source, file, max(0, file.size - SAMPLE_BYTES), file.size)
    return hashlib.sha256(begin + end).hexdigest()


def check_formats(source: str, files: list[StreamFile]) -> str:
    """The format of all files. Raises DataError if there are none, or if they have several."""
    if not files:
        raise DataError(
            f"data.source={source} names no file of Parquet, JSON lines or CSV. Check the name; a "
            "folder or a pattern needs files that end in .parquet, .jsonl, .json, .csv or .tsv, "
            "and all but .parquet also with .gz, .bz2, .xz or .zst."
        )
    kinds = {format_of(file.name) for file in files}
    if len(kinds) > 1:
        raise mixed_formats(source, [file.name for file in files])
    kind = kinds.pop()
    if kind is None:
        raise DataError(
            f"data.source={source} cannot be streamed: {files[0].name} is not Parquet, JSON lines "
            "(.jsonl, .ndjson or .json) or CSV (.csv or .tsv). Set data.streaming=false, or "
            "convert it."
        )
    return kind
