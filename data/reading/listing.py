"""The files and groups of rows of a data set, listed before any row is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple

from data.columns import TextColumn
from data.errors import BrokenText, DataError
from data.printable import redact_urls
from data.progress import Progress
from data.reading.access import Access
from data.reading.formats import LINES
from data.reading.groups import TRAIN, Group, Listing
from data.reading.lines import check_text
from data.reading.places import Found, check_formats, find_files
from data.reading.rows import format_for
from data.reading.table import MOST_GROUP_BYTES, Table

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
        commit, found = find_files(access, source, revision, split)
        kind = check_formats(name, [file for _, file in found])
        progress.doing(f"listing {name}", len(found))
        column = TextColumn(text_column)
        tables = [Table(access, name, column, file, at) for at, (_, file) in enumerate(found)]
        groups = _groups(tables, kind, progress, skip_broken)
    if not groups:
        raise DataError(f"data.source={name} is empty: it has no rows.")
    digest = _fingerprint([kind, text_column], found, groups)
    files = tuple(file for _, file in found)
    return Listing(name, commit, kind, text_column, files, tuple(groups), digest)


def _groups(
    tables: Sequence[Table], kind: str, progress: Progress, skip_broken: bool
) -> list[Group]:
    groups: list[Group] = []

    def groups_of(table: Table) -> list[Group]:
        groups = format_for(table).groups(table)
        if groups and kind == LINES:
            with suppress(*(BrokenText,) if skip_broken else ()):
                check_text(table)
        for group in groups:
            # The size of a compressed text is known only once it is read.
            if group.bytes > MOST_GROUP_BYTES and not table.file.is_compressed:
                raise table.too_large(group)
        return groups

    pool = ThreadPoolExecutor(READERS)
    try:
        for found in pool.map(groups_of, tables):
            groups += found
            progress.done += 1
    finally:
        pool.shutdown(cancel_futures=True)
    return groups


def _fingerprint(parts: list[str], found: Found, groups: Iterable[Group]) -> str:
    """Without paths and times, which differ between machines."""
    digest = hashlib.sha256(json.dumps(parts).encode())
    for content, file in found:
        digest.update(json.dumps([content, file.name, file.size]).encode())
    for group in groups:
        digest.update(repr(astuple(group)).encode())
    return digest.hexdigest()
