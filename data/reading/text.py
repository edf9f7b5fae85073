"""Reads text files, plain or compressed. Each is one document."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import replace

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


def columns(table: Table) -> list[str]:
    """The text."""
    return [table.column.name]


def text_parts(tables: Sequence[Table]) -> Iterator[Part]:
    """Files, each a document, decoded as UTF-8 in parts. Byte order marks are removed.

    Every document ends with a newline, but a single file is not changed. Of several, an empty one
    is no document.
    """
    for table in tables:
        last = ""
        for text in _decoded(table):
            if last:
                yield last, False
            last = text
        if len(tables) > 1:
            if not last:
                continue
            last = with_final_newline(last)
        yield last, True


def _decoded(table: Table) -> Iterator[str]:
    """The text, in pieces. Raises BrokenText if it cannot be decoded."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, piece = 0, b"?"
    has_begun = False  # a decompressor may give less than one character at first
    with table.decoding():
        content, _ = replace(table, ahead=PIECE_BYTES).open()
        while piece:
            piece = content.read(PIECE_BYTES)
            undecoded = len(decoder.getstate()[0])
            try:
                text = decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                raise table.broken(
                    f"{table.file.name} is not UTF-8: byte {offset - undecoded + error.start} "
                    "(counted from 0) is not valid. Convert it to UTF-8 first."
                ) from error
            if shown := text if has_begun else text.removeprefix("\ufeff"):
                yield shown
            has_begun |= text != ""
            offset += len(piece)
