"""The safetensors files of a snapshot, written tensor by tensor or slice by slice.

The place of each tensor follows from names and shapes alone, so several processes can write one
file at once. The bytes are those of safetensors' `save_file`. All tensors are float32.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from model.layout import FLOAT_BYTES, Shape
from snapshot.disk.folder import write_json
from snapshot.errors import NumberFault

ALIGNMENT = 8
"""The data of a safetensors file begins at a multiple of it."""
BLOCK_BYTES = 32 << 20
"""Bytes that are converted and written at once."""
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
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
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
        if groups[-1] and filled + size > most_bytes:
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
    """The files of `create_files`, into which several processes may write tensors at once."""

    def __init__(self, folder: Path, files: Iterable[TensorFile]) -> None:
        self._folder = folder
        self._file_of = {name: file for file in files for name in file.shapes}
        self._descriptors: dict[str, int] = {}

    def write(self, name: str, numbers: Tensor, slices: Slices | None = None) -> None:
        """Write all of a tensor, or the `slices` of it. Raises OSError and NumberFault.

        `numbers` are on the CPU, of any strides. Frozen ones may have 16 bits, and become float32.
        They must be finite: one weight that is NaN makes every loss NaN.
        """
        if not numbers.numel():  # with many processes, some have no part of a small tensor
            return
        file = self._file_of[name]
        shape = file.shapes[name]
        if not shape:
            numbers, shape = numbers[None], (1,)
        slices = tuple(slice(0, size) for size in shape) if slices is None else slices
        rows = max(1, BLOCK_BYTES // bytes_of(numbers.shape[1:]))
        for row in range(0, len(numbers), rows):
            block = numbers[row : row + rows].float().contiguous().numpy()
            _refuse_infinite(name, block)
            first = slices[0].start + row
            places = _places(shape, (slice(first, first + len(block)), *slices[1:]))
            self._write_at(file, file.begins[name] + places, block.reshape(len(places), -1))

    def flush(self) -> None:
        """Write what this process has written to the disk. Raises OSError."""
        for descriptor in self._descriptors.values():
            os.fsync(descriptor)

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _write_at(self, file: TensorFile, places: np.ndarray, runs: np.ndarray) -> None:
        """Write each of the runs to its place in the file."""
        if file.name not in self._descriptors:
            self._descriptors[file.name] = os.open(self._folder / file.name, os.O_WRONLY)
        descriptor, run_bytes = self._descriptors[file.name], runs[0].nbytes
        for place, run in zip(places.tolist(), runs, strict=True):
            written = os.pwrite(descriptor, run.data, place)
            while written < run_bytes:  # more than 2 GB, or a full disk: the next call says so
                written += os.pwrite(descriptor, run.data.cast("B")[written:], place + written)


def _refuse_infinite(name: str, numbers: np.ndarray) -> None:
    """Raise NumberFault unless all numbers are finite."""
    with np.errstate(all="ignore"):
        if isfinite(numbers.sum()):  # one fast pass: a NaN or infinity is in the sum, too
            return
    wrong = numbers[~np.isfinite(numbers)]
    if len(wrong):
        raise NumberFault(f"it has {wrong[0]:g} in {name[:100]!r}, and only finite numbers train")


def _places(shape: Shape, slices: Slices) -> np.ndarray:
    """Where the `slices` of a tensor of that shape lie in its file, in bytes from its begin.

    They lie in one piece, or some columns of a matrix in a piece for each row.
    """
    last = len(shape) - 1
    while last and slices[last] == slice(0, shape[last]):
        last -= 1
    places = np.zeros(1, np.int64)
    for axis, one in enumerate(slices[: last + 1]):
        along = np.arange(one.start, one.stop) if axis < last else np.array([one.start])
        places = np.add.outer(places, along * bytes_of(shape[axis + 1 :])).ravel()
    return places
