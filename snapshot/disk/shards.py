"""What one process writes of a snapshot's tensors, and copies of it that outlast an update."""

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
from model.sharded import (
    cut_like,
    gather_full,
    is_sharded,
    local_part,
    numbers_in,
    pieces_of,
    whole_shape,
    writes_shard,
)
from optim.optimizers import Kept, OptimizerError, kept_by
from snapshot.disk.model import ADAPTERS
from snapshot.disk.tensor_files import Slices, TensorFiles
from snapshot.errors import SnapshotError, Unresumable

SAME_PARAMETERS = (
    "a run trains the same parameters from its first step to its last. Name what is frozen in "
    "optim.freeze; to change it, begin another run with model.pretrained=<a snapshot>"
)


@dataclass(frozen=True)
class Shard:
    """What a process holds of one tensor, or of several that are converted and written at once."""

    tensors: dict[str, Tensor]
    """Parameters or moments, by name."""
    shapes: dict[str, Shape]
    """The full shapes of what is written, by name in the file."""
    convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None = None
    """Makes what is written from full tensors; None for one tensor that is written as it is, or
    transposed."""
    transposed: bool = False
    slices: Slices | None = None
    """The slices of the full tensor that it covers; None for all of it."""

    @property
    def is_sharded(self) -> bool:
        """Whether other processes hold the rest of some tensor."""
        return any(map(is_sharded, self.tensors.values()))

    @property
    def bytes(self) -> int:
        """Bytes of the tensors, each in whole words, so that any dtype may follow 16 bits."""
        return sum(map(_whole_words, self.tensors.values()))

    def gathered(self) -> Shard:
        """All of it. Every process must call this, in the same order."""
        whole = {name: gather_full(one) for name, one in self.tensors.items()}
        return replace(self, tensors=whole)

    def write(self, files: TensorFiles) -> None:
        """Write it to its files. Raises OSError.

        It is converted in the CPU's memory, because a step in progress may fill the device's.
        """
        tensors = {name: tensor.cpu() for name, tensor in self.tensors.items()}
        if self.convert is not None:
            whole = {name: tensor.float() for name, tensor in tensors.items()}
            for name, tensor in self.convert(whole).items():
                files.write(name, tensor)
            return
        (tensor,), (name,), slices = tensors.values(), self.shapes, self.slices
        if self.transposed:
            tensor, slices = tensor.t(), None if slices is None else slices[::-1]
        files.write(name, tensor, slices)


