"""The files that `data.source` names, and the formats that their extensions say.

They are on this machine, on a server, in a store of fsspec or on the Hub.
"""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec

from common.printable import redact_urls
from data.errors import DataError
from data.reading.access import HTTP, Access, version_of, version_of_stat
from data.reading.formats import COMPRESSIONS, FORMATS, TEXT, format_of, is_data, suffixes
from data.reading.groups import TRAIN, URL, DataFile
from data.reading.hub import NAME, hub_files

HUB_URL = "hf://"


def format_of_all(source: str, files: Sequence[DataFile], unknown: str | None = None) -> str:
    """The format of all files; `unknown` stands for that of an unknown extension.

    Raises DataError for several formats, for no file, and for an unknown one without `unknown`.
    """
    tables = ", ".join(end for end, kind in FORMATS.items() if kind != TEXT)
    texts = ", ".join(end for end, kind in FORMATS.items() if kind == TEXT)
    if not files:
        raise DataError(
            f"data.source={source} names no table. Check the name; of a folder the tables are read "
            f"({tables}, also with {', '.join(COMPRESSIONS)}). Texts are named by a pattern such "
            "as *.txt."
        )
    kinds = {format_of(file.name) or unknown for file in files}
    if len(kinds) > 1:
        ends = sorted({suffixes(file.name)[0] or file.name for file in files})
        raise DataError(
            f"data.source={source} mixes formats ({', '.join(ends[:20])}). Name files of one "
            "format."
        )
    if (kind := kinds.pop()) is None:
        raise DataError(
            f"data.source={source} cannot be streamed: {files[0].name} is neither a table "
            f"({tables}) nor a text ({texts}). Set data.streaming=false, convert it, or rename it."
        )
    return kind


def find_files(
    access: Access, source: str, revision: str | None = None, split: str = TRAIN
) -> tuple[str | None, list[DataFile]]:
    """The commit of a data set of the Hub, and the files of any source, sorted by name.

    `revision` is the commit of an earlier start. Only a data set of the Hub that is named as a
    whole has another `split`. Raises DataError if the files cannot be listed.
    """
    is_url, is_here = URL.match(source) is not None, _is_here(source)
    if split != TRAIN and (is_url or is_here):
        raise DataError(
            f"data.held_out_split={split} applies only to a data set of the Hub (owner/name), and "
            f"data.source={redact_urls(source)} is not one. Leave it out; data.val_fraction of "
            "the rows is held out instead."
        )
    if HTTP.match(source):
        name = file_name_of(source)  # raises for a URL that is not requested
        return None, [DataFile(source, name, *access.stat(source))]
    if is_url and not source.startswith(HUB_URL):
        return None, _files_of_store(access, source)
    if is_here:
        return None, local_files(source)
    return hub_files(access, source, revision, split)


def _is_here(source: str) -> bool:
    """Whether a source names files of this machine, and no data set of the Hub."""
    if source.startswith(HUB_URL):
        return False
    name = source.partition("@")[0]
    has_suffix = format_of(name) is not None or suffixes(name)[1] != ""
    return has_suffix or NAME.fullmatch(source) is None or os.path.lexists(source)


def local_files(source: str, paths: Iterable[Path] | None = None) -> list[DataFile]:
    """The files that a path or a pattern names, or the tables in a folder, sorted by name.

    Names are relative to the deepest folder that contains all of them. Raises DataError for no
    file, for one that is not regular, and for one file by two names.
    """
    paths = _paths(source) if paths is None else paths
    paths = sorted((path.absolute() for path in paths), key=str)
    first_of: dict[str, Path] = {}
    for path in paths:
        if (other := first_of.setdefault(os.path.realpath(path), path)) is not path:
            raise DataError(
                f"data.source={source} has one file twice, as {other} and {path}: its held-out "
                "rows would be trained on. Use a pattern or a folder without one of the two."
            )
    names = names_in_folder([path.as_posix() for path in paths])
    files = [local_file(source, path, name) for path, name in zip(paths, names, strict=True)]
    return sorted(files, key=lambda file: file.name)


def _paths(source: str) -> list[Path]:
    path = Path(source)
    with suppress(RuntimeError):  # the home of an unknown user
        path = path.expanduser()
    if not os.path.lexists(path):  # of a name that can be no file, too
        return _matching(source, path)
    if not path.is_dir():
        return [path]
    inside = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    return [file for file in inside if is_data(file.relative_to(path).as_posix())]


