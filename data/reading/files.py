"""The files that `data.source` names: on this machine, on a server, in a store or on the Hub."""

from __future__ import annotations

import glob
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import fsspec
import httpx2
from fsspec.implementations.local import LocalFileSystem

from common.printable import redact_urls
from common.shared_files import digest_of, make_once
from data.errors import DataError
from data.reading.access import Access, version_of
from data.reading.formats import is_data
from data.reading.groups import HTTP, HUB_URL, TRAIN, URL, DataFile, is_hub_name
from data.reading.hub import hub_files

DOCS, STDLIB = BUILT_IN = ("python-docs", "python-stdlib")
"""Texts that ship with Python."""
NO_TEXTS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
"""Folders of the standard library that are left out."""


def find_files(
    access: Access, source: str, revision: str | None = None, split: str = TRAIN
) -> tuple[str | None, list[DataFile]]:
    """The commit of a data set of the Hub, and the files of any source, sorted by name.

    `revision` is the commit of an earlier start. Only a data set of the Hub that is named as a
    whole has another `split`. Raises DataError if the files cannot be listed, and OSError.
    """
    is_data_set = is_hub_name(source) and source not in BUILT_IN and not os.path.lexists(source)
    if split != TRAIN and not is_data_set:
        raise DataError(
            f"data.held_out_split={split} applies only to a data set of the Hub (owner/name), and "
            f"data.source={redact_urls(source)} is not one. Leave it out; data.val_fraction of "
            "the rows is held out instead."
        )
    if is_data_set or source.startswith(HUB_URL):
        return hub_files(access, source, revision, split)
    if HTTP.match(source):
        return None, [DataFile(source, _file_name_of(source), 0, "")]
    here = str(_built_in(source, access.cache_dir)) if source in BUILT_IN else source
    files = access.until_answered(source, lambda: _listed(here))
    return None, sorted(files, key=lambda file: file.name)


def _listed(source: str) -> list[DataFile]:
    """The files of this machine or of a store that a path or a pattern names.

    Of a folder they are the tables in it. Names are relative to the deepest folder that contains
    all of them.
    """
    system, path = LocalFileSystem(), LocalFileSystem._strip_protocol(source)
    if URL.match(source):
        system, path = fsspec.core.url_to_fs(source)
    if glob.has_magic(path) and not os.path.lexists(path):
        paths = [name for name in system.glob(path) if not Path(name).name.startswith(".")]
    elif system.isdir(path):
        folder = path.rstrip("/") + "/"
        paths = [name for name in system.find(path) if is_data(name.removeprefix(folder))]
    else:
        paths = [path]
    infos = {name: system.info(name) for name in paths}
    infos = {name: info for name, info in infos.items() if info["type"] == "file"}
    # os.path.commonpath would rewrite // and /./, which the names of a store may have.
    levels = zip(*(name.split("/")[:-1] for name in infos), strict=False)
    depth = sum(1 for _ in takewhile(lambda level: len({*level}) == 1, levels))
    names = {name: "/".join(name.split("/")[depth:]) for name in infos}
    return [
        DataFile(path, names[path], int(info["size"]), version_of(info), system)
        for path, info in infos.items()
    ]


def _file_name_of(url: str) -> str:
    """A file name of at most 100 characters: the end of the URL's path, which says the format.

    Raises DataError if the URL is not valid, or has a password.
    """
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise DataError(f"data.source={redact_urls(url)} is not a valid URL: {error}.") from error
    if parsed.userinfo or not parsed.host:
        raise DataError(
            f"data.source={redact_urls(url)} has no host, or a user name or password before it, "
            "which is never sent. Download the file by other means and give its path."
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
