"""What the tensor files of a snapshot hold: entries, gathered from all processes one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor
from torch.optim import Optimizer

from snapshot.disk.layout import FLOAT_BYTES, Layout
from snapshot.disk.reference import ADAPTERS
from snapshot.disk.sharded import gather_full, is_sharded


@dataclass(frozen=True)
class Entry:
    """Tensors, or this process's shards of them, that are gathered and written at once."""

    tensors: dict[str, Tensor]
    sizes: dict[str, int]
    """Bytes of what is written, by its name in the file."""
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    """From the full tensors to what is written."""


def weight_entries(layout: Layout, stem: str) -> list[Entry]:
    """The weights that files of this stem hold, in their order."""
    parameters = {**layout.parameters(), **layout.adapters()}
    return [
        Entry(
            {name: parameters[name] for name in group.parameters},
            {name: FLOAT_BYTES * prod(shape) for name, shape in group.shapes.items()},
            _contiguous if stem == ADAPTERS else layout.to_files,
        )
        for group in layout.written_as(stem)
    ]


def moment_entries(layout: Layout, optimizer: Optimizer) -> list[Entry]:
    """The optimizer's state of every parameter that is trained, in the order of the file."""
    entries = []
    for name, parameter in layout.trained().items():
        assert parameter in optimizer.state, "the optimizer has other parameters than the model"
        transpose = layout.is_transposed(name)
        for key, value in sorted(optimizer.state[parameter].items()):
            entries.append(
                Entry(
                    {f"{name}.{key}": value},
                    {f"{name}.{key}": value.numel() * value.element_size()},
                    _transposed if transpose and value.ndim == 2 else _contiguous,
                )
            )
    return entries


def sizes_of(entries: list[Entry]) -> dict[str, int]:
    """Bytes by name of everything that is written."""
    return {name: size for entry in entries for name, size in entry.sizes.items()}


def _transposed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.t().contiguous() for name, tensor in tensors.items()}


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def gathered_tensors(files: dict[str, list[Entry]], writer: bool) -> Iterator[Tensor]:
    """Gather full tensors in the order of the files; the writer gets them in the files' layout.

    At most one entry is in memory in addition to the shards, and the one before it while it is
    gathered. On a CPU it may be the weight or moment itself, which does not change until all is
    written.
    """
    for entries in files.values():
        for entry in entries:
            full = {name: gather_full(tensor) for name, tensor in entry.tensors.items()}
            if not writer:
                yield from full.values()
            elif any(map(is_sharded, entry.tensors.values())):
                yield from [one.cpu() for one in entry.convert(full).values()]
            else:  # a step in progress may fill the device's memory: convert in the CPU's
                yield from entry.convert({name: one.cpu() for name, one in full.items()}).values()
