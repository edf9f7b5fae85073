"""The files and groups of rows of a data set, listed before any row is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple

from data.columns import Column, TextColumn
from data.errors import BrokenText, DataError
from data.progress import Progress
from data.reading.access import Access
from data.reading.content import MOST_GROUP_BYTES, is_compressed
from data.reading.files import Found, check_formats, find_files
from data.reading.formats import LINES, format_of
from data.reading.groups import TRAIN, Group, Listing, StreamFile
from data.reading.lines import check_text
from data.reading.places import too_large
from data.reading.rows import format_for
from data.urls import redact_urls

READERS = 16
"""Footers and headers that are read at the same time."""


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
        groups = _groups(access, name, TextColumn(text_column), files, progress, skip_broken)
    if not groups:
        raise DataError(f"data.source={name} is empty: it has no rows.")
    digest = _fingerprint([kind, text_column], found, groups)
    return Listing(name, commit, kind, text_column, tuple(files), tuple(groups), digest)


def _groups(
    access: Access,
    name: str,
    column: Column,
    files: list[StreamFile],
    progress: Progress,
    skip_broken: bool,
) -> list[Group]:
    groups: list[Group] = []

    def groups_of(numbered: tuple[int, StreamFile]) -> list[Group]:
        groups = format_for(numbered[1]).groups(access, name, column, *numbered)
        if groups and format_of(numbered[1].name) == LINES:
            with suppress(*(BrokenText,) if skip_broken else ()):
                check_text(access, name, column, numbered[1])
        for group in groups:
            # How much a compressed text has is known when it is read.
            if group.bytes > MOST_GROUP_BYTES and not is_compressed(numbered[1]):
                raise too_large(name, numbered[1], group)
        return groups

    pool = ThreadPoolExecutor(READERS)
    try:
        for found in pool.map(groups_of, enumerate(files)):
            groups += found
            progress.done += 1
    finally:
        pool.shutdown(cancel_futures=True)
    return groups


def _fingerprint(parts: list[str], found: Found, groups: Iterable[Group]) -> str:
    """It has no paths and no times: other machines have others."""
    digest = hashlib.sha256(json.dumps(parts).encode())
    for content, file in found:
        digest.update(json.dumps([content, file.name, file.size]).encode())
    for group in groups:
        digest.update(repr(astuple(group)).encode())
    return digest.hexdigest()