def _whole_words(tensor: Tensor) -> int:
    """Bytes of a tensor, rounded up to a multiple of float32's."""
    return -(-tensor.nbytes // FLOAT_BYTES) * FLOAT_BYTES


def written_as(layout: Layout, prefix: str) -> list[Written]:
    """What the files of this prefix hold (see snapshot/disk/model.py), in their order."""
    if prefix == ADAPTERS:
        shapes = {name: whole_shape(one) for name, one in layout.adapters().items()}
        return [Written((name,), {name: shape}) for name, shape in shapes.items()]
    return layout.written()


def shards_of_weights(layout: Layout, prefix: str) -> list[Shard]:
    """The weights in the files of this prefix, in the order of the files."""
    parameters = {**layout.parameters(), **layout.adapters()}
    shards = []
    for group in written_as(layout, prefix):
        held = {name: parameters[name] for name in group.parameters}
        tensors = {name: cut_like(one.detach(), one) for name, one in held.items()}
        transposed = prefix != ADAPTERS and layout.is_transposed(group.parameters[0])
        shards.append(Shard(tensors, group.shapes, group.convert, transposed=transposed))
    return shards


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
    shapes = {name: whole_shape(one) for name, one in trained.items()}
    return {name: [*of.values()].count(shapes[name]) for name, of in kept.items()}


def snapshot_bytes(layout: Layout, optimizer: str) -> int:
    """Bytes of a snapshot's tensors: all weights, or the adapters alone, and moments."""
    trained, moments = layout.trained(), moment_counts(layout, optimizer)
    weights = layout.adapters() or layout.parameters()
    numbers = sum(numbers_in(one) for one in weights.values())
    numbers += sum(moments[name] * numbers_in(one) for name, one in trained.items())
    return FLOAT_BYTES * numbers


def shards_of_moments(layout: Layout, optimizer: Optimizer, optimizer_name: Any) -> list[Shard]:
    """What the optimizer of this optim.name keeps of all that is trained, in the file's order.

    Raises SnapshotError before the first update, which fp16's loss scaler may have skipped, and
    Unresumable where the optimizer has other parameters, or keeps something else, than at first.
    """
    shards, kept, trained = [], kept_in(layout, optimizer_name), layout.trained()
    _refuse_other_parameters(layout, optimizer)
    for name, parameter in trained.items():
        state = optimizer.state.get(parameter, {})
        if state.keys() != kept[name].keys():
            if not state:
                raise SnapshotError(f"the optimizer has not updated {name} yet")
            now, first = (", ".join(sorted(one)) or "nothing" for one in (state, kept[name]))
            raise Unresumable(
                f"optim.name={optimizer_name!s:.80} keeps {now} of {name}, but after its first "
                f"update {first}, which is what a snapshot holds: make all of it in the first "
                "update, and keep it"
            )
        for key, value in sorted(state.items()):
            if shape := kept[name][key]:
                value = cut_like(value.detach(), parameter)
            transposed = layout.is_transposed(name) and len(shape) == 2
            shapes = {f"{name}.{key}": shape[:: -1 if transposed else 1]}
            shards.append(Shard({key: value}, shapes, transposed=transposed))
    return shards


def _refuse_other_parameters(layout: Layout, optimizer: Optimizer) -> None:
    """Raise Unresumable unless what is trained is what the optimizer was made for."""
    trained = layout.trained()
    updated = {one for group in optimizer.param_groups for one in group["params"]}
    for name, parameter in trained.items():
        if parameter not in updated:
            raise Unresumable(
                f"{name} has requires_grad=True, but was frozen when the optimizer was made, which "
                f"does not update it: {SAME_PARAMETERS}"
            )
    for name, parameter in {**layout.parameters(), **layout.adapters()}.items():
        if parameter in updated and name not in trained:
            raise Unresumable(
                f"{name} was trained at first and has requires_grad=False now: {SAME_PARAMETERS}"
            )


def shapes_of(shards: Iterable[Shard]) -> dict[str, Shape]:
    """The shapes by name of everything that is written."""
    return {name: shape for shard in shards for name, shape in shard.shapes.items()}


def divide_shards(
    shards: Iterable[Shard], is_main: bool, each_writes: bool
) -> tuple[list[Shard], list[Shard]]:
    """What this process writes by itself, and what the main process gathers and writes.

    If `each_writes`, every process writes its own shards. The main process writes what is not
    sharded, and gathers what is converted from several tensors.
    """
    own, gathered = [], []
    for shard in shards:
        if not shard.is_sharded:
            own += [shard] if is_main else []
        elif not each_writes or shard.convert is not None:
            gathered.append(shard)
        else:
            ((name, tensor),) = shard.tensors.items()
            for piece in pieces_of(tensor) if writes_shard(tensor) else ():
                local = {name: local_part(tensor)[piece.local]}
                own.append(replace(shard, tensors=local, slices=piece.whole))
    return own, gathered


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

    def copy(self, shard: Shard) -> Shard | None:
        """A shard whose tensors are copies in this memory; None if it has no room for them."""
        left = 0 if self._memory is None else self._memory.nbytes - self._used
        if self._memory is None or shard.bytes > left:
            return None
        copies = {}
        for name, tensor in shard.tensors.items():
            memory = self._memory[self._used : self._used + tensor.nbytes]
            copies[name] = memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            self._used += _whole_words(tensor)
        return replace(shard, tensors=copies)


class PendingShards:
    """The shards that one thread writes, while another computes the next step.

    The thread begins with the first one. If an update comes before the last one is written, those
    that are left are copied to the staging buffer, as far as it has room.
    """

    def __init__(self, shards: Sequence[Shard], buffer: StagingBuffer) -> None:
        self._shards, self._buffer = list(shards), buffer
        self._taken = self._written = 0
        self._uncopied = len(self._shards)
        """The shards from here on are copies."""
        self._changed = Condition()

    def __iter__(self) -> Iterator[Shard]:
        """Each shard, to be written before the next one is asked for."""
        for i in range(len(self._shards)):
            with self._changed:
                self._taken, shard = i + 1, self._shards[i]
            yield shard
            with self._changed:
                self._written = i + 1
                self._changed.notify_all()

    def copy(self) -> None:
        """Copy shards that are not being written, the last ones first, while there is room."""
        copied: Shard | None = None
        while True:
            with self._changed:
                last = self._uncopied - 1
                if last < self._taken or (copied := self._buffer.copy(self._shards[last])) is None:
                    return
                self._shards[last], self._uncopied = copied, last

    def release(self) -> None:
        """Return when the tensors may change: each is written, or copied."""
        self.copy()
        with self._changed:
            self._changed.wait_for(lambda: self._written >= self._uncopied)

    def abandon(self) -> None:
        """Nothing more is read."""
        with self._changed:
            self._written = len(self._shards)
            self._changed.notify_all()
