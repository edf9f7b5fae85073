"""A table: a file whose rows are read, and what every format needs of it: bytes and errors.

Rows count from 1, as a person counts: of JSON lines the lines, of an array its elements, of CSV the
records after the header, of Parquet the rows of the file.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from fsspec.spec import AbstractBufferedFile

from common.printable import reason_of
from data.columns import TextColumn
from data.errors import BadRow, BrokenText, DataError
from data.reading.access import Access
from data.reading.formats import COMPRESSIONS, PARQUET, TEXT, UNREADABLE, format_of, suffixes
from data.reading.groups import HTTP, DataFile, Group

AHEAD_BYTES = 32 << 20
"""What is requested at once of a file that is read from its beginning to its end."""
PIECE_BYTES = 1 << 20
HEAD_BYTES = 512
LFS_POINTER = b"version https://git-lfs"
"""Begins the small text that a clone without Git LFS has in the place of a file."""
PACKED_RATIO = 3
"""About how much larger a compressed text is in memory."""
Row = tuple[int, Mapping[str, Any] | BadRow]
"""The number of a row in its group, and its values by column, as `json`, `csv` and pyarrow return
them; Parquet has only the columns that are read."""


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
    def reader(self) -> Any:
        """The module of its format, imported on first use: pyarrow takes a second.

        A file with an unknown extension is a text.
        """
        return import_module(f"data.reading.{format_of(self.file.name) or TEXT}")

    @property
    def where(self) -> str:
        """The file and its source, for messages."""
        source, name = self.source, self.file.name
        return source if source.endswith(name) else f"{source}, {name}"

    def documents(
        self, group: Group, left_out: list[str] | None = None
    ) -> Iterator[tuple[int, str]]:
        """The number and the text of each row of a group that has one, with a final newline.

        All texts of tables are read here. Raises BrokenText for a bad row, or adds it to
        `left_out`, if that is given. Raises BrokenText where the group cannot be decoded: rows that
        came before may be wrong, because a checksum follows what it protects. Raises DataError if
        no row of the first group of a file has the column; rows of a later one may have no text.
        """
        number, has_column = 0, False
        names: dict[str, None] = {}

        def place() -> str:
            return f"the part after {self.place(group, number)}" if number else self.place(group)

        with self.decoding(place):
            for number, values in self.reader.rows(self, group):
                text = self._document(values, group, number, left_out)
                if not (has_column or isinstance(values, BadRow)):
                    has_column = bool(self.column.among(values))
                    names |= dict.fromkeys(values)
                if text:
                    yield number, text
        if names and not has_column and group.index == 0:
            raise self.column.missing(self.where, list(names))

    def _document(
        self, values: Mapping[str, Any] | BadRow, group: Group, row: int, left_out: list[str] | None
    ) -> str:
        """The document of a row; empty if there is none, or if it is left out."""
        try:
            if isinstance(values, BadRow):
                raise values
            return self.column.document(values)
        except BadRow as error:
            place, reason = self.place(group, row), reason_of(error)
            if left_out is None:
                sentence = f"{place} cannot be read: {reason}. {error.remedy}."
                raise self.broken(sentence) from error
            left_out.append(f"{place} ({reason})")
            return ""

    def open(self, ahead: int = AHEAD_BYTES, begin: int = 0) -> io.BufferedReader:
        """The decompressed content; `ahead` bytes are requested at once, the first ones at `begin`.

        Raises an error of `UNREADABLE` if it begins as no text does, or is not compressed as its
        name says.
        """
        raw: Any = FileRange(self, ahead)
        raw.seek(begin)
        compression = suffixes(self.file.name)[1]
        content = COMPRESSIONS[compression](raw) if compression else raw
        opened = io.BufferedReader(content, PIECE_BYTES)
        head = opened.peek(HEAD_BYTES)[:HEAD_BYTES]
        if head.startswith(LFS_POINTER):
            raise ValueError("it is a Git LFS pointer")
        # NUL is a character of UTF-8, but no text has many: a tar archive, UTF-16, a torn copy do.
        if head.count(0) * 4 > len(head):
            raise ValueError("it is UTF-16 or binary")
        return opened

    def open_text(self, errors: str = "strict") -> io.TextIOWrapper:
        """The decompressed content as UTF-8, with its line ends but without a byte order mark."""
        return io.TextIOWrapper(self.open(), "utf-8-sig", errors, newline="")

    def whole(self) -> list[Group]:
        """The whole file as one group; none if it is empty."""
        return self.parts(self.file.size)

    def parts(self, size: int) -> list[Group]:
        """The groups of rows that begin in each `size` bytes of the file."""
        is_packed = suffixes(self.file.name)[1] or format_of(self.file.name) == PARQUET
        ratio = PACKED_RATIO if is_packed else 1
        parts = []
        for index, begin in enumerate(range(0, self.file.size, max(size, 1))):
            end = min(begin + size, self.file.size)
            parts.append(Group(self.number, index, None, None, begin, end, (end - begin) * ratio))
        return parts

    def place(self, group: Group, row: int = 0) -> str:
        """Row `row` of a group as a person finds it in its file; without one all of its rows."""
        name = self.file.name
        part = f"{name} from byte {group.begin:,} on" if group.begin else name
        if not row:
            return part
        if group.first_row is None:  # nobody counts the lines before a part
            return f"row {row:,} of {part}"
        return f"row {group.first_row + row:,} of {name}"

    @contextmanager
    def decoding(self, place: Callable[[], str] | None = None) -> Iterator[None]:
        """Within it, errors of decoders become BrokenText: what `place` says, or the file."""
        try:
            yield
        except DataError:
            raise
        except UNREADABLE as error:
            what = self.file.name if place is None else place()
            reason = reason_of(error)
            if isinstance(error, UnicodeDecodeError):
                reason = f"byte 0x{error.object[error.start]:02x} is not UTF-8 ({error.reason})"
            raise self.broken(
                f"{what} cannot be read: {reason}. It is damaged, incomplete, a Git LFS pointer or "
                "not what its name says: copy it again (`git lfs pull`), convert it to UTF-8, "
                "unpack it, or give it a name that says its format, such as .txt.gz."
            ) from error

    def broken(self, sentence: str) -> BrokenText:
        """The error for the file that is read."""
        if HTTP.match(self.source):
            sentence += f" It was downloaded to {self.file.path}: remove that to download it again."
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
        return self._table.access.read(self._table.source, self._table.file, start, end)
