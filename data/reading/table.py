"""A table: a file whose rows are read, and what every format needs of it: bytes and errors.

Rows count from 1, as a person counts: of JSON lines the lines, of an array its elements, of CSV the
records after the header, of Parquet the rows of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import IO, Any, Protocol, cast

from fsspec.spec import AbstractBufferedFile

from common.printable import reason_of
from common.shared_files import digest_of, keep, kept
from data.columns import TextColumn
from data.errors import BadRow, BrokenText, DataError
from data.reading.access import Access
from data.reading.formats import (
    BROKEN_COMPRESSION,
    COMPRESSED_INSIDE,
    HEAD_BYTES,
    decompressed,
    format_of,
    other_format,
)
from data.reading.groups import DataFile, Group

AHEAD_BYTES = 32 << 20
"""What is requested at once of a file that is read from its beginning to its end."""
PIECE_BYTES = 1 << 20
PACKED_RATIO = 3
"""About how much larger a compressed text is in memory."""
MOST_ROW_BYTES = 256 << 20
MOST_GROUP_BYTES = 4 << 30
"""The most text that is streamed at once; a table that is prepared is read row by row."""
UNREADABLE = (ValueError, NotImplementedError, *BROKEN_COMPRESSION)
"""Errors of the decoders for a broken file; the first two are bases of those of pyarrow."""
Row = tuple[int, Mapping[str, Any] | BadRow]
"""The number of a row, and its values by column, as `json`, `csv` and pyarrow return them.

A person counts so: from 1 in its group, and for JSON lines blank lines, too.
"""


class Format(Protocol):
    """What the module of a format provides."""

    def groups(self, table: Table) -> list[Group]:
        """The groups of rows of a file, none if it has no rows.

        Raises DataError if it lacks the column, where that is known before its rows are read.
        """

    def rows(self, table: Table, group: Group) -> Iterator[Row]:
        """The rows of a group in their order; a bad one as its error. Parquet has only the columns
        that are read. The group may be `table.whole()`.

        Raises DataError if the file lacks the column; ValueError, OSError or another of UNREADABLE
        if the rest of the group cannot be decoded.
        """

    def columns(self, table: Table) -> list[str]:
        """The names of a file's columns; for JSON those of its first rows."""


def reader_of(name: str) -> Format:
    """The module that reads a format, imported on first use: pyarrow takes a second."""
    return cast("Format", import_module(f"data.reading.{name}"))


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
    ahead: int = AHEAD_BYTES
    """How many bytes `open` requests at once."""
    unopened: bool = False
    """Whether its groups follow from its name and size alone: of many remote files, a request for
    each would take longer than the start, and meet the rate limit of the Hub."""

    @property
    def where(self) -> str:
        """The file and its source, for messages."""
        source, name = self.source, self.file.name
        return source if source.endswith(name) else f"{source}, {name}"

    def read(self, begin: int, end: int) -> bytes | bytearray:
        """Bytes of the file. Raises as `Access.read`."""
        return self.access.read(self.source, self.file, begin, end)

    def open(self) -> tuple[IO[bytes], bytes]:
        """The decompressed content, and its first bytes.

        Raises BrokenText if these are of another format, OSError or EOFError if it is not
        compressed as its name says.
        """
        raw = FileRange(self, self.ahead)
        head = decompressed(self.file.name, raw).read(HEAD_BYTES)
        self.refuse_content(head)
        raw.seek(0)  # opened anew, because not every decompressor can seek back
        return decompressed(self.file.name, raw), head

    def refuse_content(self, head: bytes) -> None:
        """Raise BrokenText if the first bytes of the content are of another format."""
        if what := other_format(head):
            raise self.broken(f"{self.file.name} is not UTF-8 text, but {what}.")

    def kept(self, kind: str, make: Callable[[], bytes]) -> bytes:
        """Return what `make` returns; for a remote file, keep it on the disk for later starts."""
        if not self.file.is_remote:
            return make()
        name = f"{digest_of(self.file.url, self.file.version)}.{kind}"
        path = self.access.cache_dir / "streams" / name
        content = kept(path)
        if content is None:
            content = make()
            keep(path, content)
        return content

    def whole(self) -> list[Group]:
        """The whole file as one group; none if it is empty."""
        return self.parts(self.file.size)

    def parts(self, size: int) -> list[Group]:
        """The groups of rows that begin in each `size` bytes of the file."""
        name = self.file.name
        is_packed = self.file.is_compressed or format_of(name) in COMPRESSED_INSIDE
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
        is_counted = first is not None or not group.begin  # nobody counts the rows before a part
        if row:
            from_there = "" if is_counted else f" from byte {group.begin:,} on"
            return f"row {(first or 0) + row:,} of {name}{from_there}"
        if first is not None and group.rows is not None:
            return f"rows {first + 1:,} to {first + group.rows:,} of {name}"
        if self.is_whole(group):
            return name
        return f"the rows of {name} from byte {group.begin:,} to {group.end:,}"

    def no_text(self) -> BrokenText:
        """The error for a file without a text in any row."""
        return self.broken(
            f"no row of {self.file.name} has a text. Leave the file out, or name another column "
            "with data.text_column."
        )

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
        return BrokenText(f"data.source={self.source}: {sentence}")


class FileRange(AbstractBufferedFile):
    """A file for readers that seek: whenever bytes are needed, `ahead` more are read with them.

    What was read last is in memory. Closing it, as decoders do, changes nothing.
    """

    _unclosable = True

    def __init__(self, table: Table, ahead: int = 0) -> None:
        super().__init__(None, table.file.name, block_size=ahead, size=table.file.size)
        self._table = table

    def holds(self, begin: int, end: int) -> bool:
        """Whether these bytes are in memory. Of others, what is missing would replace the rest."""
        return bool(self.cache.start <= begin and end <= self.cache.end)

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self._table.read(start, end))


def check_length(size: int) -> None:
    """Raise ValueError if a row of this many bytes is too long."""
    if size > MOST_ROW_BYTES:
        raise ValueError(f"its row has more than {MOST_ROW_BYTES / 1e6:,.0f} MB")
