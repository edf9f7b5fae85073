"""What safetensors files hold, from their headers and the index alone."""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path
from typing import Any

from model.layout import Shape
from snapshot.disk.files import parse_json, read_json
from snapshot.errors import SnapshotError

LARGEST_HEADER_BYTES = 4 << 20
MOST_TENSORS = 20_000
"""In one file; a header with 300,000 takes seconds to parse."""
METADATA = "__metadata__"
FLOATS = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""Bytes of the types that a parameter may have in a file."""
CONSTANTS = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Bytes of the types of constants, such as masks, which older files hold."""


def tensor_files(folder: Path, stem: str) -> list[Path]:
    """The files with the tensors of `stem`, according to the index if there is one.

    Raises SnapshotError if the index is not valid.
    """
    return sorted(set(file_by_name(folder, stem).values()))


def read_header(path: Path, foreign: bool = False) -> dict[str, Shape]:
    """Names and shapes of the tensors in a safetensors file of float32, in the order of the file.

    A `foreign` file was written by others: it may have other types, of which only floats are
    returned, and other metadata. Raises SnapshotError if the header is too long, or if sizes,
    offsets or order do not match the file.
    """
    types = FLOATS | CONSTANTS if foreign else {"F32": 4}
    what = "floats" if foreign else "float32"
    fault = SnapshotError(f"{path} is not a safetensors file of {what}, or its header is wrong")
    try:
        size = path.stat().st_size
        with open(path, "rb") as opened:
            beginning = opened.read(8)
            length = struct.unpack("<Q", beginning)[0] if len(beginning) == 8 else size
            if length > size - 8:
                raise fault
            if length > LARGEST_HEADER_BYTES:
                raise SnapshotError(f"{path} has a header of {length:,} bytes: too long")
            header = parse_json(opened.read(length), f"the header of {path}")
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror}") from error
    if not isinstance(header, dict):
        raise fault
    metadata = header.pop(METADATA, {"format": "pt"})
    if not foreign and metadata != {"format": "pt"}:
        raise fault
    if len(header) > MOST_TENSORS:
        raise SnapshotError(f"{path} has {len(header):,} tensors: too many")
    if not all(_is_entry(entry, types) for entry in header.values()):
        raise fault
    expected_begin = 0
    in_order = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    for _, entry in in_order:
        begin, end = entry["data_offsets"]
        if begin != expected_begin or end - begin != types[entry["dtype"]] * prod(entry["shape"]):
            raise fault
        expected_begin = end
    if expected_begin != size - 8 - length:
        raise fault
    return {name: tuple(entry["shape"]) for name, entry in in_order if entry["dtype"] in FLOATS}


def _is_entry(entry: Any, types: dict[str, int]) -> bool:
    return (
        isinstance(entry, dict)
        and set(entry) == {"dtype", "shape", "data_offsets"}
        and entry["dtype"] in types
        and _are_sizes(entry["shape"], most=4)
        and _are_sizes(entry["data_offsets"], most=2)
        and len(entry["data_offsets"]) == 2
    )


def _are_sizes(numbers: Any, most: int) -> bool:
    return (
        isinstance(numbers, list)
        and len(numbers) <= most
        and all(type(number) is int and 0 <= number < 2**63 for number in numbers)
    )


def file_by_name(folder: Path, stem: str) -> dict[str, Path]:
    """The file of each tensor; without an index, the only file, under the name ""."""
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    pieces = set(folder.glob(f"{stem}*.safetensors"))
    if pieces == {single} and not index.exists():
        return {"": single}
    content = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise SnapshotError(f"{index} is not an index")
    paths = {file: folder / file for file in set(names.values())}
    for file in paths:
        if Path(file).name != file:
            raise SnapshotError(f"{index} leads outside, to {file!r}")
    if set(paths.values()) != pieces:
        raise SnapshotError(f"{index} names other files than exist")
    return {name: paths[file] for name, file in names.items()}
