"""Reads the documents of a file of any format: of one group of its rows, or of all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from data.columns import TextColumn
from data.errors import BadRow, BrokenText, DataError
from data.reading.access import Access
from data.reading.formats import format_of, reader_of
from data.reading.groups import Group, GroupText, Listing
from data.reading.lines import ColumnsSeen
from data.reading.table import MOST_GROUP_BYTES, UNREADABLE, Format, OnBroken, Row, Table, reason_of


class Document(NamedTuple):
    """The text of a row, and where the row is."""

    text: str
    """The text with a final newline; empty for a row without text."""
    group: Group
    row: int
    """The number of the row, as a person counts."""


def format_for(table: Table) -> Format:
    """The module that reads a file."""
    return reader_of(str(format_of(table.file.name)))


def documents_of(table: Table) -> Iterator[Document]:
    """The documents of all rows of a file.

    Raises DataError for a row that is none, and if no row has the column or a text.
    """
    seen = ColumnsSeen(table)
    rows = with_text = 0
    for group in format_for(table).groups(table):

        def refuse(number: int, error: BadRow, group: Group = group) -> None:
            raise table.broken_row(group, number, error) from error

        for row in rows_of(table, group, refuse):
            rows += 1
            seen.add(row.values)
            text = _document(table, row, refuse) or ""
            with_text += text != ""
            yield Document(text, group, row.number)
    seen.check()
    if rows and not with_text:
        raise table.no_text()


def read_group(
    listing: Listing, group: Group, access: Access, skip_broken: bool = False
) -> GroupText:
    """The texts of a group; only its bytes are read, and of Parquet only the column of text.

    With `skip_broken` a row that is none is left out, and a group that cannot be decoded: the
    same at every start. A group that cannot be fetched is waited for, or ends the run.

    Raises DataError if the group is broken, has changed or vanished, or is refused.
    """
    file, column = listing.files[group.file], TextColumn(listing.column)
    table = Table(access, listing.name, column, file, group.file)

    def refuse(number: int, error: BadRow) -> None:
        raise table.broken_row(group, number, error) from error

    # Perhaps the file is fine and only arrived damaged, so it is fetched once more.
    for is_last in (False, True) if file.is_remote else (True,):
        try:
            return _read(table, group, refuse)
        except BrokenText as error:
            if is_last and not skip_broken:
                remedy = "data.skip_broken=true leaves out what is broken."
                if not str(error).endswith("."):  # it ends with a command, which people paste
                    remedy = f"({remedy})"
                raise BrokenText(f"{error} {remedy}") from error
    return _read_what_is_whole(table, group)


def _read_what_is_whole(table: Table, group: Group) -> GroupText:
    bad: list[str] = []

    def note(number: int, error: BadRow) -> None:
        bad.append(f"{table.row_in_words(group, number, counted=False)} ({reason_of(error)})")

    try:
        found = _read(table, group, note)
    except BrokenText as error:
        return GroupText([], broken=f"{table.group_in_words(group)}: {reason_of(error)}")
    others = f" and {len(bad) - 1:,} more after it" if len(bad) > 1 else ""
    return replace(found, broken=f"{bad[0]}{others}" if bad else "")


def _read(table: Table, group: Group, on_broken: OnBroken) -> GroupText:
    """Read a group. Raises BrokenText if the rest of it cannot be decoded."""
    texts: list[str] = []
    size, has_rows = 0, False
    for row in rows_of(table, group, on_broken):
        text = _document(table, row, on_broken)
        if text is None:
            continue
        has_rows = True
        if text:
            size += len(text)  # at least as many bytes
            if size > MOST_GROUP_BYTES:
                raise table.too_large(group)
            texts.append(text)
    if has_rows and not texts and table.is_whole(group):
        raise table.no_text()
    return GroupText(texts)


def rows_of(table: Table, group: Group, on_broken: OnBroken) -> Iterator[Row]:
    """The rows of a group, as `Format.rows`. Raises BrokenText if the rest cannot be decoded."""
    after = 0
    try:
        for row in format_for(table).rows(table, group, on_broken):
            yield row
            after = row.number
    except DataError:
        raise
    except UNREADABLE as error:
        raise table.unreadable(group, after, error) from error


def _document(table: Table, row: Row, on_broken: OnBroken) -> str | None:
    """The document of a row, empty if it has none; None if it is reported as broken."""
    try:
        return table.column.document(row.values)
    except BadRow as error:
        on_broken(row.number, error)
        return None
