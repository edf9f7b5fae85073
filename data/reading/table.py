"""What is asked of a format of tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from data.columns import Column
from data.errors import BadRow
from data.reading.access import Access
from data.reading.groups import Group, StreamFile


class Row(NamedTuple):
    """A row of a group."""

    place: int
    """Its number in the group, counted from 0; blank lines are no rows."""
    number: int
    """Its number as a person counts: from 1, of JSON lines with the blank ones."""
    values: Mapping[str, Any]
    """By column, as `json`, `csv` and pyarrow have them; of Parquet only the columns asked for."""


OnBroken = Callable[[int, BadRow], None]
"""Called with the number of a row that cannot be read, as a person counts. It may raise."""


class Format(Protocol):
    """A format of tables."""

    def groups(
        self, access: Access, source: str, column: Column, number: int, file: StreamFile
    ) -> list[Group]:
        """The groups of rows of file `number`, none if it has no rows.

        Raises DataError if it lacks the column, where that is known before its rows are read.
        """

    def rows(
        self,
        access: Access,
        source: str,
        column: Column,
        file: StreamFile,
        group: Group,
        on_broken: OnBroken,
    ) -> Iterator[Row]:
        """The rows of a group in their order.

        Raises DataError if the file lacks the column; ValueError, OSError or another of UNREADABLE
        if the rest of the group cannot be decoded.
        """

    def columns(
        self, access: Access, source: str, column: Column, file: StreamFile
    ) -> dict[str, str]:
        """The columns of a file, each with its type in words; of JSON those of the first row."""
