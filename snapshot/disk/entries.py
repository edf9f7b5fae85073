"""What the tensor files of a snapshot hold, entry by entry, and which parts a process writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from model.layout import Layout, Shape, Written
from model.sharded import (
    gather_full,
    is_sharded,
    local_part,
    local_slices,
    writes_shard,
)
from snapshot.disk.reference import ADAPTERS, TRAINED
from snapshot.disk.tensor_files import Slices, TensorFiles


@dataclass(frozen=True)
class Entry:
    """Tensors, or this process's shards of them, that are converted and written at once."""

    stem: str
    """Of the files that hold it."""
    tensors: dict[str, Tensor]
    shapes: dict[str, Shape]
    """Of what is written, by its name in the file."""
    convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None
    """From the full tensors to what is written; None for one tensor that is written as it is, or
    transposed."""
    transposed: bool = False

    @property
    def is_sharded(self) -> bool:
        """Whether this process holds only its shard of some tensor."""
        return any(map(is_sharded, self.tensors.values()))


@dataclass(frozen=True)
class Part:
    """What one process writes of an entry: all of it, or the slices of its shard."""

    entry: Entry
    tensors: dict[str, Tensor]
    slices: Slices | None = None
    """In the full tensor."""

    @property
    def bytes(self) -> int:
        """Of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, files: TensorFiles) -> None:
        """Write it at its place. Raises OSError.

        A step in progress may fill the device's memory, so it is converted in the CPU's.
        """
        entry, tensors = self.entry, {name: one.cpu() for name, one in self.tensors.items()}
        if entry.convert is not None:
            for name, tensor in entry.convert(tensors).items():
                files.write(entry.stem, name, tensor)
            return
        (tensor,), (name,) = tensors.values(), entry.shapes
        if entry.transposed:
            tensor = tensor.t()
        slices = self.slices[::-1] if entry.transposed and self.slices else self.slices
        files.write(entry.stem, name, tensor, slices)


def written_as(layout: Layout, stem: str) -> list[Written]:
    """What the files of this stem hold (see snapshot/disk/reference.py)."""
    if stem == ADAPTERS:
        shapes = {name: tuple(one.shape) for name, one in layout.adapters().items()}
        return [Written((name,), {name: shape}) for name, shape in shapes.items()]
    if stem == TRAINED:
        trained = layout.trained()
        return [one for one in layout.written() if not trained.keys().isdisjoint(one.parameters)]
    return layout.written()


def weight_entries(layout: Layout, stem: str) -> list[Entry]:
    """The weights that files of this stem hold, in their order."""
    parameters = {**layout.parameters(), **layout.adapters()}
    entries = []
    for group in written_as(layout, stem):
        tensors = {name: parameters[name].detach() for name in group.parameters}
        transposed = stem != ADAPTERS and layout.is_transposed(group.parameters[0])
        entries.append(Entry(stem, tensors, group.shapes, group.convert, transposed))
    return entries


def shapes_of(entries: Iterable[Entry]) -> dict[str, Shape]:
    """The shapes by name of everything that is written."""
    return {name: shape for entry in entries for name, shape in entry.shapes.items()}


def whole_parts(entries: Iterable[Entry]) -> list[Part]:
    """Everything, in the one process that holds all of it."""
    return [Part(entry, entry.tensors) for entry in entries]


def own_parts(entries: Iterable[Entry], is_main: bool) -> list[Part]:
    """What this process writes of what can be written shard by shard: its shards; the main process
    also writes what each process holds whole.
    """
    parts = []
    for entry in entries:
        if not entry.is_sharded:
            parts += [Part(entry, entry.tensors)] if is_main else []
        elif entry.convert is None:
            ((name, tensor),) = entry.tensors.items()
            if writes_shard(tensor):
                parts.append(Part(entry, {name: local_part(tensor)}, local_slices(tensor)))
    return parts


def gathered_parts(entries: Iterable[Entry]) -> Iterator[Part]:
    """Gather entries one after the other. Every process must call this, and take all of them.

    At most one entry is in memory in addition to the shards, and the one before it while it is
    gathered.
    """
    for entry in entries:
        yield Part(entry, {name: gather_full(tensor) for name, tensor in entry.tensors.items()})


def needs_gathering(entry: Entry) -> bool:
    """Whether an entry's shards cannot be written where they lie in the file."""
    return entry.is_sharded and entry.convert is not None


def by_stem(entries: Iterable[Entry]) -> Mapping[str, list[Entry]]:
    """The entries of each stem."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.stem, []).append(entry)
    return found
