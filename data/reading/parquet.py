"""Parquet files: their row groups, from the footers, and the rows of one.

Only the columns that are read are requested.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from common.printable import reason_of
from data.errors import DataError
from data.reading.groups import Group
from data.reading.table import FileRange, Row, Table

if TYPE_CHECKING:
    from pyarrow.parquet import ColumnChunkMetaData, FileMetaData

PART_BYTES = 32 << 20
"""Of an unopened file, a group has the row groups that begin in so many bytes."""
AHEAD_BYTES = 1 << 20
"""Of a part of a file that much is read at once: several small row groups."""
FOOTERS_IN_MEMORY = 64
ROWS_AT_ONCE = 1024
JSON = "arrow.json"
"""The Arrow type in which `datasets` stores values of mixed types."""
Restore = Callable[[Any], Any]


def groups(table: Table) -> list[Group]:
    """The row groups. Raises DataError if the file lacks the column, or has no texts there."""
    if table.unopened:
        return table.parts(PART_BYTES)
    footer = _footer_of(table)
    types, leaves = _wanted(table)
    first_row, of_file, are_empty = 0, [], []
    for index in range(footer.num_row_groups):
        chunks, count = _chunks(footer, index, leaves), footer.row_group(index).num_rows
        if count:
            size = sum(chunk.total_uncompressed_size for chunk in chunks)
            of_file.append(Group(table.number, index, first_row, count, *_extent(chunks), size))
            are_empty.append(all(map(_is_empty, chunks)))
        first_row += count
    if of_file and (all(map(pa.types.is_null, types.values())) or all(are_empty)):
        raise table.no_text()
    return of_file


def rows(table: Table, group: Group) -> Iterator[Row]:
    """The rows of a row group, or of those that begin in a part of the file.

    Raises ValueError or OSError, of pyarrow and of the decoder, if one cannot be decoded.
    """
    from pyarrow import parquet

    footer = _footer_of(table)
    types, leaves = _wanted(table)
    restores = {name: restorer(kind) for name, kind in types.items()}
    content, number = FileRange(table), 0
    for index in range(footer.num_row_groups) if group.rows is None else [group.index]:
        begin, end = _extent(_chunks(footer, index, leaves))
        if not group.begin <= begin < group.end:
            continue
        if not content.holds(begin, end):  # all columns by one request, and perhaps what follows
            content = FileRange(table, max(0, AHEAD_BYTES - (end - begin)) * (group.rows is None))
            content.seek(begin)
            content.read(end - begin)
        with parquet.ParquetFile(
            content, metadata=footer, pre_buffer=False, page_checksum_verification=True
        ) as opened:
            for batch in opened.iter_batches(
                ROWS_AT_ONCE, row_groups=[index], columns=[*types], use_threads=False
            ):
                names = batch.schema.names  # in the order of the file
                for values in _values(batch.columns, [restores[name] for name in names]):
                    number += 1
                    yield number, dict(zip(names, values, strict=True))


def columns(table: Table) -> list[str]:
    """The columns of a file."""
    return _footer_of(table).schema.to_arrow_schema().names


@lru_cache(FOOTERS_IN_MEMORY)
def _footer_of(table: Table) -> FileMetaData:
    """The footer of a file. Raises BrokenText if it is not Parquet."""
    from pyarrow import parquet

    def fetch() -> bytes:
        footer = io.BytesIO()
        parquet.read_metadata(FileRange(table)).write_metadata_file(footer)
        return footer.getvalue()

    try:
        return parquet.read_metadata(io.BytesIO(table.kept("footer", fetch)))
    except (pa.ArrowException, OSError) as error:
        raise table.broken(
            f"{table.file.name} cannot be read as Parquet: {reason_of(error)}. Copy it again, or "
            "leave it out."
        ) from error


def _wanted(table: Table) -> tuple[dict[str, pa.DataType], list[int]]:
    """The columns that are read with their types, and the numbers of their leaves.

    Raises DataError if there are none, or none of texts.
    """
    schema = _footer_of(table).schema
    types = {field.name: field.type for field in schema.to_arrow_schema()}
    wanted = {name: types[name] for name in table.column.find(table.where, [*types])}
    for name, kind in wanted.items():
        if table.column.of_texts and not _is_text(kind):
            raise DataError(
                f"data.text_column={name} of {table.where} holds {kind}, not text. Name another "
                "column, or convert this one to text."
            )
    paths = [schema.column(leaf).path for leaf in range(len(schema))]
    return wanted, [leaf for leaf, path in enumerate(paths) if _top(path, types) in wanted]


def _top(path: str, columns: Collection[str]) -> str:
    """The column of a leaf. Both names may contain dots."""
    while path not in columns and "." in path:
        path = path.rpartition(".")[0]
    return path


def _chunks(footer: FileMetaData, index: int, leaves: list[int]) -> list[ColumnChunkMetaData]:
    group = footer.row_group(index)
    return [group.column(leaf) for leaf in leaves]


def _extent(chunks: list[ColumnChunkMetaData]) -> tuple[int, int]:
    """The first byte of a row group's columns, and the one after the last."""
    begins = [
        # Some writers give 0 for the dictionary page that they do not have.
        min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
        for chunk in chunks
    ]
    sizes = [chunk.total_compressed_size for chunk in chunks]
    return min(begins), max(begin + size for begin, size in zip(begins, sizes, strict=True))


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
