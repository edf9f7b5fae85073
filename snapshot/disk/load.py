"""Reads tensors of a snapshot, or slices of them: weights, and what the optimizer kept."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.optim import Optimizer

from model.family import LanguageModel
from model.frozen import quantize
from model.layout import Layout, Shape, Stored, stored_under
from model.sharded import local_part, slices_of
from optim.optimizers import STEP
from snapshot.config_values import value_of
from snapshot.disk.folder import FILE_NAME, LARGEST_JSON_BYTES, matches, read_json, readable
from snapshot.disk.model import ADAPTERS, MOMENTS, WHOLE, model_errors, prefix_of
from snapshot.disk.state import read_state
from snapshot.disk.tensors import empty_moments, parts_of_moments
from snapshot.errors import SnapshotError

FLOATS = ("F64", "F32", "BF16", "F16")
"""The types that a parameter may have in a file. Masks of older files have others."""
LFS_POINTER = b"version https://git-lfs"
SAMPLES, SAMPLE_BYTES = 64, 4096
"""Of each file with weights, in `digest_of`."""


def open_tensors(path: Path) -> Any:
    """A safetensors file, whose header safetensors has checked. Raises SnapshotError.

    It is read, not memory-mapped: a mapped file that is truncated kills the process (SIGBUS).
    """
    try:
        with open(path, "rb") as opened:
            beginning = opened.read(len(LFS_POINTER))
        if beginning == LFS_POINTER:
            raise SnapshotError(f"{path} is a pointer of Git LFS: run `git lfs pull` in its folder")
        if int.from_bytes(beginning[:8], "little") > LARGEST_JSON_BYTES:
            raise SnapshotError(f"{path} is not a safetensors file, or its header is too long")
        return safe_open(path, "pt", backend="pread")
    except (OSError, SafetensorError) as error:
        raise SnapshotError(f"{path} is not a whole safetensors file: {error}") from error


def files_of(folder: Path, prefix: str) -> dict[Path, set[str] | None]:
    """The files with the tensors of `prefix`, and the names that the index gives to each.

    None for the names in the only file, which needs no index. Raises SnapshotError if the index is
    not valid, or is not that of the files.
    """
    single, index = folder / f"{prefix}.safetensors", folder / f"{prefix}.safetensors.index.json"
    there = set(folder.glob(f"{prefix}*.safetensors"))
    if there == {single} and not index.exists():
        return {single: None}
    content = read_json(index)
    file_of = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(file_of, dict) or not matches([*file_of.values()], [FILE_NAME]):
        raise SnapshotError(f"{index} is not an index of the files beside it")
    listed = {folder / file for file in file_of.values()}
    if missing := sorted(path.name for path in listed - there):
        raise SnapshotError(
            f"{folder} lacks {missing[0]}, which {index.name} names: was it downloaded in part? "
            f"Fetch the rest with `hf download <owner>/<name> --local-dir {folder}`"
        )
    if extra := sorted(there - listed):
        raise SnapshotError(f"{extra[0]} is not among the files that {index.name} names")
    return {path: {name for name in file_of if file_of[name] == path.name} for path in listed}


def digest_of(folder: Path) -> str:
    """A hash of samples of a model's weights, which tells it from any other one in no time.

    It takes the names and sizes of the files, and parts from all over them: training changes nearly
    every number. Raises SnapshotError for files that cannot be read.
    """
    digest = hashlib.sha256()
    with readable(folder):
        for path in sorted(files_of(folder, WHOLE)):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with open(path, "rb") as opened:
                for i in range(SAMPLES):
                    opened.seek(max(0, size - SAMPLE_BYTES) * i // (SAMPLES - 1))
                    digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()


class TensorReader:
    """Reads tensors of a verified snapshot by name, slice by slice."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self._path = folder / prefix
        self._slices: dict[str, Any] = {}
        self.files: dict[str, Path] = {}
        """The file of each tensor."""
        with ExitStack() as stack:
            for path, listed in sorted(files_of(folder, prefix).items()):
                opened = stack.enter_context(open_tensors(path))
                for name in opened.keys():  # noqa: SIM118
                    if listed is None or name in listed:
                        self._slices[name], self.files[name] = opened.get_slice(name), path
            self._stack = stack.pop_all()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def shapes(self, dtypes: Collection[str] = FLOATS) -> dict[str, Shape]:
        """The shapes by name of all tensors of these types, as safetensors names them."""
        return {
            name: tuple(one.get_shape())
            for name, one in self._slices.items()
            if one.get_dtype() in dtypes
        }

    def dtypes(self) -> set[str]:
        """The dtypes of all matrices, as safetensors names them: F32, BF16, ..."""
        matrices = (name for name, shape in self.shapes().items() if len(shape) > 1)
        return {self._slices[name].get_dtype() for name in matrices}

    def find(self, layout: Layout) -> dict[str, Stored]:
        """Where each parameter lies. Raises SnapshotError for a tensor that the model lacks."""
        with model_errors():
            return layout.find(self.shapes())

    def compare(self, expected: Mapping[str, Shape]) -> None:
        """Raise SnapshotError unless there are exactly these tensors, in float32."""
        shapes = self.shapes(("F32",))
        for name, path in self.files.items():
            if name not in expected:
                raise SnapshotError(f"{path} holds {name!r}, which the model does not have")
            if shapes.get(name) != expected[name]:
                raise SnapshotError(f"{path} has {name!r} in another shape than the model's")
        if missing := next((name for name in expected if name not in shapes), None):
            raise SnapshotError(f"{self._path} does not hold {missing!r}")

    def read(self, stored: Stored, shape: Shape, slices: tuple[slice, ...]) -> Tensor:
        """Slices of a parameter, or moment, of this full shape, and no more than that.

        Where the tensors of several names make one parameter, they are read whole. Raises
        SnapshotError if one is missing, or the shape differs.
        """
        for name in stored.names:
            if name not in self._slices:
                raise SnapshotError(f"{self._path} does not hold {name}")
        found = {name: self._slices[name] for name in stored.names}
        there = stored.shape_of({name: tuple(one.get_shape()) for name, one in found.items()})
        if there != shape:
            raise SnapshotError(
                f"{stored.names[0]} has the shape {list(there)}, the model needs {list(shape)}"
            )
        if stored.convert is not None:
            return stored.convert([one[...] for one in found.values()])[slices]
        (one,) = found.values()
        tensor: Tensor = one[slices[::-1] if stored.transposed else slices]
        return tensor.t() if stored.transposed else tensor

    def fill(self, target: Tensor, stored: Stored, unpacked: Shape | None = None) -> None:
        """Fill a parameter, a moment, or this process's shard of it, as `read` says.

        Numbers become those of the target's dtype, mostly float32; where a target is packed in four
        bits, `unpacked` is its full shape, and its rows are quantized.
        """
        local, slices = local_part(target), slices_of(target)
        if not local.numel():  # with many processes, some have no part of a small tensor
            return
        if unpacked is None:
            local.copy_(self.read(stored, tuple(target.shape), slices))
        else:
            rows = (slices[0], slice(0, unpacked[1]))
            local.copy_(quantize(self.read(stored, unpacked, rows)))


