"""Reads tensors, or slices of them, from safetensors files by name."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.layout import Layout, ModelError, Shape, Stored
from model.sharded import local_part, local_slices
from snapshot.disk.headers import read_header, tensor_files
from snapshot.errors import SnapshotError


class TensorReader:
    """Reads tensors of a verified snapshot by name, slice by slice.

    Files are read, not memory-mapped: a mapped file that is truncated kills the process (SIGBUS).
    """

    def __init__(self, folder: Path, stem: str) -> None:
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        self._shapes: dict[str, Shape] = {}
        try:
            for path in tensor_files(folder, stem):
                self._shapes |= read_header(path, foreign=True)
                opened = self._stack.enter_context(safe_open(path, "pt", backend="pread"))
                self._file_of.update(dict.fromkeys(opened.keys(), opened))
        except (OSError, SafetensorError) as error:
            raise SnapshotError(f"{folder}: {stem} cannot be read: {error}") from error
        self._path = folder / stem

    def slice_of(self, name: str) -> Any:
        """A tensor on disk; indexing reads it. Raises SnapshotError for an unknown name."""
        if name not in self._file_of:
            raise SnapshotError(f"{self._path} does not hold {name}")
        return self._file_of[name].get_slice(name)

    def shapes(self) -> dict[str, Shape]:
        """The shapes of all tensors by name."""
        return self._shapes

    def find(self, layout: Layout) -> dict[str, Stored]:
        """Where each parameter lies. Raises SnapshotError for a tensor that the model lacks."""
        try:
            return layout.find(self._shapes)
        except ModelError as error:
            raise SnapshotError(str(error)) from error

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def read_into(target: Tensor, reader: TensorReader, stored: Stored) -> None:
    """Fill a parameter, a moment, or this process's shard of it, and read no more than that.

    Numbers of 16 bits become float32. Where the tensors of several names make one parameter, they
    are read whole. Raises SnapshotError if the shape differs.
    """
    shape, slices = tuple(target.shape), local_slices(target)
    found = [reader.slice_of(name) for name in stored.names]
    shapes = {name: tuple(one.get_shape()) for name, one in zip(stored.names, found, strict=True)}
    if (there := stored.shape_of(shapes)) != shape:
        name = stored.names[0]
        raise SnapshotError(f"{name} has the shape {list(there)}, the model needs {list(shape)}")
    local = local_part(target)
    if not local.numel():  # with many processes, some have no part of a small tensor
        return
    if stored.convert is not None:
        local.copy_(stored.convert([one[...] for one in found])[slices])
    elif stored.transposed and len(shape) == 2:
        local.copy_(found[0][slices[::-1]].t())
    else:
        local.copy_(found[0][slices])
