"""Lists the groups of rows of a source, and reads the documents of one, whatever their format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from operator import attrgetter

from common.printable import reason_of, redact_urls
from data.columns import TextColumn
from data.errors import BadRow, BrokenText, DataError, cache_error
from data.progress import Progress
from data.reading.access import Access
from data.reading.copies import copy_files
from data.reading.files import find_files, format_of_all
from data.reading.groups import HTTP, TRAIN, DataFile, Group, Listing
from data.reading.table import Table, reader_of

SAMPLE_BYTES = 1 << 16
"""Both ends of a local file, and its size, identify its content."""
READERS = 16
"""How many footers are read at the same time."""
FEW_FILES = 64
"""More remote files than these are not opened before their rows are read."""
MOST_GROUP_BYTES = 4 << 30
"""The most text that is streamed at once; a table that is prepared is read row by row."""

VALUES = attrgetter(*(field.name for field in fields(Group)))


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
    as `hf://datasets/owner/name@revision/data/*.parquet`; an http(s) URL, which is downloaded; or
    what fsspec has a file system for. `revision` is the commit of an earlier start. With
    `skip_broken` a file that cannot be listed is left out with a warning.

    Raises DataError if there are no such files, and TextUnreachable if a network or a server fails
    for longer than a start waits.
    """
    with access.at_start(), Progress(access.say) as progress:
        listing = list_files(source, TextColumn(text_column), access, progress, revision, split)
        with ThreadPoolExecutor(READERS) as pool:
            groups_in = partial(groups_of, skip_broken=skip_broken)
            listed = pool.map(groups_in, tables_of(listing, access))
            groups = tuple(group for found in listed for group in found)
        if not groups:
            raise DataError(f"data.source={listing.name} is empty: it has no rows.")
        return identified(replace(listing, groups=groups), access)


def list_files(
    source: str,
    column: TextColumn,
    access: Access,
    progress: Progress,
    revision: str | None = None,
    split: str = TRAIN,
    copies: bool = False,
) -> Listing:
    """The files of a source, see `list_source`, without groups and fingerprint.

    With `copies` all files are on this machine.
    """
    name = redact_urls(source)
    progress.doing(f"listing {name}")
    try:
        commit, files = find_files(access, source, revision, split)
        kind = format_of_all(name, files)
        if HTTP.match(source) or (copies and any(file.is_remote for file in files)):
            files = copy_files(access, name, files, progress)
    except OSError as error:
        raise cache_error(access.cache_dir, error) from error
    return Listing(name, commit, kind, column, tuple(files), (), "")


def tables_of(listing: Listing, access: Access) -> Iterator[Table]:
    """The files of a listing, to be read."""
    unopened = sum(file.is_remote for file in listing.files) > FEW_FILES
    for number, file in enumerate(listing.files):
        yield Table(access, listing.name, listing.column, file, number, unopened=unopened)


def groups_of(table: Table, skip_broken: bool = False) -> list[Group]:
    """The groups of rows of a file. Raises DataError if it lacks the column, or is damaged.

    With `skip_broken` a damaged one has none, with a warning.
    """
    try:
        with table.decoding():
            return reader_of(table.file).groups(table)
    except BrokenText as error:
        if not skip_broken:
            raise
        table.access.note_left_out(table.source, f"{table.file.name}: {reason_of(error)}")
        return []


def identified(listing: Listing, access: Access) -> Listing:
    """A listing with its fingerprint: without paths and times, which differ between machines."""
    digest = hashlib.sha256(json.dumps([listing.format, listing.column.name]).encode())
    for file in listing.files:
        content = content_of(access, listing.name, file)
        digest.update(json.dumps([content, file.name, file.size]).encode())
    for group in listing.groups:
        digest.update(repr(VALUES(group)).encode())
    return replace(listing, fingerprint=digest.hexdigest())


def content_of(access: Access, source: str, file: DataFile) -> str:
    """What identifies the content of a file on every machine."""
    if file.is_remote:
        return file.version
    begin = end = access.read(source, file, 0, SAMPLE_BYTES)
    if file.size > SAMPLE_BYTES:
        end = access.read(source, file, file.size - SAMPLE_BYTES, file.size)
    return hashlib.sha256(begin + end).hexdigest()


def documents(
    table: Table, group: Group, left_out: list[str] | None = None
) -> Iterator[tuple[int, str]]:
    """The number and the text of each row of a group that has one, with a final newline.

    All texts of tables are read here. Raises BrokenText for a bad row, or adds it to `left_out`, if
    that is given, and if the rest of the group cannot be decoded. Raises DataError if no row of the
    first group of a file has the column; rows of a later one may have no text.
    """
    number, has_column = 0, False
    names: dict[str, None] = {}

    def place() -> str:
        return f"the part after {table.place(group, number)}" if number else table.place(group)

    with table.decoding(place):
        for number, values in reader_of(table.file).rows(table, group):
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
            if not has_column:
                has_column = bool(table.column.among(values))
                names |= dict.fromkeys(values)
            if text:
                yield number, text
    if names and not has_column and group.index == 0:
        raise table.column.missing(table.where, list(names))


def read_group(
    listing: Listing, group: Group, access: Access, skip_broken: bool = False
) -> list[str]:
    """The texts of a group; only its bytes are read, and of Parquet only the column of text.

    Each ends with a newline. With `skip_broken` a bad row is left out with a warning, or a group
    that cannot be decoded. A group that cannot be fetched is waited for, or ends the run.

    Raises DataError if the group is broken, has changed or vanished, or is refused.
    """
    file = listing.files[group.file]
    table = Table(access, listing.name, listing.column, file, group.file)
    if group.bytes > MOST_GROUP_BYTES:
        raise DataError(
            f"data.source={listing.name}: {table.place(group)} has more than "
            f"{MOST_GROUP_BYTES / 1e9:.0f} GB of text, which is read as a whole. Split it into "
            "several files (Parquet: smaller row groups), or set data.streaming=false."
        )
    left_out: list[str] = []
    try:
        texts = [text for _, text in documents(table, group, left_out if skip_broken else None)]
    except BrokenText as error:
        if not skip_broken:
            remedy = "data.skip_broken=true leaves out what is broken."
            raise BrokenText(f"{error} {remedy}") from error
        texts, left_out = [], [f"{table.place(group)}: {reason_of(error)}"]
    if left_out:
        others = f" and {len(left_out) - 1:,} more after it" if len(left_out) > 1 else ""
        access.note_left_out(listing.name, left_out[0] + others)
    return texts
