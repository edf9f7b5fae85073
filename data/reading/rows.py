"""The texts of a source, whatever its format: all rows in order, or those of one group."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import attrgetter
from pathlib import Path

from common.printable import reason_of, redact_urls
from data.chunks import Part
from data.columns import TextColumn
from data.errors import BrokenText, DataError, cache_error
from data.progress import Progress
from data.reading.access import Access
from data.reading.copies import copy_files
from data.reading.files import find_files
from data.reading.formats import COMPRESSIONS, FORMATS, TEXT, format_of
from data.reading.groups import HTTP, TRAIN, Group, Listing
from data.reading.table import Table
from data.reading.text import text_parts

SAMPLE_BYTES = 1 << 16
"""Both ends of a local file, and its size, identify its content."""
READERS = 16
"""How many footers are read at the same time."""
FEW_FILES = 64
"""More remote files than these are not opened before their rows are read."""
MOST_GROUP_BYTES = 4 << 30
"""The most text that is streamed at once; a table that is prepared is read row by row."""

VALUES = attrgetter(*(field.name for field in fields(Group)))


@dataclass(frozen=True)
class Source:
    """A text that is prepared: it can be read any number of times, from files on this machine.

    Parts have a few MB at most if the format permits, so that a text of any size is read in bounded
    memory. Every document ends with a newline: one is added if it is missing. Only a text of one
    single text file is not changed at all.
    """

    listing: Listing
    access: Access

    @property
    def name(self) -> str:
        """The name, without the secrets of a URL."""
        return self.listing.name

    @property
    def key(self) -> str:
        """The cache key of the prepared text; it changes whenever the text may have changed."""
        versions = [file.version for file in self.listing.files]
        facts = json.dumps([self.listing.fingerprint, repr(self.listing.column), versions])
        return hashlib.sha256(facts.encode()).hexdigest()

    def read(self) -> Iterator[Part]:
        """Its documents. Raises DataError if there are none, or if one cannot be read."""
        if self.listing.format == TEXT and self.listing.column.of_texts:
            return text_parts(list(tables_of(self.listing, self.access)))
        return ((text, True) for _, text in self.rows())

    def rows(self) -> Iterator[tuple[str, str]]:
        """Every row with a text: its place for messages, and the text. Raises DataError."""
        is_empty = True
        for table in tables_of(self.listing, self.access):
            # Without a byte there is no group: Parquet is damaged then, others have no row.
            for group in table.whole() or _groups_of(table):
                for row, text in table.documents(group):
                    is_empty = False
                    yield table.place(group, row), text
        if is_empty:
            raise BrokenText(f"data.source={self.name} is empty: no row has a text.")


def open_source(
    source: str, column: TextColumn, cache_dir: Path, progress: Progress | None = None
) -> Source:
    """The text that `data.source` names, see `list_source`, to be prepared.

    Files that are not on this machine are copied to `cache_dir` once. Raises DataError if there is
    no such text.
    """
    progress = progress or Progress()
    with closing(Access(cache_dir, progress.say)) as access, access.at_start():
        listing = _identified(_list_files(source, column, access, progress, copies=True), access)
    return Source(listing, Access(cache_dir))  # the other one is closed: all files are here


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
        listing = _list_files(source, TextColumn(text_column), access, progress, revision, split)
        with ThreadPoolExecutor(READERS) as pool:
            groups_in = partial(_groups_of, skip_broken=skip_broken)
            listed = pool.map(groups_in, tables_of(listing, access))
            groups = tuple(group for found in listed for group in found)
        if not groups:
            raise DataError(f"data.source={listing.name} is empty: it has no rows.")
        return _identified(replace(listing, groups=groups), access)


def _list_files(
    source: str,
    column: TextColumn,
    access: Access,
    progress: Progress,
    revision: str | None = None,
    split: str = TRAIN,
    copies: bool = False,
) -> Listing:
    """The files of a source, without groups and fingerprint; with `copies` all on this machine."""
    name = redact_urls(source)
    progress.doing(f"listing {name}")
    try:
        commit, files = find_files(access, source, revision, split)
        kinds = {format_of(file.name) or TEXT for file in files}
        if len(kinds) != 1:
            tables = [end for end, kind in FORMATS.items() if kind != TEXT]
            raise DataError(
                f"data.source={name} {'mixes formats' if files else 'names no file'}. Name files "
                f"of one format; of a folder the tables are read "
                f"({', '.join([*tables, *COMPRESSIONS])}), and texts are named by a pattern such "
                "as *.txt."
            )
        if HTTP.match(source) or (copies and any(file.is_remote for file in files)):
            files = copy_files(access, name, files, progress)
    except OSError as error:
        raise cache_error(access.cache_dir, error) from error
    return Listing(name, commit, kinds.pop(), column, tuple(files), (), "")


def tables_of(listing: Listing, access: Access) -> Iterator[Table]:
    """The files of a listing, to be read."""
    unopened = sum(file.is_remote for file in listing.files) > FEW_FILES
    for number, file in enumerate(listing.files):
        yield Table(access, listing.name, listing.column, file, number, unopened)


def _groups_of(table: Table, skip_broken: bool = False) -> list[Group]:
    """The groups of rows of a file. Raises DataError if it lacks the column, or is damaged.

    With `skip_broken` a damaged one has none, with a warning.
    """
    try:
        with table.decoding():
            groups: list[Group] = table.reader.groups(table)
            return groups
    except BrokenText as error:
        if not skip_broken:
            raise
        table.access.note_left_out(table.source, f"{table.file.name}: {reason_of(error)}")
        return []


def _identified(listing: Listing, access: Access) -> Listing:
    """A listing with its fingerprint: without paths and times, which differ between machines."""
    digest = hashlib.sha256(json.dumps([listing.format, listing.column.name]).encode())
    for file in listing.files:
        content = file.version
        if not file.is_remote:
            begin = end = access.read(listing.name, file, 0, SAMPLE_BYTES)
            if file.size > SAMPLE_BYTES:
                end = access.read(listing.name, file, file.size - SAMPLE_BYTES, file.size)
            content = hashlib.sha256(begin + end).hexdigest()
        digest.update(json.dumps([content, file.name, file.size]).encode())
    for group in listing.groups:
        digest.update(repr(VALUES(group)).encode())
    return replace(listing, fingerprint=digest.hexdigest())


def read_group(
    listing: Listing, group: Group, access: Access, skip_broken: bool = False
) -> list[str]:
    """The texts of a group; only its bytes are read, and of Parquet only the column of text.

    Each ends with a newline. With `skip_broken` a bad row is left out with a warning, or the whole
    of a group that cannot be decoded. One that cannot be fetched is waited for, or ends the run.

    Raises DataError if the group is broken, has changed or vanished, or is refused.
    """
    table = Table(access, listing.name, listing.column, listing.files[group.file], group.file)
    if group.bytes > MOST_GROUP_BYTES:
        raise DataError(
            f"data.source={listing.name}: {table.place(group)} has more than "
            f"{MOST_GROUP_BYTES / 1e9:.0f} GB of text, which is read as a whole. Split it into "
            "several files (Parquet: smaller row groups), or set data.streaming=false."
        )
    left_out: list[str] = []
    try:
        texts = [text for _, text in table.documents(group, left_out if skip_broken else None)]
    except BrokenText as error:
        if not skip_broken:
            remedy = "data.skip_broken=true leaves out what is broken."
            raise BrokenText(f"{error} {remedy}") from error
        texts, left_out = [], [f"{table.place(group)}: {reason_of(error.__cause__ or error)}"]
    if left_out:
        others = f" and {len(left_out) - 1:,} more after it" if len(left_out) > 1 else ""
        access.note_left_out(listing.name, left_out[0] + others)
    return texts
