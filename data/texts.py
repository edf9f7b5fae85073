"""Text files, plain or compressed, and texts in memory, as pieces of text."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

from data.errors import BrokenText
from data.formats import BROKEN_COMPRESSION, iconv, open_bytes, refuse_other_content
from data.pieces import Piece, ended

PIECE_BYTES = 1 << 20


def text_pieces(files: list[Path]) -> Iterator[Piece]:
    """Whole files as documents, read as UTF-8 in pieces; a byte order mark is not text."""
    for file in files:
        last = ""
        for text in _decoded(str(file)):
            if last:
                yield {"text": last, "ends": []}
            last = text
        if len(files) > 1:
            last = ended(last)
        yield {"text": last, "ends": [len(last)]}


def document_pieces(documents: tuple[str, ...]) -> Iterator[Piece]:
    """Texts in memory, each a document."""
    for document in documents:
        text = ended(document)
        yield {"text": text, "ends": [len(text)]}


def _decoded(file: str) -> Iterator[str]:
    refuse_other_content(file)
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0  # bytes given to the decoder before this piece
    try:
        with open_bytes(file) as opened:
            while piece := opened.read(PIECE_BYTES):
                held = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(piece)
                except UnicodeDecodeError as error:
                    raise _not_utf8(file, read - held + error.start) from error
                yield text.removeprefix("\ufeff") if read == 0 else text
                read += len(piece)
            held = len(decoder.getstate()[0])
            if held:
                raise _not_utf8(file, read - held)
    except BROKEN_COMPRESSION as error:
        raise BrokenText(f"data.source: {file} cannot be read to its end: {error}.") from error


def _not_utf8(file: str, offset: int) -> BrokenText:
    return BrokenText(
        f"data.source: {file} is not UTF-8: byte {offset} (counted from 0) begins no character. "
        f"Convert it first, for example, if it is Latin-1: {iconv('LATIN1', file)}"
    )
