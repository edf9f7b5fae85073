"""The content of a file from its beginning to its end, decompressed."""

from __future__ import annotations

from typing import IO

from data.reading.access import URL, Access
from data.reading.file_range import FileRange
from data.reading.formats import (
    BROKEN_COMPRESSION,
    CSV,
    HEAD_BYTES,
    format_of,
    open_bytes,
    refuse_content,
    refuse_uncompressed,
    suffixes,
)
from data.reading.groups import Group, StreamFile

AHEAD_BYTES = 32 << 20
"""What is requested at once."""
PACKED_RATIO = 3
"""How much larger a compressed text is in memory, about."""
MOST_ROW_BYTES = 256 << 20
MOST_GROUP_BYTES = 4 << 30
"""Of text, in what is streamed at once; a table that is prepared is read row by row."""
UNREADABLE = (ValueError, *BROKEN_COMPRESSION)
"""Raised by what decodes a broken file, pyarrow among it, whose errors are ValueErrors."""


def whole_file(number: int, file: StreamFile) -> list[Group]:
    """The one group of a file that is read from its beginning to its end."""
    if not file.size:
        return []
    text_bytes = file.size * (PACKED_RATIO if is_compressed(file) else 1)
    return [Group(number, 0, None, None, 0, file.size, text_bytes)]


def is_one_group(file: StreamFile) -> bool:
    """Whether its name says that it is streamed at once, however large it is."""
    return is_compressed(file) or format_of(file.name) == CSV


def is_compressed(file: StreamFile) -> bool:
    """Whether its name says so."""
    return suffixes(file.name)[1] != ""


def open_content(
    access: Access, source: str, file: StreamFile, ahead: int | None = None
) -> tuple[IO[bytes], bytes]:
    """The content of a file, and its first bytes; so many bytes `ahead` are requested at once.

    Raises BrokenText if these are of another format, OSError or EOFError if it is not compressed
    as its name says.
    """
    raw = FileRange(access, source, file, ahead=ahead or AHEAD_BYTES)
    where = file.name if URL.match(file.url) else file.url
    refuse_uncompressed(where, raw.read(HEAD_BYTES), source)
    head = open_bytes(file.name, raw.reopened()).read(HEAD_BYTES)
    refuse_content(where, head)
    return open_bytes(file.name, raw.reopened()), head  # not every decompressor can seek


def check_length(size: int) -> None:
    """Raise ValueError for a row of so many bytes, if they are too many."""
    if size > MOST_ROW_BYTES:
        raise ValueError(f"its row has more than {MOST_ROW_BYTES / 1e6:,.0f} MB")
