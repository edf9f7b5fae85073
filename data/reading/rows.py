"""Reads the documents of a file of any format: of one group of its rows, or of all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from common.printable import reason_of
from data.columns import TextColumn
from data.errors import BadRow, BrokenText, DataError
from data.reading.access import Access
from data.reading.formats import format_of, reader_of
from data.reading.groups import Group, GroupText, Listing
from data.reading.table import MOST_GROUP_BYTES, UNREADABLE, Format, Table

FIRST_BYTES = 16 << 20
"""One of the rows in the first bytes of a file must have the column."""
FIRST_REQUEST_BYTES = 1 << 18
"""Requested at once for these rows."""
MOST_COLUMNS = 1000
"""How many column names are collected for an error."""


class Document(NamedTuple):
    """A row, and its text."""

    row: int
    """The number of the row in its group, as a person counts."""
    text: str
    """The text with a final newline; empty for a row without text."""
    values: Mapping[str, Any]
    """By column."""


def format_for(table: Table) -> Format:
    """The module that reads a file."""
    return reader_of(str(format_of(table.file.name)))


def groups_of(table: Table) -> list[Group]:
    """The groups of rows of a file. Raises DataError if it lacks the column, or is damaged."""
    try:
        return format_for(table).groups(table)
    except DataError:
        raise
    except UNREADABLE as error:
        raise table.unreadable(None, 0, error) from error


def documents(table: Table, group: Group, left_out: list[str] | None = None) -> Iterator[Document]:
    """The rows of a group, in order. All texts of tables are read here.

    Raises BrokenText for a bad row, or adds it to `left_out`, if that is given. Raises it also if
    the rest of the group cannot be decoded.
    """
    number = 0
    try:
        for number, values in format_for(table).rows(table, group):
            try:
                if isinstance(values, BadRow):
                    raise values
                text = table.column.document(values)
            except BadRow as error:
                if left_out is None:
                    raise table.broken_row(group, number, error) from error
                row = table.row_in_words(group, number, counted=False)
                left_out.append(f"{row} ({reason_of(error)})")
            else:
                yield Document(number, text, values)
    except DataError:
        raise
    except UNREADABLE as error:
        raise table.unreadable(group, number, error) from error


class Seen:
    """Whether any row of a file has the column, and a text in it."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._has_rows = self._has_column = self._has_text = False
        self._names: dict[str, None] = {}

    def add(self, document: Document) -> None:
        """Note a row."""
        self._has_rows = True
        self._has_text |= document.text != ""
        if not self._has_column:
            self._has_column = bool(self._table.column.among(document.values))
            names = islice(document.values, MOST_COLUMNS - len(self._names))
            self._names.update(dict.fromkeys(names))

    def check(self, are_all: bool = True) -> None:
        """Raise DataError if no row had the column or, if these are all rows, a text."""
        if self._names and not self._has_column:
            raise self._table.column.missing(self._table.where, self._names)
        if are_all and self._has_rows and not self._has_text:
            raise self._table.no_text()


def documents_of(table: Table) -> Iterator[tuple[Group, Document]]:
    """All rows of a file. Raises DataError for a bad row, and if no row has a text."""
    seen = Seen(table)
    for group in groups_of(table):
        for document in documents(table, group):
            seen.add(document)
            yield group, document
    seen.check()


def check_first_rows(table: Table) -> None:
    """Raise DataError if no row that a file begins with has the column, or of a small file a text.

    A remote file is read for this only once.
    """
    table.kept("text", lambda: _check_first_rows(table), table.column.key)


def _check_first_rows(table: Table) -> bytes:
    """The check; the empty file that is kept records that it passed."""
    seen, size = Seen(table), 0
    (group,) = table.whole()
    for document in documents(replace(table, ahead=FIRST_REQUEST_BYTES), group):
        if document.text:
            return b""
        seen.add(document)
        size += len(str(document.values))
        if size > FIRST_BYTES:
            break
    seen.check(are_all=size <= FIRST_BYTES)
    return b""


def read_group(
    listing: Listing, group: Group, access: Access, skip_broken: bool = False
) -> GroupText:
    """The texts of a group; only its bytes are read, and of Parquet only the column of text.

    With `skip_broken` a bad row is left out, and a group that cannot be decoded: the same at every
    start. A group that cannot be fetched is waited for, or ends the run.

    Raises DataError if the group is broken, has changed or vanished, or is refused.
    """
    file, column = listing.files[group.file], TextColumn(listing.column)
    table = Table(access, listing.name, column, file, group.file)
    # Perhaps the file is fine and only arrived damaged, so it is fetched once more.
    for is_last in (False, True) if file.is_remote else (True,):
        try:
            return GroupText(_texts(table, group))
        except BrokenText as error:
            if is_last and not skip_broken:
                remedy = "data.skip_broken=true leaves out what is broken."
                if not str(error).endswith("."):  # it ends with a command, which people paste
                    remedy = f"({remedy})"
                raise BrokenText(f"{error} {remedy}") from error
    bad: list[str] = []
    try:
        texts = _texts(table, group, bad)
    except BrokenText as error:
        return GroupText([], broken=f"{table.group_in_words(group)}: {reason_of(error)}")
    others = f" and {len(bad) - 1:,} more after it" if len(bad) > 1 else ""
    return GroupText(texts, broken=f"{bad[0]}{others}" if bad else "")


def _texts(table: Table, group: Group, left_out: list[str] | None = None) -> list[str]:
    seen, texts, size = Seen(table), [], 0
    for document in documents(table, group, left_out):
        seen.add(document)
        if document.text:
            size += len(document.text)  # at least as many bytes
            if size > MOST_GROUP_BYTES:
                raise table.too_large(group)
            texts.append(document.text)
    if table.is_whole(group):
        seen.check()
    return texts
