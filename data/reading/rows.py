"""The documents of one group of rows, of any format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from data.columns import Column, TextColumn
from data.errors import BadRow, BrokenText, DataError
from data.reading.access import URL, Access
from data.reading.content import MOST_GROUP_BYTES, UNREADABLE
from data.reading.delimited import Delimited
from data.reading.formats import CSV, LINES, PARQUET, format_of
from data.reading.groups import Group, GroupText, Listing, StreamFile
from data.reading.lines import Lines
from data.reading.parquet import Parquet
from data.reading.places import (
    broken_row,
    group_in_words,
    no_text,
    reason_of,
    row_in_words,
    too_large,
    unreadable,
)
from data.reading.table import Format, OnBroken, Row

FORMATS: Mapping[str, Format] = {LINES: Lines(), CSV: Delimited(), PARQUET: Parquet()}
"""By the format that the end of a file's name says."""


def format_for(file: StreamFile) -> Format:
    """What reads a table."""
    return FORMATS[str(format_of(file.name))]


def read_group(
    listing: Listing, group: Group, access: Access, skip_broken: bool = False
) -> GroupText:
    """The texts of a group; only its bytes are read, and of Parquet only the column of text.

    With `skip_broken` a row that is none is left out, and a group that cannot be decoded: the
    same at every start. A group that cannot be fetched is waited for, or ends the run.

    Raises DataError if the group is broken, has changed or vanished, or is refused.
    """
    file = listing.files[group.file]

    def refuse(number: int, error: BadRow) -> None:
        raise broken_row(listing.name, file, group, number, error) from error

    # What is broken is not the file, perhaps, but what arrived of it: it is fetched once more.
    for is_last in (False, True) if URL.match(file.url) else (True,):
        try:
            return _read(listing, group, access, refuse)
        except BrokenText as error:
            if is_last and not skip_broken:
                remedy = "data.skip_broken=true leaves out what is broken."
                raise BrokenText(f"{error} {remedy}") from error
    return _read_what_is_whole(listing, group, access)


def _read_what_is_whole(listing: Listing, group: Group, access: Access) -> GroupText:
    file = listing.files[group.file]
    bad: list[str] = []

    def note(number: int, error: BadRow) -> None:
        row = row_in_words(file, group, number, counted=False)
        bad.append(f"{row} ({reason_of(error)})")

    try:
        found = _read(listing, group, access, note)
    except BrokenText as error:
        broken = f"{group_in_words(file, group)}: {reason_of(error)}"
        return GroupText([], [], broken=broken)
    others = f" and {len(bad) - 1:,} more after it" if len(bad) > 1 else ""
    return replace(found, broken=f"{bad[0]}{others}" if bad else "")


def _read(listing: Listing, group: Group, access: Access, on_broken: OnBroken) -> GroupText:
    """Read a group. Raises BrokenText if the rest of it cannot be decoded."""
    column, file = TextColumn(listing.column), listing.files[group.file]
    texts: list[str] = []
    rows: list[int] = []
    size = without_text = 0
    for row in rows_of(access, listing.name, column, file, group, on_broken):
        text = document_of(column, row, on_broken)
        if text is None:
            continue
        if text:
            size += len(text)  # at least as many bytes
            if size > MOST_GROUP_BYTES:
                raise too_large(listing.name, file, group)
            texts.append(text)
            rows.append(row.place)
        else:
            without_text += 1
    if without_text and not texts and (group.begin, group.end) == (0, file.size):
        raise no_text(listing.name, column, file)
    return GroupText(texts, rows, without_text)


def rows_of(
    access: Access,
    source: str,
    column: Column,
    file: StreamFile,
    group: Group,
    on_broken: OnBroken,
) -> Iterator[Row]:
    """The rows of a group, as `Format.rows`. Raises BrokenText if the rest cannot be decoded."""
    after = 0
    try:
        for row in format_for(file).rows(access, source, column, file, group, on_broken):
            yield row
            after = row.number
    except DataError:
        raise
    except UNREADABLE as error:
        raise unreadable(source, file, group, after, error) from error


def document_of(column: Column, row: Row, on_broken: OnBroken) -> str | None:
    """The document of a row, empty if it has none; None if it is reported as broken."""
    try:
        return column.document(row.values)
    except BadRow as error:
        on_broken(row.number, error)
        return None
