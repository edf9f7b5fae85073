"""Pieces of text files, plain or compressed."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from data.errors import BrokenText
from data.pieces import Piece, with_final_newline
from data.reading.formats import BROKEN_COMPRESSION, LATIN, iconv, open_bytes, refuse_other_content

PIECE_BYTES = 1 << 20


def text_pieces(files: list[Path], say: Callable[[str], None]) -> Iterator[Piece]:
    """Files, each a document, decoded as UTF-8 in pieces. Byte order marks are removed.

    `say` prints a line about a file that seems to be a table.
    """
    for file in files:
        last = ""
        for number, text in enumerate(_decoded(str(file))):
            if number == 0 and _begins_with_row(text):
                say(
                    f"warning: data.source: {file} is read as plain text, although its first line "
                    "is a JSON object. To read its rows, rename it to end in .jsonl."
                )
            if last:
                yield {"text": last, "ends": []}
            last = text
        if len(files) > 1:
            last = with_final_newline(last)
        yield {"text": last, "ends": [len(last)]}


def _decoded(file: str) -> Iterator[str]:
    refuse_other_content(file)
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0  # of this piece, in bytes
    has_begun = False  # a decompressor may give less than one character at first
    try:
        with open_bytes(file, file) as opened:
            while piece := opened.read(PIECE_BYTES):
                undecoded = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(piece)
                except UnicodeDecodeError as error:
                    raise _not_utf8(file, offset - undecoded + error.start) from error
                yield text if has_begun else text.removeprefix("\ufeff")
                has_begun |= text != ""
                offset += len(piece)
            undecoded = len(decoder.getstate()[0])
            if undecoded:
                raise _not_utf8(file, offset - undecoded)
    except BROKEN_COMPRESSION as error:
        raise BrokenText(
            f"data.source: {file} cannot be read to its end: {error}. It is damaged or "
            "incomplete: copy it again."
        ) from error


def _begins_with_row(text: str) -> bool:
    with suppress(ValueError, RecursionError):
        return text.startswith("{") and isinstance(json.loads(text.partition("\n")[0]), dict)
    return False


def _not_utf8(file: str, offset: int) -> BrokenText:
    return BrokenText(
        f"data.source: {file} is not UTF-8: byte {offset} (counted from 0) is not valid. "
        f"Convert it first, for example, {LATIN}: {iconv('CP1252', file)}"
    )
