"""Writes tensors, or slices of them, at their places in the files of a snapshot."""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.layout import FLOAT_BYTES, Shape
from snapshot.disk.files import write_json

MOST_TENSORS = 20_000
"""In one file; a header with 300,000 takes seconds to parse."""
METADATA = "__metadata__"
ALIGNMENT = 8
"""The data of a safetensors file begins at a multiple of it."""
BLOCK_BYTES = 32 << 20
"""What is copied, or mapped, at once."""
MADV_POPULATE_WRITE = 23
"""Of Linux 5.14. It prepares pages at once; where the disk is full it fails, instead of SIGBUS."""
Slices = tuple[slice, ...]


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


def create_files(folder: Path, placements: Mapping[str, Placement]) -> None:
    """Create the files of each stem in their full size, without the tensors. Raises OSError."""
    for stem, placement in placements.items():
        for file, header in placement.headers.items():
            with open(folder / file, "xb", buffering=0) as opened:
                opened.write(header)
                opened.truncate(placement.sizes[file])
        if placement.index is not None:
            write_json(folder / f"{stem}.safetensors.index.json", placement.index)


class TensorFiles:
    """The files that `create_files` has created, of which this process writes parts.

    With `maps`, strips of a matrix are written through a memory map. Only processes of one machine
    may do so at once: a network file system may write back whole pages.
    """

    def __init__(self, folder: Path, placements: Mapping[str, Placement], maps: bool) -> None:
        self._folder, self._maps = folder, maps and sys.platform == "linux"
        self._places = {stem: placement.places for stem, placement in placements.items()}
        self._file, self._descriptor = "", -1
        self._touched: set[str] = set()

    def write(self, stem: str, name: str, part: Tensor, slices: Slices | None = None) -> None:
        """Write the slices of a tensor, or all of it, from a float32 tensor on the CPU, of any
        strides. Raises OSError.
        """
        if not part.numel():  # with many processes, some have no part of a small tensor
            return
        assert part.dtype == torch.float32, f"{name} is {part.dtype}"
        place = self._places[stem][name]
        if place.file != self._file:
            self._open(place.file)
        if slices is not None and slices[1:] != tuple(slice(0, size) for size in place.shape[1:]):
            assert part.ndim == 2, f"{name} is sharded in more than one dimension"
            self._write_columns(place, part, slices[1].start)
            return
        row_bytes = FLOAT_BYTES * part.numel() // max(1, len(part) if part.ndim else 1)
        offset = place.begin + (slices[0].start * row_bytes if slices else 0)
        part = part if part.ndim else part[None]
        rows = max(1, BLOCK_BYTES // row_bytes)
        for first in range(0, len(part), rows):
            block = part[first : first + rows].contiguous()
            _write_all(self._descriptor, _bytes_of(block), offset + first * row_bytes)

    def flush(self) -> None:
        """Write the files that this process has changed to the disk, and close them."""
        self._close()
        for file in sorted(self._touched):
            self._open(file)
            os.fsync(self._descriptor)
        self._close()

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _open(self, file: str) -> None:
        self._close()
        mode = os.O_RDWR if self._maps else os.O_WRONLY
        self._descriptor, self._file = os.open(self._folder / file, mode), file
        self._touched.add(file)

    def _close(self) -> None:
        if self._file:
            os.close(self._descriptor)
            self._file = ""

    def _write_columns(self, place: Place, part: Tensor, first: int) -> None:
        """Write columns of a matrix, from column `first` on."""
        columns = place.shape[1]
        rows = max(1, BLOCK_BYTES // (columns * FLOAT_BYTES))
        for row in range(0, len(part), rows):
            block, begin = part[row : row + rows], row * columns + first
            if not self._copy_mapped(place.begin, block, begin, columns):
                lines = block.contiguous()
                for i in range(len(lines)):
                    offset = place.begin + FLOAT_BYTES * (begin + i * columns)
                    _write_all(self._descriptor, _bytes_of(lines[i]), offset)

    def _copy_mapped(self, base: int, block: Tensor, begin: int, columns: int) -> bool:
        """Copy rows that lie `columns` apart through a map; whether this could be done."""
        if not self._maps:
            return False
        count = (len(block) - 1) * columns + block.shape[1]
        offset = base + FLOAT_BYTES * begin
        margin = offset % mmap.ALLOCATIONGRANULARITY
        with suppress(OSError):
            length = margin + FLOAT_BYTES * count
            with mmap.mmap(self._descriptor, length, offset=offset - margin) as pages:
                pages.madvise(MADV_POPULATE_WRITE)
                numbers = torch.frombuffer(pages, dtype=torch.float32, count=count, offset=margin)
                numbers.as_strided(block.shape, (columns, 1)).copy_(block)
                del numbers  # or the pages could not be closed
                return True
        return False


def _bytes_of(block: Tensor) -> memoryview:
    array: Any = block.numpy()
    return memoryview(array).cast("B")


def _write_all(descriptor: int, content: memoryview, offset: int) -> None:
    while content:  # a system call writes at most 2 GB
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written
