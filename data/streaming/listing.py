"""The files and groups of rows of a data set, listed before any row is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple

from data.errors import BrokenText, DataError
from data.progress import Progress
from data.streaming.access import Access
from data.streaming.files import Found, check_formats, find_files, format_of
from data.streaming.groups import TRAIN, Group, Listing, StreamFile
from data.streaming.lines import check_first_row, line_groups
from data.streaming.parquet import footer_of, row_groups
from data.urls import redact_urls

READERS = 16
"""Footers that are read at the same time."""
PACKED_RATIO = 3
"""How much larger a compressed text is in memory, about."""


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
        commit, found = find_files(access, source, revision, split)
        files = [file for _, file in found]
        kind = check_formats(name, files)
        progress.doing(f"listing {name}", len(files))
        if kind == "parquet":
            groups = _row_groups(access, name, text_column, files, progress)
        else:
            groups = _line_groups(files)
            if groups:
                with suppress(*(BrokenText,) if skip_broken else ()):
                    check_first_row(access, name, text_column, files[groups[0].file])
    if not groups:
        raise DataError(f"data.source={name} is empty: it has no rows.")
    digest = _fingerprint([kind, text_column], found, groups)
    return Listing(name, commit, kind, text_column, tuple(files), tuple(groups), digest)


def _row_groups(
    access: Access, name: str, column: str, files: list[StreamFile], progress: Progress
) -> list[Group]:
    groups: list[Group] = []

    def groups_of(numbered: tuple[int, StreamFile]) -> list[Group]:
        number, file = numbered
        footer = footer_of(access, name, file)
        return list(row_groups(name, column, number, file, footer))

    pool = ThreadPoolExecutor(READERS)
    try:
        for found in pool.map(groups_of, enumerate(files)):
            groups += found
            progress.done += 1
    finally:
        pool.shutdown(cancel_futures=True)
    return groups


def _line_groups(files: list[StreamFile]) -> list[Group]:
    groups: list[Group] = []
    for number, file in enumerate(files):
        if format_of(file.name)[1] is not None and file.size:
            text_bytes = PACKED_RATIO * file.size
            groups.append(Group(number, 0, None, None, 0, file.size, text_bytes))
        else:
            groups.extend(line_groups(number, file))
    return groups


def _fingerprint(parts: list[str], found: Found, groups: Iterable[Group]) -> str:
    """It has no paths and no times: other machines have others."""
    digest = hashlib.sha256(json.dumps(parts).encode())
    for content, file in found:
        digest.update(json.dumps([content, file.name, file.size]).encode())
    for group in groups:
        digest.update(repr(astuple(group)).encode())
    return digest.hexdigest()
