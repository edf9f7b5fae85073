"""Lists a data set before any row is read: the files that a source names, and their groups of rows.

The files may be on this machine, on a server, in a store of fsspec or on the Hub.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

import fsspec

from common.printable import redact_urls
from data.columns import TextColumn
from data.errors import BrokenText, DataError
from data.progress import Progress
from data.reading.access import HTTP, Access, local_file, version_of
from data.reading.content import COMPRESSIONS, suffixes
from data.reading.fetch import file_name_of
from data.reading.formats import (
    COMPRESSED_INSIDE,
    FORMATS,
    LINES,
    endings,
    format_of,
    is_table,
    listed,
    mixed_formats,
)
from data.reading.groups import TRAIN, URL, DataFile, Group, Listing, names_in_folder
from data.reading.rows import check_first_rows, groups_of
from data.reading.table import MOST_GROUP_BYTES, Table

HUB_URL = "hf://"
SAMPLE_BYTES = 1 << 16
"""Both ends of a local file, and its size, identify its content."""
READERS = 16
"""How many footers and headers are read at the same time."""


def list_source(
    source: str,
    text_column: str,
    access: Access,
    revision: str | None = None,
    split: str = TRAIN,
    skip_broken: bool = False,
) -> Listing:
    """The files of `source` and their groups of rows, in the same order on every machine.

    A source is a folder, a path or a pattern of this machine; a data set of the Hub as `owner/name`
    or `owner/name@revision`, of which a `split` of the default configuration is read; files of it
    as `hf://datasets/owner/name@revision/data/*.parquet`; or another URL: http(s), or what
    fsspec has a file system for. `revision` is the commit of an earlier start. With `skip_broken`
    a first row that is none is left to whoever reads it.

    Raises DataError if there are no such files or if they cannot be streamed, and TextUnreachable
    if a network or a server fails for longer than a start waits.
    """
    name = redact_urls(source)
    with access.waiting.at_start(), Progress(access.say) as progress:
        progress.doing(f"listing {name}")
        commit, files = find_files(access, source, revision, split)
        kind = check_formats(name, files)
        progress.doing(f"listing {name}", len(files))
        column = TextColumn(text_column)
        tables = [Table(access, name, column, file, at) for at, file in enumerate(files)]
        groups = _groups(tables, kind, progress, skip_broken)
        contents = [_content_of(access, source, file) for file in files]
    if not groups:
        raise DataError(f"data.source={name} is empty: it has no rows.")
    digest = _fingerprint([kind, text_column], contents, files, groups)
    return Listing(name, commit, kind, text_column, tuple(files), tuple(groups), digest)


def _groups(
    tables: Sequence[Table], kind: str, progress: Progress, skip_broken: bool
) -> list[Group]:
    groups: list[Group] = []

    def checked(table: Table) -> list[Group]:
        groups = groups_of(table)
        if groups and kind == LINES:
            with suppress(*(BrokenText,) if skip_broken else ()):
                check_first_rows(table)
        for group in groups:
            # The size of a compressed text is known only once it is read.
            if group.bytes > MOST_GROUP_BYTES and not table.file.is_compressed:
                raise table.too_large(group)
        return groups

    pool = ThreadPoolExecutor(READERS)
    try:
        for found in pool.map(checked, tables):
            groups += found
            progress.done += 1
    finally:
        pool.shutdown(cancel_futures=True)
    return groups


def _fingerprint(
    parts: list[str], contents: list[str], files: list[DataFile], groups: Iterable[Group]
) -> str:
    """Without paths and times, which differ between machines."""
    digest = hashlib.sha256(json.dumps(parts).encode())
    for content, file in zip(contents, files, strict=True):
        digest.update(json.dumps([content, file.name, file.size]).encode())
    for group in groups:
        digest.update(repr(astuple(group)).encode())
    return digest.hexdigest()


def find_files(
    access: Access, source: str, revision: str | None, split: str = TRAIN
) -> tuple[str | None, list[DataFile]]:
    """The commit of a data set of the Hub, and the files of any source, sorted by name.

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
        name = file_name_of(source)  # raises for a URL that is not requested
        size, version = access.stat(source)
        return None, [DataFile(source, name, size, version)]
    if URL.match(source) and not source.startswith(HUB_URL):
        return None, _files_of_store(access, source)
    if not source.startswith(HUB_URL):
        try:
            if _is_local(source):
                return None, _local_files(source)
        except (OSError, RuntimeError) as error:  # an unreadable folder, an unknown ~user
            raise cannot_be_opened(source, error) from error
    from data.reading.hub import hub_files

    return hub_files(access, source, revision, split, is_data)


def check_formats(source: str, files: list[DataFile]) -> str:
    """The format of all files. Raises DataError if there are none, or if they have several."""
    kind = format_of_all(source, files)
    if not kind:
        raise DataError(
            f"data.source={source} cannot be streamed: {files[0].name} is not a table "
            f"({endings(tables=True)}) or a text ({endings(tables=False)}). Set "
            "data.streaming=false, convert it, or rename it."
        )
    return kind


