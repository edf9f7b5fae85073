"""Tables that are read from the first row to the last: how a text is prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

from data.columns import Column
from data.errors import BadRow, BrokenText
from data.pieces import Piece, pieces_of
from data.reading.access import Access, local_version
from data.reading.groups import Group, LeftOut, StreamFile
from data.reading.lines import MOST_COLUMNS, without_column
from data.reading.local import NamedFile
from data.reading.places import broken_row, no_text, row_in_words
from data.reading.rows import document_of, format_for, rows_of


class WholeTables:
    """Tables of this machine."""

    def __init__(
        self, source: str, files: Iterable[NamedFile], column: Column, cache_dir: Path
    ) -> None:
        self._source, self._column = source, column
        self._files, self._cache_dir = list(files), cache_dir

    def pieces(self, say: Callable[[str], None]) -> Iterator[Piece]:
        """Their documents. `say` prints how many rows have no text, if some have none.

        Raises DataError if they cannot be read, lack the column or have no rows, or if a file has
        no text.
        """
        return pieces_of(document for document, *_ in self._documents(say))

    def place(self, number: int) -> str:
        """The row of document `number`, counted from 1: the tables are read again up to it."""
        documents = self._documents(lambda line: None)
        found = next(islice(documents, number - 1, None), None)
        if found is None:  # the tables have changed meanwhile
            return f"conversation {number:,}"
        _, file, group, row = found
        return row_in_words(file, group, row)

    def _documents(
        self, say: Callable[[str], None]
    ) -> Iterator[tuple[str, StreamFile, Group, int]]:
        """Every document, with the file, the group and the row that it is from."""
        name = self._source
        read = LeftOut()
        with closing(Access(self._cache_dir)) as access:
            for number, (named, path) in enumerate(self._files):
                file = StreamFile(str(path), named, *local_version(name, path))
                table = _Table(access, name, self._column, number, file)
                yield from table
                read += LeftOut(table.rows, table.rows - table.count)
        if read.without_text:
            say(f"warning: data.source={name}: {read.in_words}")
        if not read.rows:
            raise BrokenText(f"data.source={name} is empty: it has no rows.")


class _Table:
    """The documents of one table."""

    def __init__(
        self, access: Access, source: str, column: Column, number: int, file: StreamFile
    ) -> None:
        self._access, self._source, self._column = access, source, column
        self._number, self._file = number, file
        self.rows = self.count = 0

    def __iter__(self) -> Iterator[tuple[str, StreamFile, Group, int]]:
        """Raises DataError for a row that is none, and if no row has the column."""
        given = self._access, self._source, self._column
        column, file = self._column, self._file
        seen: dict[str, None] = {}
        has_column = False
        for group in format_for(file).groups(*given, self._number, file):

            def refuse(number: int, error: BadRow, group: Group = group) -> None:
                raise broken_row(self._source, file, group, number, error) from error

            for row in rows_of(*given, file, group, refuse):
                self.rows += 1
                if not has_column:
                    has_column = bool(column.among(row.values))
                    seen.update(dict.fromkeys(islice(row.values, MOST_COLUMNS - len(seen))))
                if document := document_of(column, row, refuse):
                    self.count += 1
                    yield document, file, group, row.number
        if seen and not has_column:
            raise without_column(self._access, self._source, column, file, seen)
        if self.rows and not self.count:
            raise no_text(self._source, column, file)
