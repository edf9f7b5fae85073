"""A table: a file whose rows are read, and what every format needs of it: bytes and errors.

Rows count from 1, as a person counts: of JSON lines the lines, of an array its elements, of CSV the
records after the header, of Parquet the rows of the file.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

from fsspec.spec import AbstractBufferedFile

from common.printable import reason_of
from data.columns import TextColumn
from data.errors import BadRow, BrokenText, DataError
from data.reading.access import Access
from data.reading.formats import (
    BROKEN_COMPRESSION,
    HEAD_BYTES,
    PARQUET,
    TEXT,
    decompressed,
    format_of,
    other_content,
)
from data.reading.groups import HTTP, DataFile, Group

AHEAD_BYTES = 32 << 20
"""What is requested at once of a file that is read from its beginning to its end."""
PIECE_BYTES = 1 << 20
PACKED_RATIO = 3
"""About how much larger a compressed text is in memory."""
UNREADABLE = (ValueError, NotImplementedError, RecursionError, csv.Error, *BROKEN_COMPRESSION)
"""Errors of the decoders for a broken file; the first two are bases of those of pyarrow."""
Row = tuple[int, Mapping[str, Any] | BadRow]
"""The number of a row, and its values by column, as `json`, `csv` and pyarrow return them.

A person counts so: from 1 in its group, and for JSON lines blank lines, too.
"""


class Format(Protocol):
    """What the module of a format provides."""

    def groups(self, table: Table) -> list[Group]:
        """The groups of rows of a file, none if it has no rows."""

    def rows(self, table: Table, group: Group) -> Iterator[Row]:
        """The rows of a group in their order; a bad one as its error. Parquet has only the columns
        that are read. The group may be `table.whole()`.

        Raises DataError if the file lacks the column; ValueError, OSError or another of UNREADABLE
        if the rest of the group cannot be decoded.
        """


def reader_of(file: DataFile) -> Format:
    """The module that reads a file, imported on first use: pyarrow takes a second.

    A file with an unknown extension is a text.
    """
    return cast("Format", import_module(f"data.reading.{format_of(file.name) or TEXT}"))


@dataclass(frozen=True)
class Table:
    """A file of a source, and the column that is read. A text file is a table of one row."""

    access: Access
    source: str
    """The name of the source, for messages."""
    column: TextColumn
    file: DataFile
    number: int = 0
    """The index of the file in its listing."""
    unopened: bool = False
    """Whether its groups follow from its name and size alone: of many remote files, a request for
    each would take longer than the start, and meet the rate limit of the Hub."""

    @property
    def where(self) -> str:
        """The file and its source, for messages."""
        source, name = self.source, self.file.name
        return source if source.endswith(name) else f"{source}, {name}"

    def read(self, begin: int, end: int) -> bytes:
        """Bytes of the file. Raises as `Access.read`."""
        return self.access.read(self.source, self.file, begin, end)

    def open(self, ahead: int = AHEAD_BYTES, begin: int = 0) -> io.BufferedReader:
        """The decompressed content; `ahead` bytes are requested at once, the first ones at `begin`.

        Raises BrokenText if it begins as no text does, OSError or EOFError if it is not compressed
        as its name says.
        """
        raw = FileRange(self, ahead)
        raw.seek(begin)
        content: Any = decompressed(self.file.name, raw)
        opened = io.BufferedReader(content, PIECE_BYTES)
        if what := other_content(opened.peek(HEAD_BYTES)[:HEAD_BYTES]):
            raise self.broken(f"{self.file.name} is {what}.")
        return opened

    def whole(self) -> list[Group]:
        """The whole file as one group; none if it is empty."""
        return self.parts(self.file.size)

    def parts(self, size: int) -> list[Group]:
        """The groups of rows that begin in each `size` bytes of the file."""
        is_packed = self.file.is_compressed or format_of(self.file.name) == PARQUET
        ratio = PACKED_RATIO if is_packed else 1
        parts = []
        for index, begin in enumerate(range(0, self.file.size, max(size, 1))):
            end = min(begin + size, self.file.size)
            parts.append(Group(self.number, index, None, None, begin, end, (end - begin) * ratio))
        return parts

    def is_whole(self, group: Group) -> bool:
        """Whether a group is all of the file."""
        return (group.begin, group.end) == (0, self.file.size)

    def place(self, group: Group, row: int = 0) -> str:
        """Row `row` of a group as a person finds it in its file; without one all of its rows."""
        name, first = self.file.name, group.first_row
        if row:
            is_counted = first is not None or not group.begin  # nobody counts those before a part
            from_there = "" if is_counted else f" from byte {group.begin:,} on"
            return f"row {(first or 0) + row:,} of {name}{from_there}"
        is_whole = self.is_whole(group)
        return name if is_whole else f"the part of {name} from byte {group.begin:,} on"

    @contextmanager
    def decoding(self, place: Callable[[], str] | None = None) -> Iterator[None]:
        """Within it, errors of decoders become BrokenText: what `place` says, or the file."""
        try:
            yield
        except DataError:
            raise
        except UNREADABLE as error:
            what = self.file.name if place is None else place()
            raise self.broken(
                f"{what} cannot be read: {reason_of(error)}. It is damaged, incomplete or not what "
                "its name says: copy it again, or leave it out."
            ) from error

    def broken(self, sentence: str) -> BrokenText:
        """The error for the file that is read."""
        if HTTP.match(self.source):
            sentence += f" It was downloaded to {self.file.url}: remove that to download it again."
        return BrokenText(f"data.source={self.source}: {sentence}")


class FileRange(AbstractBufferedFile):
    """A file for readers that seek: whenever bytes are needed, `ahead` more are read with them.

    What was read last is in memory. Closing it, as decoders do, changes nothing.
    """

    _unclosable = True

    def __init__(self, table: Table, ahead: int = 0) -> None:
        super().__init__(None, table.file.name, block_size=ahead, size=table.file.size)
        self._table = table

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self._table.read(start, end)