def format_of_all(source: str, files: list[DataFile], unknown: str = "") -> str:
    """The format of all files; `unknown` stands for that of an unknown extension.

    Raises DataError for several formats, and for no file.
    """
    if not files:
        plain = (end for end, kind in FORMATS.items() if kind in COMPRESSED_INSIDE)
        raise DataError(
            f"data.source={source} names no table. Check the name; a folder or a pattern needs "
            f"files that end in {endings(tables=True)}, and all but {listed(plain)} also with "
            f"{listed(COMPRESSIONS)}. Texts are named by a pattern such as *.txt."
        )
    kinds = {format_of(file.name) or unknown for file in files}
    if len(kinds) > 1:
        raise mixed_formats(source, [file.name for file in files])
    return kinds.pop()


def looks_like_files(source: str) -> bool:
    """Whether a source names local files, and not a data set on the Hub."""
    suffix, compression = suffixes(source)
    return (
        Path(source).expanduser().exists()
        or any(mark in source for mark in "*?[")
        or source.startswith(("/", "./", "../", "~"))
        or compression != ""
        or suffix in FORMATS
        or re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) is None
    )


def matching_files(source: str) -> list[Path]:
    """The files that a path or a pattern matches, sorted by name.

    Raises DataError if there are none, OSError if a folder cannot be read or a name is too long,
    and RuntimeError for the home of an unknown user.
    """
    path = Path(source).expanduser()
    if path.exists():
        return [path]
    if not any(mark in source for mark in "*?["):
        raise DataError(f"data.source={source}: there is no such file. Check the path.")
    fixed = [part for part in path.parents if not glob.has_magic(str(part))]
    if fixed and fixed[0].is_dir():
        os.scandir(fixed[0]).close()  # raises for an unreadable folder, where glob finds no files
    # With two ** glob finds a file twice.
    files = [Path(name) for name in sorted({*glob.glob(str(path), recursive=True)})]
    files = [file for file in files if not file.is_dir()]
    if not files:
        raise DataError(
            f"data.source={source} matches no file. Check the pattern; ** includes subfolders."
        )
    return files


def local_files(source: str, paths: Sequence[Path]) -> list[DataFile]:
    """Files of this machine, named relative to the deepest folder that contains all of them.

    Raises DataError if one is not a regular file, or is another one by another name.
    """
    paths_of: dict[str, Path] = {}
    for path in paths:
        if (other := paths_of.setdefault(os.path.realpath(path), path)) is not path:
            raise DataError(
                f"data.source={source} has one file twice, as {other} and {path}: its held-out "
                "rows would be trained on. Use a pattern or a folder without one of the two."
            )
    names = names_in_folder([path.absolute().as_posix() for path in paths])
    return [local_file(source, path, name) for path, name in zip(paths, names, strict=True)]


def cannot_be_opened(source: str, error: OSError | RuntimeError) -> DataError:
    """The error for a path that cannot be looked up."""
    reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
    return DataError(f"data.source={source} cannot be opened: {reason}. Check the path.")


def _is_local(source: str) -> bool:
    return looks_like_files(source.partition("@")[0]) or Path(source).expanduser().exists()


def _local_files(source: str) -> list[DataFile]:
    folder = Path(source).expanduser()
    if folder.is_dir():
        data = (path for path in folder.rglob("*") if is_data(path.relative_to(folder)))
        paths = [path for path in data if not path.is_dir()]
    else:
        paths = matching_files(source)
    files = local_files(source, [path.absolute() for path in paths])
    return sorted(files, key=lambda file: file.name)


def _content_of(access: Access, source: str, file: DataFile) -> str:
    """What identifies the content of a file on every machine."""
    if file.is_remote:
        return file.version
    begin = access.read(source, file, 0, SAMPLE_BYTES)
    end = access.read(source, file, max(0, file.size - SAMPLE_BYTES), file.size)
    return hashlib.sha256(begin + end).hexdigest()


def _files_of_store(access: Access, source: str) -> list[DataFile]:
    """Files in a file system of fsspec, named by a path, a folder or a pattern."""

    def list_files() -> dict[str, dict[str, Any]]:
        system, path = fsspec.core.url_to_fs(source)
        if glob.has_magic(path):
            found = system.glob(path, detail=True)
        elif system.isdir(path):
            found = system.find(path, detail=True)
            folder = path.rstrip("/") + "/"
            found = {
                name: found[name] for name in found if is_data(Path(name.removeprefix(folder)))
            }
        else:
            found = {path: system.info(path)}
        return {_beginning(source, path) + name: info for name, info in found.items()}

    found = access.waiting.until_answered(source, list_files)
    infos = {url: info for url, info in found.items() if info["type"] == "file"}
    files = [
        DataFile(url, name, int(infos[url]["size"]), version_of(infos[url]))
        for url, name in zip(infos, names_in_folder(list(infos)), strict=True)
    ]
    return sorted(files, key=lambda file: file.name)


def _beginning(source: str, path: str) -> str:
    """The beginning of a URL, before the path in its file system: protocol, host, account.

    Raises DataError for a URL whose files have no URLs that begin with it, such as a chained one.
    """
    whole, inside = source.rstrip("/"), path.rstrip("/")
    if not inside or not whole.endswith(inside):
        raise DataError(
            f"data.source={redact_urls(source)} cannot be streamed: the files in it have no URLs "
            "of their own. Name a file, a folder or a pattern of its file system."
        )
    return whole.removesuffix(inside)


def is_data(path: Path) -> bool:
    """Whether a file in a folder belongs to the data set: a table that is not hidden."""
    return is_table(path.name) and not any(part.startswith((".", "_")) for part in path.parts)