def _matching(source: str, path: Path) -> list[Path]:
    pattern = str(path)
    fixed = next((part for part in path.parents if not glob.has_magic(str(part))), path)
    try:
        path.lstat() if not glob.has_magic(pattern) else os.scandir(fixed).close()
    except FileNotFoundError:
        pass
    except OSError as error:  # of an unreadable folder, where glob finds no files
        raise DataError(
            f"data.source={source} cannot be opened: {error.strerror}. Check the path."
        ) from error
    if not glob.has_magic(pattern):
        raise DataError(
            f"data.source={source}: there is no such file. Check the path. A data set of the Hub "
            "is named owner/name, owner/name@revision or hf://datasets/owner/name/*.parquet."
        )
    # With two ** glob finds a file twice.
    paths = [Path(name) for name in {*glob.glob(pattern, recursive=True)}]
    # Path.is_dir raises for what may not be searched, which is told when it is opened.
    paths = [path for path in paths if not os.path.isdir(path)]  # noqa: PTH112
    if not paths:
        raise DataError(
            f"data.source={source} matches no file. Check the pattern; ** includes subfolders."
        )
    return paths


def local_file(source: str, path: Path, name: str) -> DataFile:
    """A file of this machine. Raises DataError if there is no such file, or no regular one."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"data.source={source}: cannot read {path}: {error.strerror}.") from error
    if not stat.S_ISREG(status.st_mode):  # a device or a pipe may never end
        raise DataError(
            f"data.source={source}: {path} is not a regular file, but a device or a pipe, for "
            "example. Write its text to a file first."
        )
    return DataFile(str(path), name, status.st_size, version_of_stat(status))


def names_in_folder(paths: Sequence[str]) -> list[str]:
    """Paths or URLs, relative to the deepest folder that contains all of them."""
    folders = [path.split("/")[:-1] for path in paths]
    levels = zip(*folders, strict=False)  # as many as the shallowest file has
    shared = [level[0] for level in takewhile(lambda level: len({*level}) == 1, levels)]
    return [path[len("/".join([*shared, ""])) :] for path in paths]


def _files_of_store(access: Access, source: str) -> list[DataFile]:
    """Files in a file system of fsspec, named by a path, a folder or a pattern."""

    def list_files() -> dict[str, dict[str, Any]]:
        system, path = fsspec.core.url_to_fs(source)
        if glob.has_magic(path):
            infos = system.glob(path, detail=True)
        elif system.isdir(path):
            folder = path.rstrip("/") + "/"
            infos = system.find(path, detail=True)
            infos = {name: infos[name] for name in infos if is_data(name.removeprefix(folder))}
        else:
            infos = {path: system.info(path)}
        # Protocol, host and account of the source, before the path in its file system.
        whole, inside = source.rstrip("/"), path.rstrip("/")
        if not inside or not whole.endswith(inside):
            raise DataError(
                f"data.source={redact_urls(source)} cannot be streamed: the files in it have no "
                "URLs of their own. Name a file, a folder or a pattern of its file system."
            )
        begin = whole.removesuffix(inside)
        return {begin + name: info for name, info in infos.items() if info["type"] == "file"}

    infos = access.until_answered(source, list_files)
    files = [
        DataFile(url, name, int(info["size"]), version_of(info))
        for (url, info), name in zip(infos.items(), names_in_folder(list(infos)), strict=True)
    ]
    return sorted(files, key=lambda file: file.name)


def file_name_of(url: str) -> str:
    """A file name with the end of the URL's path, which decides the format; at most 100 characters.

    Raises DataError if the URL is not valid, or has a password.
    """
    shown = redact_urls(url)
    try:
        parsed = urlsplit(url)
        if not parsed.hostname or (parsed.port or 0) < 0:
            raise ValueError(url)
    except ValueError as error:
        raise DataError(
            f"data.source={shown} is not a valid URL: it has no host, or no valid port. It should "
            "look like https://host/path/text.txt."
        ) from error
    if parsed.username is not None:
        raise DataError(
            f"data.source={shown} has a user name or password before its host, which is never "
            "sent. Download the file by other means and give its path."
        )
    name = re.sub(r"[^A-Za-z0-9._-]", "_", Path(parsed.path).name)
    return name[-100:].lstrip(".") or "text.txt"
