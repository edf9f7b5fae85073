"""Reads text files, plain or compressed. Each is one document."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence

from data.chunks import Part, with_final_newline
from data.reading.groups import Group
from data.reading.table import PIECE_BYTES, Row, Table


def groups(table: Table) -> list[Group]:
    """The file."""
    return table.whole()


def rows(table: Table, group: Group) -> Iterator[Row]:
    """One row, whatever the column is called; none of an empty file."""
    if text := "".join(_decoded(table)):
        yield 1, {table.column.name: text}


def text_parts(tables: Sequence[Table]) -> Iterator[Part]:
    """Files, each a document, decoded as UTF-8 in parts. Byte order marks are removed.

    Every document ends with a newline, but a single file is not changed. An empty one is no
    document.
    """
    for table in tables:
        last = ""
        for text in _decoded(table):
            if last:
                yield last, False
            last = text
        if last:
            yield last if len(tables) == 1 else with_final_newline(last), True


def _decoded(table: Table) -> Iterator[str]:
    """The text, in pieces. Raises BrokenText if it cannot be decoded."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with table.decoding():
        content = table.open()
        try:
            while piece := content.read(PIECE_BYTES):
                if text := decoder.decode(piece):
                    yield text
            decoder.decode(b"", final=True)  # raises for a part of a character
        except UnicodeDecodeError as error:
            wrong = error.object[error.start]
            raise table.broken(
                f"{table.file.name} is not UTF-8: byte 0x{wrong:02x} ({error.reason}). Convert it "
                "to UTF-8, unpack it, or give it a name that says its format, such as .txt.gz."
            ) from error
