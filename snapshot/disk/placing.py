"""Where each tensor lies in the files of a snapshot: a function of names and shapes alone.

So several processes write one file at once, and its bytes are those of safetensors' `save_file`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from model.layout import FLOAT_BYTES, Shape
from snapshot.disk.headers import METADATA, MOST_TENSORS

ALIGNMENT = 8
"""The data of a safetensors file begins at a multiple of it."""


@dataclass(frozen=True)
class Place:
    """Where the float32 numbers of a tensor lie."""

    file: str
    begin: int
    """Bytes of the file before the tensor."""
    shape: Shape


@dataclass(frozen=True)
class Placement:
    """The files of one stem."""

    places: dict[str, Place]
    """By the names of the tensors."""
    headers: dict[str, bytes]
    """What each file begins with."""
    sizes: dict[str, int]
    """Bytes of each file."""
    index: dict[str, Any] | None
    """transformers' index; None for a single file, which needs none."""


def plan_pieces(sizes: dict[str, int], stem: str, piece_bytes: int) -> dict[str, list[str]]:
    """Assign tensors (name to bytes) to files, in order; to one file if they all fit."""
    pieces: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if pieces[-1] and (filled + size > piece_bytes or len(pieces[-1]) == MOST_TENSORS):
            pieces.append([])
            filled = 0
        pieces[-1].append(name)
        filled += size
    if len(pieces) == 1:
        return {f"{stem}.safetensors": pieces[0]}
    return {
        f"{stem}-{i:05d}-of-{len(pieces):05d}.safetensors": piece
        for i, piece in enumerate(pieces, start=1)
    }


def place_tensors(shapes: Mapping[str, Shape], stem: str, piece_bytes: int) -> Placement:
    """Place tensors of float32 in files of at most `piece_bytes`, or of one tensor."""
    sizes = {name: FLOAT_BYTES * prod(shape) for name, shape in shapes.items()}
    plan = plan_pieces(sizes, stem, piece_bytes)
    found = Placement({}, {}, {}, None)
    for file, names in plan.items():
        entries: dict[str, Any] = {METADATA: {"format": "pt"}}
        end = 0
        for name in sorted(names):  # as save_file does
            offsets, end = [end, end + sizes[name]], end + sizes[name]
            entries[name] = {"dtype": "F32", "shape": shapes[name], "data_offsets": offsets}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        header = struct.pack("<Q", len(text)) + text
        for name in names:
            begin = len(header) + entries[name]["data_offsets"][0]
            found.places[name] = Place(file, begin, shapes[name])
        found.headers[file], found.sizes[file] = header, len(header) + end
    if len(plan) == 1:
        return found
    weight_map = {name: file for file, names in plan.items() for name in names}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    return Placement(found.places, found.headers, found.sizes, index)
