"""The files that `data.source` names: on this machine, on a server, in a store or on the Hub."""

from __future__ import annotations

import glob
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path

import httpx2

from common.printable import redact_urls
from common.shared_files import digest_of, make_once
from data.errors import DataError
from data.reading.access import Access, file_system, version_of
from data.reading.formats import COMPRESSIONS, FORMATS, TEXT, format_of, is_data, suffixes
from data.reading.groups import HTTP, HUB_URL, TRAIN, URL, DataFile
from data.reading.hub import NAME, hub_files

DOCS, STDLIB = BUILT_IN = ("python-docs", "python-stdlib")
"""Texts that ship with Python."""
NO_TEXTS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
"""Folders of the standard library that are left out."""


def format_of_all(source: str, files: Sequence[DataFile]) -> str:
    """The format of all files; one with an unknown extension is a text.

    Raises DataError for several formats, and for no file.
    """
    kinds = {format_of(file.name) or TEXT for file in files}
    if len(kinds) == 1:
        return kinds.pop()
    tables = [end for end, kind in FORMATS.items() if kind != TEXT]
    raise DataError(
        f"data.source={source} {'mixes formats' if files else 'names no file'}. Name files of one "
        f"format; of a folder the tables are read ({', '.join([*tables, *COMPRESSIONS])}), and "
        "texts are named by a pattern such as *.txt."
    )


def find_files(
    access: Access, source: str, revision: str | None = None, split: str = TRAIN
) -> tuple[str | None, list[DataFile]]:
    """The commit of a data set of the Hub, and the files of any source, sorted by name.

    `revision` is the commit of an earlier start. Only a data set of the Hub that is named as a
    whole has another `split`. Raises DataError if the files cannot be listed.
    """
    is_url = URL.match(source) is not None
    is_here = not is_url and _is_here(source)
    if split != TRAIN and (is_url or is_here):
        raise DataError(
            f"data.held_out_split={split} applies only to a data set of the Hub (owner/name), and "
            f"data.source={redact_urls(source)} is not one. Leave it out; data.val_fraction of "
            "the rows is held out instead."
        )
    if source in BUILT_IN:
        return None, listed_files(access, str(_built_in(source, access.cache_dir)))
    if HTTP.match(source):
        return None, [DataFile(source, file_name_of(source), 0, "")]
    if is_here or (is_url and not source.startswith(HUB_URL)):
        return None, listed_files(access, source)
    return hub_files(access, source, revision, split)


def _is_here(source: str) -> bool:
    """Whether a source names files of this machine, and no data set of the Hub."""
    name = source.partition("@")[0]
    has_suffix = format_of(name) is not None or suffixes(name)[1] != ""
    return has_suffix or NAME.fullmatch(source) is None or os.path.lexists(source)


def listed_files(access: Access, source: str) -> list[DataFile]:
    """The files of this machine or of a store that a path or a pattern names, sorted by name.

    Of a folder they are the tables in it. Names are relative to the deepest folder that contains
    all of them. Raises DataError.
    """

    def list_files() -> list[DataFile]:
        system, path = file_system(source)
        is_pattern = glob.has_magic(path) and not os.path.lexists(path)
        if is_pattern:
            paths = [name for name in system.glob(path) if not Path(name).name.startswith(".")]
        elif system.isdir(path):
            folder = path.rstrip("/") + "/"
            paths = [name for name in system.find(path) if is_data(name.removeprefix(folder))]
        else:
            paths = [path]
        infos = {name: system.info(name) for name in sorted(paths)}
        infos = {name: info for name, info in infos.items() if info["type"] == "file"}
        url_of = partial(_url_in, source, path) if URL.match(source) else str
        names = names_in_folder([*infos])
        return [
            DataFile(url_of(path), name, int(info["size"]), version_of(info))
            for name, (path, info) in zip(names, infos.items(), strict=True)
        ]

    return sorted(access.until_answered(source, list_files), key=lambda file: file.name)


def _url_in(source: str, path: str, other: str) -> str:
    """The URL of a path in the file system of a source, whose own path there is `path`.

    A source and its path end alike. Before that a source has a protocol, perhaps a host or an
    account, and a path may have what stands elsewhere in its URL: the one replaces the other.
    """
    url, chained, containers = source.partition("::")
    url = url.rstrip("/")
    ends = zip(reversed(url), reversed(path), strict=False)
    shared = len([*takewhile(lambda pair: pair[0] == pair[1], ends)])
    begin, begin_of_path = url[: len(url) - shared], path[: len(path) - shared]
    return begin + other.removeprefix(begin_of_path) + chained + containers


def names_in_folder(paths: Sequence[str]) -> list[str]:
    """Paths, relative to the deepest folder that contains all of them."""
    folders = [path.split("/")[:-1] for path in paths]
    levels = zip(*folders, strict=False)  # as many as the shallowest file has
    shared = [level[0] for level in takewhile(lambda level: len({*level}) == 1, levels)]
    return [path[len("/".join([*shared, ""])) :] for path in paths]


def file_name_of(url: str) -> str:
    """A file name with the end of the URL's path, which decides the format; at most 100 characters.

    Raises DataError if the URL is not valid, or has a password.
    """
    shown = redact_urls(url)
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise DataError(f"data.source={shown} is not a valid URL: {error}.") from error
    if parsed.userinfo or not parsed.host:
        raise DataError(
            f"data.source={shown} has no host, or a user name or password before it, which is "
            "never sent. Download the file by other means and give its path."
        )
    name = re.sub(r"[^A-Za-z0-9._-]", "_", Path(parsed.path).name)
    return name[-100:].lstrip(".") or "text.txt"


def _built_in(source: str, cache_dir: Path) -> Path:
    """A text that ships with Python, as JSON lines in the cache. Raises OSError."""
    path = cache_dir / "fetched" / digest_of(source, sys.version)[:16] / f"{source}.jsonl"

    def make(folder: Path) -> None:
        texts = _python_docs() if source == DOCS else _python_stdlib()
        rows = (json.dumps({"text": text}) + "\n" for text in texts)
        (folder / path.name).write_text("".join(rows))

    make_once(path.parent, make, path.exists)
    return path


def _python_docs() -> Iterator[str]:
    from pydoc_data.topics import topics  # 79 topics of `help`, about 465,000 characters

    return (topics[topic] for topic in sorted(topics))


def _python_stdlib() -> Iterator[str]:
    """The standard library's modules, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if NO_TEXTS.isdisjoint(path.relative_to(root).parts):
            yield path.read_text(encoding="utf-8-sig")
