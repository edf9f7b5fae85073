"""Parquet files: their row groups, from the footers, and the text of one."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from data.columns import no_column
from data.errors import BrokenText, DataError
from data.streaming.access import URL, Access
from data.streaming.file_range import FileRange
from data.streaming.groups import Group, StreamFile
from data.streaming.kept import digest_of, keep, kept

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData

FOOTER_BYTES = 1 << 16
"""What is read of a file's end at first: most footers are smaller."""
MAGIC = b"PAR1"
MOST_GROUP_BYTES = 4 << 30
KEPT_FOOTERS = 64
"""Footers in memory."""
ROWS_AT_ONCE = 1024


def footer_of(access: Access, source: str, file: StreamFile) -> FileMetaData:
    """The footer of a file: from memory, of a remote file from the disk as well.

    Raises BrokenText if the file is not Parquet.
    """
    key = (file.url, file.version)
    with access.lock:
        if key in access.footers:
            access.footers.move_to_end(key)
            return access.footers[key]
    path = access.cache_dir / "streams" / f"{digest_of(*key)}.footer"
    content = kept(path)
    if content is not None:
        footer = _parsed(source, file, content)
    else:
        content = _footer_bytes(access, source, file)
        footer = _parsed(source, file, content)
        if URL.match(file.url):
            keep(path, content)
    with access.lock:
        access.footers[key] = footer
        while len(access.footers) > KEPT_FOOTERS:
            access.footers.popitem(last=False)
    return footer


def _footer_bytes(access: Access, source: str, file: StreamFile) -> bytes:
    begin = max(0, file.size - FOOTER_BYTES)
    tail = access.read(source, file, begin, file.size)
    if len(tail) < 12 or not tail.endswith(MAGIC):
        raise _broken(source, file, "it does not end as a Parquet file")
    size = struct.unpack("<I", tail[-8:-4])[0] + 8
    if size > file.size:
        raise _broken(source, file, "its footer is longer than the file")
    if size > len(tail):
        tail = access.read(source, file, file.size - size, begin) + tail
    return bytes(tail[-size:])


def _parsed(source: str, file: StreamFile, footer: bytes) -> FileMetaData:
    from pyarrow import parquet

    try:
        return parquet.read_metadata(io.BytesIO(MAGIC + footer))
    except (pa.ArrowException, OSError) as error:
        raise _broken(source, file, str(error).splitlines()[0]) from error


def _broken(source: str, file: StreamFile, reason: str) -> BrokenText:
    return BrokenText(
        f"data.source={source}: {file.name} cannot be read as Parquet: {reason}. "
        "Copy it again, or leave it out."
    )


def columns_of(footer: FileMetaData) -> dict[str, Any]:
    """The type of each column."""
    schema = footer.schema.to_arrow_schema()
    return {field.name: field.type for field in schema}


def row_groups(
    source: str, column: str, number: int, file: StreamFile, footer: FileMetaData
) -> Iterator[Group]:
    """The row groups of file `number`. Raises DataError if it lacks the column of text."""
    columns = columns_of(footer)
    if column not in columns:
        raise no_column(f"{source}, {file.name}", column, list(columns))
    if not _is_text(columns[column]):
        raise DataError(
            f"data.text_column={column} of {source} holds {columns[column]}, not text "
            f"({file.name}). Name a column of text."
        )
    place = [footer.schema.column(i).path for i in range(footer.num_columns)].index(column)
    row = 0
    for index in range(footer.num_row_groups):
        group = footer.row_group(index)
        chunk = group.column(place)
        begin = chunk.data_page_offset
        if chunk.has_dictionary_page and chunk.dictionary_page_offset:
            begin = min(begin, chunk.dictionary_page_offset)
        end = begin + chunk.total_compressed_size
        size = chunk.total_uncompressed_size
        if size > MOST_GROUP_BYTES:
            raise DataError(
                f"data.source={source}: row group {index} of {file.name} has {size / 1e9:.1f} GB "
                "of text, and is read at once. Write the file again with smaller row groups."
            )
        if group.num_rows:
            yield Group(number, index, row, group.num_rows, begin, end, size)
        row += group.num_rows


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def read_rows(
    access: Access, source: str, column: str, file: StreamFile, group: Group
) -> Iterator[list[str | None]]:
    """The values of the column in a row group, some rows at a time.

    Raises ValueError or OSError, of pyarrow and of the decoder, if it cannot be decoded.
    """
    from pyarrow import parquet

    footer = footer_of(access, source, file)
    chunk = FileRange(access, source, file)
    chunk.load(group.begin, group.end)
    opened = parquet.ParquetFile(
        chunk, metadata=footer, pre_buffer=False, page_checksum_verification=True
    )
    with opened:
        for batch in opened.iter_batches(
            ROWS_AT_ONCE, row_groups=[group.index], columns=[column], use_threads=False
        ):
            yield batch.column(0).to_pylist()
