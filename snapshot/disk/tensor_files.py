"""The safetensors files of a snapshot, written tensor by tensor or slice by slice.

The place of each tensor follows from names and shapes alone, so several processes can write one
file at once. The bytes are those of safetensors' `save_file`. All tensors are float32.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
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
    shapes: dict[str, Shape]
    """By the names of its tensors."""

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each tensor begins behind the header, sorted by name as in save_file."""
        names = sorted(self.shapes)
        ends = accumulate((bytes_of(self.shapes[name]) for name in names), initial=0)
        return dict(zip(names, ends, strict=False))

    @cached_property
    def header(self) -> bytes:
        """What precedes the tensors."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, begin in self.offsets.items():
            shape = self.shapes[name]
            place = [begin, begin + bytes_of(shape)]
            entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": place}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        return struct.pack("<Q", len(text)) + text

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(map(bytes_of, self.shapes.values()))

    def write(self, folder: Path, name: str, numbers: Tensor, slices: Slices | None = None) -> None:
        """Write all of a tensor, or the `slices` of it. Raises OSError and NumberFault.

        The file has been made with `create_files`; several processes may write to it at once.
        `numbers` are on the CPU, of any strides. Frozen ones may have 16 bits, and become float32.
        They must be finite: one weight that is NaN makes every loss NaN.
        """
        if not numbers.numel():  # with many processes, some have no part of a small tensor
            return
        shape = self.shapes[name]
        if not shape:
            numbers, shape, slices = numbers[None], (1,), None
        slices = slices or tuple(slice(0, size) for size in shape)
        rows = max(1, BLOCK_BYTES // bytes_of(numbers.shape[1:]))
        begin = len(self.header) + self.offsets[name]
        with open(folder / self.name, "r+b") as opened:
            for row in range(0, len(numbers), rows):
                block = numbers[row : row + rows].float().contiguous().numpy()
                _refuse_infinite(name, block)
                first = slices[0].start + row
                places = _places(shape, (slice(first, first + len(block)), *slices[1:]))
                runs = block.reshape(len(places), -1)
                for place, run in zip(places.tolist(), runs, strict=True):
                    opened.seek(begin + place)
                    opened.write(run.data)


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
        if groups[-1] and filled + bytes_of(shape) > most_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = shape
        filled += bytes_of(shape)
    endings = [f"-{i + 1:05d}-of-{len(groups):05d}" for i in range(len(groups))]
    if len(groups) == 1:
        endings = [""]
    return [
        TensorFile(f"{prefix}{ending}.safetensors", group)
        for ending, group in zip(endings, groups, strict=True)
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
