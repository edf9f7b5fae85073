"""What the tensor files of a snapshot hold, entry by entry, and which parts a process writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Condition
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from model.layout import FLOAT_BYTES, Layout, Shape, Written
from model.sharded import gather_full, is_sharded, local_part, local_slices, writes_shard
from optim.optimizers import Kept, OptimizerError, kept_by
from snapshot.disk.reference import ADAPTERS, TRAINED
from snapshot.disk.tensor_files import Slices, TensorFiles
from snapshot.errors import SnapshotError


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


def kept_in(layout: Layout, optimizer: Any) -> dict[str, Kept]:
    """Names and shapes of what the optimizer of this optim.name keeps of all that is trained.

    Raises SnapshotError for an optimizer that is unknown, or of which no snapshot is possible.
    """
    try:
        kept = kept_by(optimizer, layout.parts())
    except OptimizerError as error:
        raise SnapshotError(f"optim.name={optimizer!s:.80} {error}") from error
    return {name: kept[one] for name, one in layout.trained().items()}


def moment_counts(layout: Layout, optimizer: str) -> dict[str, int]:
    """How many numbers the optimizer keeps of each number of what is trained."""
    kept, trained = kept_in(layout, optimizer), layout.trained()
    shapes = {name: tuple(one.shape) for name, one in trained.items()}
    return {name: [*of.values()].count(shapes[name]) for name, of in kept.items()}


def snapshot_bytes(layout: Layout, optimizer: str, only_trained: bool) -> int:
    """Bytes of a snapshot's tensors: all weights, or those that are trained, and moments."""
    trained, moments = layout.trained(), moment_counts(layout, optimizer)
    weights = trained if only_trained else layout.parameters()
    numbers = sum(one.numel() for one in weights.values())
    numbers += sum(moments[name] * one.numel() for name, one in trained.items())
    return FLOAT_BYTES * numbers


def moment_entries(layout: Layout, optimizer: Optimizer, optimizer_name: Any) -> list[Entry]:
    """What the optimizer of this optim.name keeps of all that is trained, in the file's order.

    Raises SnapshotError before the first update, which fp16's loss scaler may have skipped.
    """
    entries, kept = [], kept_in(layout, optimizer_name)
    for name, parameter in layout.trained().items():
        state = optimizer.state.get(parameter, {})
        if state.keys() != kept[name].keys():
            raise SnapshotError(f"the optimizer has not updated {name} yet")
        for key, value in sorted(state.items()):
            transposed = layout.is_transposed(name) and value.ndim == 2
            shape = tuple(value.shape)[:: -1 if transposed else 1]
            full = f"{name}.{key}"
            entries.append(Entry("optimizer", {full: value}, {full: shape}, None, transposed))
    return entries


class StagingBuffer:
    """The memory for copies, at most `most` bytes; allocated once, and pinned for a GPU."""

    def __init__(self, most: int, room: Callable[[], int], pinned: bool) -> None:
        """`room()`: bytes that may be allocated without danger."""
        self._most, self._room, self._pinned = most, room, pinned
        self._memory: Tensor | None = None
        self._asked = self._used = 0

    def begin(self, needed: int) -> None:
        """All copies are free to be overwritten; at most `needed` bytes are about to be."""
        self._used = 0
        if self._most == 0 or needed <= self._asked:
            return
        self._asked, self._memory = needed, None
        limit = min(self._most, max(1, self._room()))
        if self._pinned:  # torch rounds it up to a power of two
            limit = 1 << (limit.bit_length() - 1)
        with suppress(RuntimeError):  # of torch, where the system does not give as much
            size = min(needed, limit)
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def copy(self, part: Part) -> Part | None:
        """A part whose tensors are copies in this memory; None if it has no room for them."""
        left = 0 if self._memory is None else self._memory.nbytes - self._used
        if self._memory is None or part.bytes > left:
            return None
        copies = {}
        for name, tensor in part.tensors.items():
            memory = self._memory[self._used : self._used + tensor.nbytes]
            copies[name] = memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            self._used += tensor.nbytes
        return replace(part, tensors=copies)


class PendingParts:
    """The parts of a snapshot that one thread writes, while another computes the next step."""

    def __init__(self, parts: Sequence[Part], buffer: StagingBuffer) -> None:
        self._parts, self._buffer = list(parts), buffer
        self._taken = self._written = 0
        self._uncopied = len(self._parts)
        """The parts from here on are copies."""
        self._changed = Condition()

    def write(self, files: TensorFiles) -> None:
        """Write all parts. Raises OSError."""
        try:
            for i in range(len(self._parts)):
                with self._changed:
                    self._taken, part = i + 1, self._parts[i]
                part.write(files)
                with self._changed:
                    self._written = i + 1
                    self._changed.notify_all()
        finally:
            self.abandon()

    def copy(self) -> None:
        """Copy parts that are not being written, the last ones first, while there is room."""
        copied: Part | None = None
        while True:
            with self._changed:
                last = self._uncopied - 1
                if last < self._taken or (copied := self._buffer.copy(self._parts[last])) is None:
                    return
                self._parts[last], self._uncopied = copied, last

    def release(self) -> None:
        """Return when the tensors may change: each is written, or copied."""
        self.copy()
        with self._changed:
            self._changed.wait_for(lambda: self._written >= self._uncopied)

    def abandon(self) -> None:
        """Nothing more is read."""
        with self._changed:
            self._written = len(self._parts)
            self._changed.notify_all()
