"""Reads text files, plain or compressed. Each is one document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from data.chunks import Part, with_final_newline
from data.reading.groups import Group
from data.reading.table import PIECE_BYTES, Row, Table


def groups(table: Table) -> list[Group]:
    """The file."""
    return table.whole()


def rows(table: Table, group: Group) -> Iterator[Row]:
    """One row, whatever the column is called; none of an empty file."""
    if text := table.open_text().read():
        yield 1, {table.column.name: text}


def text_parts(tables: Sequence[Table]) -> Iterator[Part]:
    """Files, each a document, in parts.

    Every document ends with a newline, but a single file is not changed. An empty one is no
    document.
    """
    for table in tables:
        last = ""
        with table.decoding():
            content = table.open_text()
            while text := content.read(PIECE_BYTES):
                if last:
                    yield last, False
                last = text
        if last:
            yield last if len(tables) == 1 else with_final_newline(last), True
