"""Parquet files: their row groups, from the footers, and the rows of one.

Only the columns that are read are requested.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from common.printable import reason_of
from data.errors import BrokenText
from data.reading.groups import Group
from data.reading.table import FileRange, Row, Table

if TYPE_CHECKING:
    from pyarrow.parquet import ColumnChunkMetaData, FileMetaData

TITLE = "Parquet"
FOOTER_BYTES = 1 << 16
"""Bytes read from the end of a file at first; most footers are smaller."""
MAGIC = b"PAR1"
KEPT_FOOTERS = 64
"""How many footers are kept in memory."""
ROWS_AT_ONCE = 1024
JSON = "arrow.json"
"""The Arrow type in which `datasets` stores values of mixed types."""
Restore = Callable[[Any], Any]


def groups(table: Table) -> list[Group]:
    """The row groups. Raises DataError if the file lacks the column, or has no texts there."""
    footer = _footer_of(table)
    types = _types_of(footer)
    wanted = table.column.find(table.where, list(types))
    names = footer.schema.to_arrow_schema().names
    for name in wanted:
        if names.count(name) > 1:
            raise table.twice(name)
        table.column.check_type(table.where, name, str(types[name]), _is_text(types[name]))
    paths = [footer.schema.column(i).path for i in range(footer.num_columns)]
    leaves = [i for i, path in enumerate(paths) if _top(path, types) in wanted]
    found, row, are_empty = [], 0, []
    for index in range(footer.num_row_groups):
        group = footer.row_group(index)
        chunks = [group.column(leaf) for leaf in leaves]
        begin = min(map(_begin, chunks))
        end = max(_begin(chunk) + chunk.total_compressed_size for chunk in chunks)
        size = sum(chunk.total_uncompressed_size for chunk in chunks)
        if group.num_rows:
            found.append(Group(table.number, index, row, group.num_rows, begin, end, size))
            are_empty.append(all(map(_is_empty, chunks)))
        row += group.num_rows
    is_null = all(pa.types.is_null(types[name]) for name in wanted)
    if found and (is_null or all(are_empty)):
        raise table.no_text()
    return found


def rows(table: Table, group: Group) -> Iterator[Row]:
    """The rows of a row group, with the columns that are read.

    Raises ValueError or OSError, of pyarrow and of the decoder, if it cannot be decoded.
    """
    from pyarrow import parquet

    footer = _footer_of(table)
    types = _types_of(footer)
    wanted = table.column.find(table.where, list(types))
    restores = [restorer(types[name]) for name in wanted]
    chunk = FileRange(table)
    chunk.load(group.begin, group.end)
    opened = parquet.ParquetFile(
        chunk, metadata=footer, pre_buffer=False, page_checksum_verification=True
    )
    number = 0
    with opened:
        for batch in opened.iter_batches(
            ROWS_AT_ONCE, row_groups=[group.index], columns=wanted, use_threads=False
        ):
            for values in _values([batch.column(name) for name in wanted], restores):
                number += 1
                yield number, dict(zip(wanted, values, strict=True))


def columns(table: Table) -> dict[str, str]:
    """The columns of a file with their Arrow types."""
    return {name: str(kind) for name, kind in _types_of(_footer_of(table)).items()}


def _footer_of(table: Table) -> FileMetaData:
    """The footer of a file, which is kept in memory. Raises BrokenText if it is not Parquet."""
    access, key = table.access, (table.file.url, table.file.version)
    with access.lock:
        if key in access.footers:
            access.footers.move_to_end(key)
            return access.footers[key]
    footer = _parsed(table, table.kept("footer", lambda: _footer_bytes(table)))
    with access.lock:
        access.footers[key] = footer
        while len(access.footers) > KEPT_FOOTERS:
            access.footers.popitem(last=False)
    return footer


def _footer_bytes(table: Table) -> bytes:
    size = table.file.size
    begin = max(0, size - FOOTER_BYTES)
    tail = table.read(begin, size)
    if len(tail) < 12 or not tail.endswith(MAGIC):
        raise _broken(table, "it does not end as a Parquet file")
    length = struct.unpack("<I", tail[-8:-4])[0] + 8
    if length > size:
        raise _broken(table, "its footer is longer than the file")
    if length > len(tail):
        tail = table.read(size - length, begin) + tail
    footer = bytes(tail[-length:])
    _parsed(table, footer)  # a damaged one is not kept
    return footer


def _parsed(table: Table, footer: bytes) -> FileMetaData:
    from pyarrow import parquet

    try:
        return parquet.read_metadata(io.BytesIO(MAGIC + footer))
    except (pa.ArrowException, OSError) as error:
        raise _broken(table, reason_of(error)) from error


def _broken(table: Table, reason: str) -> BrokenText:
    return table.broken(
        f"{table.file.name} cannot be read as Parquet: {reason}. Copy it again, or leave it out."
    )


def _types_of(footer: FileMetaData) -> dict[str, pa.DataType]:
    return {field.name: field.type for field in footer.schema.to_arrow_schema()}


def _top(path: str, columns: Collection[str]) -> str:
    """The column of a leaf. Both names may contain dots."""
    while path not in columns and "." in path:
        path = path.rpartition(".")[0]
    return path


def _begin(chunk: ColumnChunkMetaData) -> int:
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        return int(min(chunk.data_page_offset, chunk.dictionary_page_offset))
    return int(chunk.data_page_offset)


def _is_empty(chunk: ColumnChunkMetaData) -> bool:
    """Whether, by the footer, a column of a row group has only nulls or empty texts."""
    found = chunk.statistics
    if found is None:
        return False
    is_null = found.has_null_count and found.null_count == chunk.num_values
    return is_null or (found.has_min_max and found.max_raw == b"")


def _values(columns: list[pa.Array], restores: list[Restore | None]) -> Iterator[tuple[Any, ...]]:
    """The values of each row, restored. Raises ValueError at a row that is not UTF-8."""
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


def restorer(kind: pa.DataType) -> Restore | None:
    """What restores nested values as they were before all rows of a column got one type.

    Where the calls of two tools have other arguments, each has those of the other as null: null
    fields of structs are dropped, and JSON is decoded. None for a type whose values are right as
    they are.
    """
    if getattr(kind, "extension_name", None) == JSON:
        return _unless_null(json.loads)
    if pa.types.is_struct(kind):
        fields = {field.name: restorer(field.type) for field in kind}
        return _unless_null(lambda value: _present(value, fields))
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if is_list and (entries := restorer(kind.value_type)) is not None:
        return _unless_null(lambda value: [entries(entry) for entry in value])
    return None


def _present(value: dict[str, Any], fields: dict[str, Restore | None]) -> dict[str, Any]:
    found = {name: entry for name, entry in value.items() if entry is not None}
    restores = ((name, fields[name]) for name in found)
    return found | {name: restore(found[name]) for name, restore in restores if restore is not None}


def _unless_null(restore: Restore) -> Restore:
    return lambda value: None if value is None else restore(value)
