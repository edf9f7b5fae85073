"""The tensors of a snapshot: weights and what the optimizer keeps, by their names in the files.

Also which of them a process writes, and what no snapshot could be resumed from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from model.layout import FLOAT_BYTES, Layout, Shape, Written
from model.sharded import gather_full, is_sharded, local_part, slices_of, writes_shard
from optim.optimizers import OPTIMIZERS
from snapshot.disk.model import ADAPTERS
from snapshot.disk.tensor_files import Slices, TensorFile
from snapshot.errors import SnapshotError, Unresumable


@dataclass(frozen=True)
class Part:
    """A tensor of the files, or several that are converted as one, or one process's part of it.

    Until `whole` or `of_this_process` is called, its tensors are those of training, which other
    processes may hold in part.
    """

    tensors: dict[str, Tensor]
    """Parameters, or what the optimizer keeps of one, by name."""
    shapes: dict[str, Shape]
    """The full shapes of what is written, by name in the file."""
    convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None = None
    """Makes what is written from full tensors; None for one that is written as it is."""
    transposed: bool = False
    """Whether the file holds the one tensor transposed."""
    slices: Slices | None = None
    """Where the one tensor lies in what the file holds, before that is transposed."""

    @property
    def is_sharded(self) -> bool:
        """Whether other processes hold the rest of some tensor."""
        return any(map(is_sharded, self.tensors.values()))

    @property
    def bytes_of_copy(self) -> int:
        """Bytes that `copied` takes; pinned memory is rounded up to a power of two."""
        return sum(tensor.nbytes * (1 + tensor.is_cuda) for tensor in self.tensors.values())

    def whole(self) -> Part:
        """All of it, gathered. Every process must call this, in the same order."""
        return replace(self, tensors={name: gather_full(one) for name, one in self.tensors.items()})

    def of_this_process(self) -> Part | None:
        """What this process writes of it, if each writes what it holds."""
        if not self.is_sharded:
            return self
        ((name, tensor),) = self.tensors.items()
        if not writes_shard(tensor):
            return None
        return replace(self, tensors={name: local_part(tensor)}, slices=slices_of(tensor))

    def copied(self) -> Part:
        """A copy in the memory of the CPU, pinned for a GPU's tensors.

        Raises RuntimeError or MemoryError where the system does not give as much.
        """
        copies = {}
        for name, one in self.tensors.items():
            if one.is_cuda:
                memory = torch.empty(one.shape, dtype=one.dtype, pin_memory=True)
            else:  # in huge pages, which numpy asks for: half of the time would go to page faults
                block = torch.from_numpy(np.empty(one.nbytes, np.uint8))
                memory = block.view(one.dtype).view(one.shape)
            copies[name] = memory.copy_(one)
        return replace(self, tensors=copies)

    def write(self, folder: Path, file_of: Mapping[str, TensorFile]) -> None:
        """Write it to its files, which `folder` has. Raises OSError and NumberFault.

        It is converted in the CPU's memory, because a step in progress may fill the device's.
        """
        tensors = {name: tensor.cpu() for name, tensor in self.tensors.items()}
        if self.convert is not None:
            whole = {name: tensor.float() for name, tensor in tensors.items()}
            for name, converted in self.convert(whole).items():
                file_of[name].write(folder, name, converted)
            return
        (tensor,), (name,), slices = tensors.values(), self.shapes, self.slices
        if self.transposed:
            tensor, slices = tensor.t(), None if slices is None else slices[::-1]
        file_of[name].write(folder, name, tensor, slices)


def written_as(layout: Layout, prefix: str) -> list[Written]:
    """What the files of this prefix hold (see snapshot/disk/model.py), in their order."""
    if prefix == ADAPTERS:
        shapes = {name: tuple(one.shape) for name, one in layout.adapters().items()}
        return [Written((name,), {name: shape}) for name, shape in shapes.items()]
    return layout.written()


def parts_of_weights(layout: Layout, prefix: str) -> list[Part]:
    """The weights in the files of this prefix, in the order of the files."""
    parameters = {**layout.parameters(), **layout.adapters()}
    parts = []
    for group in written_as(layout, prefix):
        tensors = {name: parameters[name].detach() for name in group.parameters}
        transposed = prefix != ADAPTERS and layout.is_transposed(next(iter(group.shapes)))
        parts.append(Part(tensors, group.shapes, group.convert, transposed))
    return parts


def kept_in(layout: Layout, optimizer: Any) -> dict[str, dict[str, Shape]]:
    """Names and shapes of what the optimizer of this optim.name keeps of all that is trained.

    Raises SnapshotError for an optimizer that is unknown.
    """
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        known = " or ".join(OPTIMIZERS)
        raise SnapshotError(f"optim.name={optimizer!s:.80} is not {known}")
    kind, joined = OPTIMIZERS[optimizer], layout.parts()
    return {name: kind.kept_of(one, joined[one]) for name, one in layout.trained().items()}


def snapshot_bytes(layout: Layout, optimizer: str) -> int:
    """Bytes of a snapshot's tensors: all weights, or the adapters alone, and moments."""
    weights = layout.adapters() or layout.parameters()
    moments = [shape for of in kept_in(layout, optimizer).values() for shape in of.values()]
    shapes = [*(one.shape for one in weights.values()), *filter(None, moments)]
    return FLOAT_BYTES * sum(map(prod, shapes))


