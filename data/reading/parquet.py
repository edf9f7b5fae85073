"""Parquet files: their row groups, from the footers, and the rows of one.

Only the columns that are read are requested.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from data.reading.groups import Group
from data.reading.table import FileRange, Row, Table

PART_BYTES = 32 << 20
"""Of an unopened file, a group has the row groups that begin in so many bytes."""
FOOTERS_IN_MEMORY = 64
ROWS_AT_ONCE = 1024
JSON = "arrow.json"
"""The Arrow type in which `datasets` stores values of mixed types."""


def groups(table: Table) -> list[Group]:
    """The row groups. Raises DataError if the file lacks the column."""
    if table.unopened:
        return table.parts(PART_BYTES)
    footer, (_, leaves) = _footer_of(table), _wanted(table)
    first_row, found = 0, []
    for index in range(footer.num_row_groups):
        row_group = footer.row_group(index)
        if count := row_group.num_rows:
            size = sum(row_group.column(leaf).total_uncompressed_size for leaf in leaves)
            extent = _extent(row_group, leaves)
            found.append(Group(table.number, index, first_row, count, *extent, size))
        first_row += count
    return found


def rows(table: Table, group: Group) -> Iterator[Row]:
    """The rows of a row group, or of those that begin in a part of the file."""
    footer = _footer_of(table)
    types, leaves = _wanted(table)
    restorers = {name: restorer_of(kind) for name, kind in types.items()}
    nested = {name: restore for name, restore in restorers.items() if restore}
    number = 0
    for index in range(footer.num_row_groups) if group.rows is None else [group.index]:
        begin, end = _extent(footer.row_group(index), leaves)
        if not group.begin <= begin < group.end:
            continue
        content = FileRange(table)
        content.seek(begin)
        content.read(end - begin)  # all columns by one request
        with parquet.ParquetFile(
            content, metadata=footer, pre_buffer=False, page_checksum_verification=True
        ) as opened:
            for batch in opened.iter_batches(
                ROWS_AT_ONCE, row_groups=[index], columns=[*types], use_threads=False
            ):
                for values in batch.to_pylist():
                    number += 1
                    for name, restore in nested.items():
                        if values[name] is not None:
                            values[name] = restore(values[name])
                    yield number, values


@lru_cache(FOOTERS_IN_MEMORY)
def _footer_of(table: Table) -> parquet.FileMetaData:
    return parquet.read_metadata(FileRange(table))


def _wanted(table: Table) -> tuple[dict[str, pa.DataType], list[int]]:
    """The columns that are read with their types, and the numbers of their leaves.

    Raises DataError if there are none.
    """
    schema = _footer_of(table).schema
    types = {field.name: field.type for field in schema.to_arrow_schema()}
    wanted = {name: types[name] for name in table.column.among(types)}
    if not wanted:
        raise table.column.missing(table.where, [*types])
    paths = [schema.column(leaf).path for leaf in range(len(schema))]
    begins = tuple(f"{name}." for name in wanted)  # of nested values
    leaves = [leaf for leaf, path in enumerate(paths) if f"{path}.".startswith(begins)]
    return wanted, leaves


def _extent(row_group: parquet.RowGroupMetaData, leaves: list[int]) -> tuple[int, int]:
    """The first byte of a row group's columns, and the one after the last."""
    chunks = [row_group.column(leaf) for leaf in leaves]
    begins = [
        # Some writers give 0 for the dictionary page that they do not have.
        min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
        for chunk in chunks
    ]
    sizes = [chunk.total_compressed_size for chunk in chunks]
    return min(begins), max(begin + size for begin, size in zip(begins, sizes, strict=True))


def restorer_of(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """What makes a value of a type as it was before all rows of a column got one type.

    Where the calls of two tools have other arguments, each has those of the other as null: null
    fields of structs are dropped, and JSON is decoded. None for a type whose values are as they
    were. Types are looked at here, once a row group: for each value that would take most of the
    time of reading.
    """
    if getattr(kind, "extension_name", None) == JSON:
        return json.loads
    if pa.types.is_struct(kind):
        return partial(_restored_fields, {field.name: restorer_of(field.type) for field in kind})
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        restore = restorer_of(kind.value_type)
        return restore and partial(_restored_entries, restore)
    return None


def _restored_fields(
    restorers: dict[str, Callable[[Any], Any] | None], value: dict[str, Any]
) -> dict[str, Any]:
    present = ((name, entry) for name, entry in value.items() if entry is not None)
    return {
        name: restore(entry) if (restore := restorers[name]) else entry for name, entry in present
    }


def _restored_entries(restore: Callable[[Any], Any], value: list[Any]) -> list[Any]:
    return [None if entry is None else restore(entry) for entry in value]
