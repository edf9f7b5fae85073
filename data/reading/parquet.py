"""Parquet files: their row groups, from the footers, and the rows of one."""

from __future__ import annotations

import io
import struct
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from data.columns import Column
from data.errors import BrokenText
from data.reading.access import URL, Access
from data.reading.file_range import FileRange
from data.reading.groups import Group, StreamFile
from data.reading.kept import digest_of, keep, kept
from data.reading.nested import Restore, restorer
from data.reading.places import no_text, twice
from data.reading.table import OnBroken, Row

if TYPE_CHECKING:
    from pyarrow.parquet import ColumnChunkMetaData, FileMetaData

FOOTER_BYTES = 1 << 16
"""What is read of a file's end at first: most footers are smaller."""
MAGIC = b"PAR1"
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


class Parquet:
    """Tables of Apache Parquet, of which only the columns that are read are requested."""

    def groups(
        self, access: Access, source: str, column: Column, number: int, file: StreamFile
    ) -> list[Group]:
        """The row groups. Raises DataError if the file lacks the column, or has no texts there."""
        footer = footer_of(access, source, file)
        types = _types_of(footer)
        where = file.of(source)
        wanted = column.find(where, list(types))
        names = footer.schema.to_arrow_schema().names
        for name in wanted:
            if names.count(name) > 1:
                raise twice(source, file, name)
            column.check_type(where, name, str(types[name]), _is_text(types[name]))
        paths = [footer.schema.column(i).path for i in range(footer.num_columns)]
        leaves = [i for i, path in enumerate(paths) if _top(path, types) in wanted]
        groups, row = [], 0
        for index in range(footer.num_row_groups):
            group = footer.row_group(index)
            chunks = [group.column(leaf) for leaf in leaves]
            begin = min(map(_begin, chunks))
            end = max(_begin(chunk) + chunk.total_compressed_size for chunk in chunks)
            size = sum(chunk.total_uncompressed_size for chunk in chunks)
            if group.num_rows:
                groups.append(Group(number, index, row, group.num_rows, begin, end, size))
            row += group.num_rows
        all_chunks = [footer.row_group(g.index).column(leaf) for g in groups for leaf in leaves]
        is_null = all(pa.types.is_null(types[name]) for name in wanted)
        if groups and (is_null or all(map(_is_empty, all_chunks))):
            raise no_text(source, column, file)
        return groups

    def rows(
        self,
        access: Access,
        source: str,
        column: Column,
        file: StreamFile,
        group: Group,
        on_broken: OnBroken,
    ) -> Iterator[Row]:
        """The rows of a row group, with the columns that are read.

        Raises ValueError or OSError, of pyarrow and of the decoder, if it cannot be decoded.
        """
        from pyarrow import parquet

        footer = footer_of(access, source, file)
        types = _types_of(footer)
        wanted = column.find(file.of(source), list(types))
        restores = [restorer(types[name]) for name in wanted]
        chunk = FileRange(access, source, file)
        chunk.load(group.begin, group.end)
        opened = parquet.ParquetFile(
            chunk, metadata=footer, pre_buffer=False, page_checksum_verification=True
        )
        index = 0
        with opened:
            for batch in opened.iter_batches(
                ROWS_AT_ONCE, row_groups=[group.index], columns=wanted, use_threads=False
            ):
                for values in _values([batch.column(name) for name in wanted], restores):
                    yield Row(index, index + 1, dict(zip(wanted, values, strict=True)))
                    index += 1

    def columns(
        self, access: Access, source: str, column: Column, file: StreamFile
    ) -> dict[str, str]:
        """The columns of a file with their Arrow types."""
        types = _types_of(footer_of(access, source, file))
        return {name: str(kind) for name, kind in types.items()}


def _types_of(footer: FileMetaData) -> dict[str, pa.DataType]:
    return {field.name: field.type for field in footer.schema.to_arrow_schema()}


def _top(path: str, columns: Collection[str]) -> str:
    """The column of a leaf: the name of either may have dots."""
    while path not in columns and "." in path:
        path = path.rpartition(".")[0]
    return path


def _begin(chunk: ColumnChunkMetaData) -> int:
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        return int(min(chunk.data_page_offset, chunk.dictionary_page_offset))
    return int(chunk.data_page_offset)


def _is_empty(chunk: ColumnChunkMetaData) -> bool:
    """Whether the footer says that a column has no value in a row group, or only empty texts."""
    found = chunk.statistics
    if found is None:
        return False
    is_null = found.has_null_count and found.null_count == chunk.num_values
    return is_null or (found.has_min_max and found.max_raw == b"")


def _values(columns: list[pa.Array], restores: list[Restore | None]) -> Iterator[tuple[Any, ...]]:
    """The values of each row, restored. Raises ValueError at the row that is not UTF-8."""
    try:
        lists: list[Iterable[Any]] = [column.to_pylist() for column in columns]
    except UnicodeDecodeError:
        lists = [(value.as_py() for value in column) for column in columns]  # up to that row
    restored = (
        values if restore is None else map(restore, values)
        for values, restore in zip(lists, restores, strict=True)
    )
    yield from zip(*restored, strict=True)


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_null(kind)  # a file of which no row has a text
    )
