"""Lists the groups of rows of a source, and reads the documents of one, whatever their format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, replace
from operator import attrgetter

from common.printable import reason_of, redact_urls
from data.columns import TextColumn
from data.errors import BadRow, BrokenText, DataError
from data.progress import Progress
from data.reading.access import Access
from data.reading.files import find_files, format_of_all
from data.reading.formats import format_of
from data.reading.groups import TRAIN, DataFile, Group, Listing
from data.reading.table import MOST_GROUP_BYTES, Format, Table, reader_of

SAMPLE_BYTES = 1 << 16
"""Both ends of a local file, and its size, identify its content."""
READERS = 16
"""How many footers and headers are read at the same time."""
FEW_FILES = 64
"""More remote files than these are not opened before their rows are read."""
FIRST_REQUEST_BYTES = 1 << 18
"""Requested at once to look at the columns of a file."""
MOST_COLUMNS = 1000
"""How many column names are collected for an error."""

VALUES = attrgetter(*(field.name for field in fields(Group)))


def format_for(table: Table) -> Format:
    """The module that reads a file; one with an unknown extension is a text."""
    return reader_of(format_of(table.file.name) or "text")


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
    fsspec has a file system for. `revision` is the commit of an earlier start. With `skip_broken` a
    first file that is none is left to whoever reads it.

    Raises DataError if there are no such files or if they cannot be streamed, and TextUnreachable
    if a network or a server fails for longer than a start waits.
    """
    name = redact_urls(source)
    with access.at_start(), Progress(access.say) as progress:
        progress.doing(f"listing {name}")
        commit, files = find_files(access, source, revision, split)
        kind = format_of_all(name, files)
        progress.doing(f"listing {name}", len(files))
        column = TextColumn(text_column)
        unopened = sum(file.is_remote for file in files) > FEW_FILES
        tables = [
            Table(access, name, column, file, number, unopened=unopened)
            for number, file in enumerate(files)
        ]
        with suppress(*(BrokenText,) if skip_broken else ()):
            check_columns(tables[0])
        groups = _groups(tables, progress)
        contents = [content_of(access, name, file) for file in files]
    if not groups:
        raise DataError(f"data.source={name} is empty: it has no rows.")
    digest = _fingerprint([kind, text_column], contents, files, groups)
    return Listing(name, commit, kind, text_column, tuple(files), tuple(groups), digest)


def check_columns(table: Table) -> None:
    """Raise DataError if a file's first rows, header or footer lack the column."""
    table = replace(table, ahead=FIRST_REQUEST_BYTES)
    with table.decoding():
        names = format_for(table).columns(table) if table.file.size else []
    if names:
        table.column.find(table.where, names)


def _groups(tables: Sequence[Table], progress: Progress) -> list[Group]:
    groups: list[Group] = []
    pool = ThreadPoolExecutor(READERS)
    try:
        for of_file in pool.map(groups_of, tables):
            groups += of_file
            progress.done += 1
    finally:
        pool.shutdown(cancel_futures=True)
    return groups


def groups_of(table: Table) -> list[Group]:
    """The groups of rows of a file. Raises DataError if it lacks the column, or is damaged."""
    with table.decoding():
        groups = format_for(table).groups(table)
    for group in groups:
        # The size of a compressed text is known only once it is read.
        if group.bytes > MOST_GROUP_BYTES and not table.file.is_compressed:
            raise _too_large(table, group)
    return groups


def _too_large(table: Table, group: Group) -> BrokenText:
    return table.broken(
        f"the text of {table.place(group)} has more than {MOST_GROUP_BYTES / 1e9:.0f} GB, and is "
        "read as a whole. Split it into several files (Parquet: smaller row groups), or set "
        "data.streaming=false."
    )


def content_of(access: Access, source: str, file: DataFile) -> str:
    """What identifies the content of a file on every machine."""
    if file.is_remote:
        return file.version
    begin = end = access.read(source, file, 0, SAMPLE_BYTES)
    if file.size > SAMPLE_BYTES:
        end = access.read(source, file, file.size - SAMPLE_BYTES, file.size)
    return hashlib.sha256(begin + end).hexdigest()


def _fingerprint(
    parts: list[str], contents: list[str], files: list[DataFile], groups: Iterable[Group]
) -> str:
    """Without paths and times, which differ between machines."""
    digest = hashlib.sha256(json.dumps(parts).encode())
    for content, file in zip(contents, files, strict=True):
        digest.update(json.dumps([content, file.name, file.size]).encode())
    for group in groups:
        digest.update(repr(VALUES(group)).encode())
    return digest.hexdigest()


def documents(
    table: Table, group: Group, left_out: list[str] | None = None
) -> Iterator[tuple[int, str]]:
    """The number and the text of each row of a group that has one, with a final newline.

    All texts of tables are read here. Raises BrokenText for a bad row, or adds it to `left_out`, if
    that is given; if the rest of the group cannot be decoded; and if the group is all of its file
    and no row has the column, or a text.
    """
    number, has_rows, has_column, has_text = 0, False, False, False
    names: dict[str, None] = {}

    def place() -> str:
        return f"the part after {table.place(group, number)}" if number else table.place(group)

    with table.decoding(place):
        for number, values in format_for(table).rows(table, group):
            try:
                if isinstance(values, BadRow):
                    raise values
                text = table.column.document(values)
            except BadRow as error:
                row = table.place(group, number)
                if left_out is None:
                    reason = f"{reason_of(error)}. {error.remedy}"
                    raise table.broken(f"{row} cannot be read: {reason}.") from error
                left_out.append(f"{row} ({reason_of(error)})")
                continue
            has_rows = True
            if not has_column:
                has_column = bool(table.column.among(values))
                names |= dict.fromkeys(values) if len(names) < MOST_COLUMNS else {}
            if text:
                has_text = True
                yield number, text
    if table.is_whole(group) and has_rows and not has_text:
        raise table.no_text() if has_column else table.column.missing(table.where, names)


def read_group(
    listing: Listing, group: Group, access: Access, skip_broken: bool = False
) -> list[str]:
    """The texts of a group; only its bytes are read, and of Parquet only the column of text.

    Each ends with a newline. With `skip_broken` a bad row is left out with a warning, or a group
    that cannot be decoded. A group that cannot be fetched is waited for, or ends the run.

    Raises DataError if the group is broken, has changed or vanished, or is refused.
    """
    file, column = listing.files[group.file], TextColumn(listing.column)
    table = Table(access, listing.name, column, file, group.file)
    # Perhaps the file is fine and only arrived damaged, so it is fetched once more.
    for is_last in (False, True) if file.is_remote else (True,):
        try:
            return _texts(table, group)
        except BrokenText as error:
            if is_last and not skip_broken:
                remedy = "data.skip_broken=true leaves out what is broken."
                raise BrokenText(f"{error} {remedy}") from error
    texts: list[str] = []
    bad: list[str] = []
    try:
        texts = _texts(table, group, bad)
    except BrokenText as error:
        bad = [f"{table.place(group)}: {reason_of(error)}"]
    if bad:
        others = f" and {len(bad) - 1:,} more after it" if len(bad) > 1 else ""
        access.note_left_out(listing.name, bad[0] + others)
    return texts


def _texts(table: Table, group: Group, left_out: list[str] | None = None) -> list[str]:
    texts, size = [], 0
    for _, text in documents(table, group, left_out):
        size += len(text)  # at least as many bytes
        if size > MOST_GROUP_BYTES:
            raise _too_large(table, group)
        texts.append(text)
    return texts
