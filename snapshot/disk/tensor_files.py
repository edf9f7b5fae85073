"""The safetensors files of a snapshot, written tensor by tensor or slice by slice.

The place of each tensor follows from names and shapes alone, so several processes can write one
file at once. The bytes are those of safetensors' `save_file`. All tensors are float32.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
"""Bytes that are copied or mapped at once."""
MADV_POPULATE_WRITE = 23
"""Since Linux 5.14. It prepares pages at once. A full disk makes it fail instead of SIGBUS."""
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file that holds everything but the numbers of its tensors."""

    name: str
    header: bytes
    begins: dict[str, int]
    """The first byte of each tensor, by name."""
    shapes: dict[str, Shape]

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(map(bytes_of, self.shapes.values()))

    @classmethod
    def of(cls, name: str, shapes: dict[str, Shape]) -> TensorFile:
        """The file with tensors of these shapes."""
        entries: dict[str, Any] = {METADATA: {"format": "pt"}}
        end = 0
        for tensor in sorted(shapes):  # as save_file does
            begin, end = end, end + bytes_of(shapes[tensor])
            entries[tensor] = {
                "dtype": "F32",
                "shape": shapes[tensor],
                "data_offsets": [begin, end],
            }
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        header = struct.pack("<Q", len(text)) + text
        begins = {one: len(header) + entries[one]["data_offsets"][0] for one in shapes}
        return cls(name, header, begins, shapes)


def bytes_of(shape: Shape) -> int:
    """Bytes of a tensor in a file."""
    return FLOAT_BYTES * prod(shape)


def plan_files(shapes: Mapping[str, Shape], prefix: str, most_bytes: int) -> list[TensorFile]:
    """Assign tensors to files, in order: to one file if they fit, else to several.

    A file has at most `most_bytes`, or one tensor. The files' names begin with `prefix`.
    """
    groups: list[dict[str, Shape]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        size = bytes_of(shape)
        if groups[-1] and (filled + size > most_bytes or len(groups[-1]) == MOST_TENSORS):
            groups.append({})
            filled = 0
        groups[-1][name] = shape
        filled += size
    if len(groups) == 1:
        return [TensorFile.of(f"{prefix}.safetensors", groups[0])]
    return [
        TensorFile.of(f"{prefix}-{i:05d}-of-{len(groups):05d}.safetensors", group)
        for i, group in enumerate(groups, start=1)
    ]


def create_files(folder: Path, prefix: str, files: Sequence[TensorFile]) -> None:
    """Create the files of a prefix in their full size, without the tensors. Raises OSError.

    Several files get an index, as transformers writes it.
    """
    for file in files:
        with open(folder / file.name, "xb", buffering=0) as opened:
            opened.write(file.header)
            opened.truncate(file.size)
    if len(files) > 1:
        weight_map = {name: file.name for file in files for name in file.shapes}
        total = sum(file.size - len(file.header) for file in files)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / f"{prefix}.safetensors.index.json", index)


class TensorFiles:
    """The files that `create_files` has created, into which this process writes tensors.

    With `maps`, columns of a matrix are written through a memory map. Only processes of one machine
    may do so at once: a network file system may write back whole pages.
    """

    def __init__(self, folder: Path, files: Iterable[TensorFile], maps: bool) -> None:
        self._folder, self._maps = folder, maps and sys.platform == "linux"
        self._file_of = {name: file for file in files for name in file.shapes}
        self._open_name, self._descriptor = "", -1
        self._touched: set[str] = set()

    def write(self, name: str, numbers: Tensor, slices: Slices | None = None) -> None:
        """Write all of a tensor, or the `slices` of it. Raises OSError.

        `numbers` are on the CPU, of any strides. Frozen ones may have 16 bits, and become float32.
        """
        if not numbers.numel():  # with many processes, some have no part of a small tensor
            return
        file = self._file_of[name]
        self._open(file.name)
        shape = file.shapes[name]
        if slices is None:
            slices = tuple(slice(0, size) for size in shape)
        for offset, block in self._blocks(numbers, file.begins[name], shape, slices):
            array: Any = block.float().numpy()
            content = memoryview(array).cast("B")
            while content:  # a system call writes at most 2 GB
                written = os.pwrite(self._descriptor, content, offset)
                content, offset = content[written:], offset + written

    def flush(self) -> None:
        """Write the files that this process has changed to the disk, and close them."""
        for name in sorted(self._touched):
            self._open(name)
            os.fsync(self._descriptor)
        self._close()

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _open(self, name: str) -> None:
        if name == self._open_name:
            return
        self._close()
        mode = os.O_RDWR if self._maps else os.O_WRONLY
        self._descriptor, self._open_name = os.open(self._folder / name, mode), name
        self._touched.add(name)

    def _close(self) -> None:
        if self._open_name:
            os.close(self._descriptor)
            self._open_name = ""

    def _blocks(
        self, numbers: Tensor, begin: int, shape: Shape, slices: Slices
    ) -> Iterator[tuple[int, Tensor]]:
        """Offset and numbers of what is written of the slices of a tensor that begins at `begin`.

        What can be copied through a map has been written already.
        """
        first = slices[0].start if slices else 0
        if slices[1:] == tuple(slice(0, size) for size in shape[1:]):
            yield from _whole_rows(numbers, begin, first)
            return
        begin += FLOAT_BYTES * first * prod(shape[1:])
        if len(shape) == 2:
            yield from self._parts_of_rows(numbers, begin, shape[1], slices[1].start)
            return
        for i, matrix in enumerate(numbers):
            at = begin + FLOAT_BYTES * i * prod(shape[1:])
            yield from self._blocks(matrix, at, shape[1:], slices[1:])

    def _parts_of_rows(
        self, numbers: Tensor, begin: int, columns: int, first: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Some columns of a matrix, from column `first` on: offset and numbers of each row."""
        rows = max(1, BLOCK_BYTES // (columns * FLOAT_BYTES))
        for row in range(0, len(numbers), rows):
            block = numbers[row : row + rows]
            offset = begin + FLOAT_BYTES * (row * columns + first)
            if not self._copy_mapped(offset, columns, block):
                for i, line in enumerate(block.contiguous()):
                    yield offset + FLOAT_BYTES * i * columns, line

    def _copy_mapped(self, offset: int, columns: int, block: Tensor) -> bool:
        """Copy rows that lie `columns` apart through a map; whether this could be done."""
        if not self._maps:
            return False
        count = (len(block) - 1) * columns + block.shape[1]
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


def _whole_rows(numbers: Tensor, begin: int, first: int) -> Iterator[tuple[int, Tensor]]:
    """Rows of a tensor, from row `first` on: offset and numbers of each block of them."""
    numbers = numbers if numbers.ndim else numbers[None]
    row_bytes = FLOAT_BYTES * numbers.numel() // len(numbers)
    rows = max(1, BLOCK_BYTES // row_bytes)
    for row in range(0, len(numbers), rows):
        yield begin + (first + row) * row_bytes, numbers[row : row + rows].contiguous()
