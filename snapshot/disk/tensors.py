"""The tensors of a snapshot: weights and what the optimizer keeps, by their names in the files.

Also what no snapshot could be resumed from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from model.layout import FLOAT_BYTES, Layout, Shape, Written, written_under
from model.sharded import gather_full, is_sharded, local_part, slices_of, writes_shard
from optim.optimizers import OPTIMIZERS
from snapshot.disk.model import ADAPTERS
from snapshot.disk.tensor_files import Slices, TensorFile
from snapshot.errors import SnapshotError, Unresumable


@dataclass(frozen=True)
class Part:
    """A tensor of the files, or several that are converted as one, as this process holds it."""

    tensors: dict[str, Tensor]
    """Parameters, or what the optimizer keeps of one, by name: those of training, or copies."""
    written: Written
    """What the files hold of them, by name."""
    slices: Slices | None
    """Which slices of the one tensor in the file this process holds; None for all of it."""

    @classmethod
    def of(cls, tensors: dict[str, Tensor], written: Written) -> Part:
        """What this process holds of tensors that may be sharded."""
        if written.convert is not None:
            return cls(tensors, written, None)
        (tensor,) = tensors.values()
        return cls(tensors, written, slices_of(tensor)[:: -1 if written.transposed else 1])

    @property
    def is_sharded(self) -> bool:
        """Whether other processes hold the rest of some tensor."""
        return any(map(is_sharded, self.tensors.values()))

    @property
    def is_written_here(self) -> bool:
        """Of a sharded one, whether this process writes its shard: others may hold the same."""
        return all(map(writes_shard, self.tensors.values()))

    @property
    def bytes_of_copy(self) -> int:
        """Bytes that `copied` takes; pinned memory is rounded up to a power of two."""
        held = map(local_part, self.tensors.values())
        return sum(tensor.nbytes * (1 + tensor.is_cuda) for tensor in held)

    def whole(self) -> Part:
        """All of it, gathered. Every process must call this, in the same order."""
        tensors = {name: gather_full(one) for name, one in self.tensors.items()}
        return replace(self, tensors=tensors, slices=None)

    def copied(self) -> Part:
        """A copy of what this process holds, in the CPU's memory, pinned for a GPU's tensors.

        Raises RuntimeError or MemoryError where the system does not give as much.
        """
        copies = {}
        for name, one in self.tensors.items():
            held = local_part(one)
            if held.is_cuda:
                memory = torch.empty(held.shape, dtype=held.dtype, pin_memory=True)
            else:  # in huge pages, which numpy asks for: half of the time would go to page faults
                block = torch.from_numpy(np.empty(held.nbytes, np.uint8))
                memory = block.view(held.dtype).view(held.shape)
            copies[name] = memory.copy_(held)
        return replace(self, tensors=copies)

    def write(self, folder: Path, file_of: Mapping[str, TensorFile]) -> None:
        """Write what this process holds to its files in `folder`. Raises OSError and NumberFault.

        It is converted in the CPU's memory, because a step in progress may fill the device's.
        """
        tensors = {name: local_part(tensor).cpu() for name, tensor in self.tensors.items()}
        if self.written.convert is not None:
            whole = {name: tensor.float() for name, tensor in tensors.items()}
            for name, converted in self.written.convert(whole).items():
                file_of[name].write(folder, name, converted)
            return
        (tensor,), (name,) = tensors.values(), self.written.shapes
        tensor = tensor.t() if self.written.transposed else tensor
        file_of[name].write(folder, name, tensor, self.slices)


def parts_of_weights(layout: Layout, prefix: str) -> list[Part]:
    """The weights in the files of this prefix (see snapshot/disk/model.py), in their order."""
    if prefix == ADAPTERS:
        return [
            Part.of({name: one.detach()}, Written((name,), {name: tuple(one.shape)}))
            for name, one in layout.adapters().items()
        ]
    parameters = layout.parameters()
    return [
        Part.of({name: parameters[name].detach() for name in written.parameters}, written)
        for written in layout.written()
    ]


def empty_moments(
    layout: Layout, optimizer: Any, device: str | None = None
) -> dict[nn.Parameter, dict[str, Tensor]]:
    """What the optimizer of this optim.name keeps of each trained parameter, without values.

    On this device, or on that of the parameter. Raises SnapshotError for an unknown optimizer.
    """
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        known = " or ".join(OPTIMIZERS)
        raise SnapshotError(f"optim.name={optimizer!s:.80} is not {known}")
    kept_of, joined = OPTIMIZERS[optimizer].kept_of, layout.parts()

    def empty(one: nn.Parameter, shape: Shape) -> Tensor:
        if shape and device is None:
            return torch.empty_like(one)  # sharded as the parameter is
        return torch.empty(shape, device=device or one.device)  # empty_like to "meta" imports sympy

    return {
        one: {key: empty(one, shape) for key, shape in kept_of(one, joined[one]).items()}
        for one in layout.trained().values()
    }


def snapshot_bytes(layout: Layout, optimizer: str) -> int:
    """Bytes of a snapshot's tensors: all weights, or the adapters alone, and moments."""
    weights = layout.adapters() or layout.parameters()
    kept = [one for of in empty_moments(layout, optimizer, "meta").values() for one in of.values()]
    return FLOAT_BYTES * sum(one.numel() for one in [*weights.values(), *kept] if one.dim())


def parts_of_moments(layout: Layout, state: Mapping[Any, Mapping[str, Tensor]]) -> list[Part]:
    """What the `state` of an optimizer has of all that is trained, in the file's order."""
    parts, trained = [], layout.trained()
    for file, names in layout.by_file_name(trained).items():
        for key, value in sorted(state[trained[names[0]]].items()):
            kept = {name: state[trained[name]][key].detach() for name in names}
            transposed = layout.is_transposed(file) and value.dim() == 2
            parts.append(Part.of(kept, written_under(f"{file}.{key}", kept, transposed)))
    return parts


def refuse_other_moments(layout: Layout, optimizer: Optimizer, optimizer_name: str) -> None:
    """Raise an error where the optimizer keeps something else than a reader expects.

    It is SnapshotError before the first update, which fp16's loss scaler may have skipped, and
    Unresumable where the optimizer has other parameters, or keeps something else, than at first.
    """
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
    kind, joined = OPTIMIZERS[optimizer_name], layout.parts()
    for name, parameter in layout.trained().items():
        state = optimizer.state.get(parameter, {})
        if wrong := kind.wrong_in(state, parameter, joined[parameter]):
            if not state:
                raise SnapshotError(f"the optimizer has not updated {name} yet")
            raise Unresumable(f"optim.name={optimizer_name} {wrong}. That is of {name}")


def shapes_of(parts: Iterable[Part]) -> dict[str, Shape]:
    """The shapes by name of everything that is written."""
    return {name: shape for part in parts for name, shape in part.written.shapes.items()}