@torch.no_grad()
def restore(folder: Path, model: LanguageModel, optimizer: Optimizer) -> None:
    """Load the weights and the state of the same optimizer of a verified snapshot, bit for bit.

    Every process must call this; it reads only its own slices, without a collective. Adapters
    need a model that has the weights of their base. Raises SnapshotError if a tensor is missing or
    has another shape.
    """
    restore_weights(folder, model, prefix_of(folder))
    layout = model.layout()
    state = empty_moments(layout, value_of(read_state(folder).config, "optim.name"))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kept = optimizer.state[parameter] = state[parameter]
            # As torch does: the step is on the CPU, unless a kernel of the device reads it.
            if STEP in kept and not (group.get("fused") or group.get("capturable")):
                kept[STEP] = torch.empty(())
    with TensorReader(folder, MOMENTS) as reader:
        for part in parts_of_moments(layout, state):
            (name,), count = part.written.shapes, len(part.tensors)
            for number, value in enumerate(part.tensors.values()):
                reader.fill(value, stored_under(name, part.written.transposed, number, count))


@torch.no_grad()
def restore_weights(folder: Path, model: LanguageModel, prefix: str = WHOLE) -> None:
    """Load the weights alone, from a snapshot or from a model of the Hub, or adapters alone.

    Every process must call this; it reads only its own slices, without a collective. Raises
    SnapshotError if a tensor is missing or has another shape.
    """
    layout = model.layout()
    with TensorReader(folder, prefix) as reader:
        if prefix == ADAPTERS:
            for name, parameter in layout.adapters().items():
                reader.fill(parameter, Stored((name,)))
            return
        stored, packed = reader.find(layout), layout.packed()
        for name, parameter in layout.parameters().items():
            if name not in stored:
                raise SnapshotError(f"{folder} does not hold {name}")
            if name in packed:
                reader.fill(packed[name], stored[name], tuple(parameter.shape))
            else:
                reader.fill(parameter, stored[name])