def parts_of_moments(layout: Layout, optimizer: Optimizer, optimizer_name: Any) -> list[Part]:
    """What the optimizer of this optim.name keeps of all that is trained, in the file's order.

    Raises SnapshotError before the first update, which fp16's loss scaler may have skipped, and
    Unresumable where the optimizer has other parameters, or keeps something else, than at first.
    """
    parts, kept, trained = [], kept_in(layout, optimizer_name), layout.trained()
    kind, joined = OPTIMIZERS[optimizer_name], layout.parts()
    _refuse_other_parameters(layout, optimizer)
    for name, parameter in trained.items():
        state = optimizer.state.get(parameter, {})
        if wrong := kind.wrong_in(state, parameter, joined[parameter]):
            if not state:
                raise SnapshotError(f"the optimizer has not updated {name} yet")
            raise Unresumable(f"optim.name={optimizer_name} {wrong}. That is of {name}")
        for key, value in sorted(state.items()):
            shape = kept[name][key]
            transposed = layout.is_transposed(name) and len(shape) == 2
            in_file = {f"{name}.{key}": shape[:: -1 if transposed else 1]}
            parts.append(Part({key: value.detach()}, in_file, None, transposed))
    return parts


def _refuse_other_parameters(layout: Layout, optimizer: Optimizer) -> None:
    """Raise Unresumable unless what is trained is what the optimizer was made for."""
    updated = {one for group in optimizer.param_groups for one in group["params"]}
    of_model = {**layout.parameters(), **layout.adapters()}
    others = [name for name, one in of_model.items() if one.requires_grad != (one in updated)]
    others += ["one that the model lacks"] * bool(updated - {*of_model.values()})
    if others:
        raise Unresumable(
            f"the optimizer updates other parameters than the model trains: {others[0]}. A run "
            "trains the same parameters of its model from its first step to its last. Name what "
            "is frozen in optim.freeze; to change it, begin another run with "
            "model.pretrained=<a snapshot>"
        )


def shapes_of(parts: Iterable[Part]) -> dict[str, Shape]:
    """The shapes by name of everything that is written."""
    return {name: shape for part in parts for name, shape in part.shapes.items()}


def divide(
    parts: Iterable[Part], is_main: bool, each_writes: bool
) -> tuple[list[Part], list[Part]]:
    """What this process writes by itself, and what the main process gathers and writes.

    If `each_writes`, every process writes what it holds of sharded tensors. The main process writes
    what is not sharded, and gathers what is converted from several tensors.
    """
    own, gathered = [], []
    for part in parts:
        if part.is_sharded and not (each_writes and part.convert is None):
            gathered.append(part)
        elif (part.is_sharded or is_main) and (mine := part.of_this_process()) is not None:
            own.append(mine)
    return own, gathered
