"""Sharded tensors: gathered from all processes to be written, read back slice by slice.

FSDP shards a parameter over the processes of its group (a DTensor). Before that, tensor parallelism
may have cut it (`Cut`): FSDP then shards what a process has of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Cut:
    """How the processes of a tensor-parallel group hold a parameter: each a part, or all of it.

    FSDP may shard the part again. Parts of the optimizer's state are cut like their parameter.
    """

    shape: tuple[int, ...]
    """That of the whole parameter."""
    group: Any
    """The process group."""
    dim: int | None = None
    """The dimension that is cut; None if each process has all of it."""
    joined: int = 1
    """The equal matrices that the parameter joins along `dim`: each of them is cut."""
    summed: bool = False
    """Whether a process computes a part of the gradient, though it has all of the parameter."""

    def ranges(self, rank: int | None = None) -> list[slice]:
        """What a process, by default this one, has of the whole along `dim`: one for each matrix.

        It has them one after the other.
        """
        assert self.dim is not None
        rank, size = self.group.rank() if rank is None else rank, self.group.size()
        length = self.shape[self.dim] // self.joined
        begin, end = rank * length // size, (rank + 1) * length // size
        return [slice(n * length + begin, n * length + end) for n in range(self.joined)]

    @property
    def part_shape(self) -> tuple[int, ...]:
        """That of this process's part."""
        shape = list(self.shape)
        if self.dim is not None:
            shape[self.dim] = sum(one.stop - one.start for one in self.ranges())
        return tuple(shape)

    def gather(self, part: Tensor) -> Tensor:
        """The whole of the parts of all processes, each of which must call this."""
        from torch.distributed import all_gather_single

        if self.dim is None:
            return part
        size, rows = self.group.size(), part.movedim(self.dim, 0)
        most = max(sum(one.stop - one.start for one in self.ranges(n)) for n in range(size))
        sent = rows.new_zeros(most, *rows.shape[1:])
        sent[: len(rows)] = rows
        received = sent.new_empty(size, *sent.shape)
        all_gather_single(received.flatten(0, 1), sent, group=self.group)
        whole = part.new_empty(self.shape)
        by_rows = whole.movedim(self.dim, 0)
        for rank, its in enumerate(received):
            begin = 0
            for one in self.ranges(rank):
                length = one.stop - one.start
                by_rows[one] = its[begin : begin + length]
                begin += length
        return whole

    def part_of(self, whole: Tensor, rank: int | None = None) -> Tensor:
        """The part of a process, by default this one, of the whole parameter."""
        if self.dim is None:
            return whole
        ranges = [whole[(slice(None),) * self.dim + (one,)] for one in self.ranges(rank)]
        return ranges[0] if len(ranges) == 1 else torch.cat(ranges, self.dim)


def reshard(model: nn.Module) -> None:
    """Reshard parameters that a forward pass without a backward pass left gathered.

    After an evaluation FSDP's last group (embeddings, final norm) stays gathered: its parameters
    are then not those of the optimizer, and have 16 bits in mixed precision.
    """
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]


def gather_full(tensor: Tensor) -> Tensor:
    """The full tensor, on this process. Every process must call this, in the same order."""
    local: Any = tensor.detach()
    part = local.full_tensor() if _is_dtensor(local) else local
    return part if (cut := cut_of(tensor)) is None else cut.gather(part)


def local_part(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor, which can be written to; all of it if it is not sharded."""
    local: Any = tensor.detach()
    return local.to_local() if _is_dtensor(local) else local


class Piece(NamedTuple):
    """Numbers that lie in a block of the whole tensor: a slice for each dimension."""

    local: tuple[slice, ...]
    """Where they are in `local_part`."""
    whole: tuple[slice, ...]


def pieces_of(tensor: Any) -> list[Piece]:
    """What `local_part(tensor)` has of the whole tensor; nothing if that is empty."""
    slices, cut = _slices_of(tensor), cut_of(tensor)
    if any(one.start == one.stop for one in slices):
        return []  # with many processes, some have no part of a small tensor
    local = tuple(slice(0, one.stop - one.start) for one in slices)
    if cut is None or cut.dim is None:
        return [Piece(local, slices)]
    held, dim, pieces, begin = slices[cut.dim], cut.dim, [], 0
    for one in cut.ranges():
        end = begin + one.stop - one.start
        low, high = max(begin, held.start), min(end, held.stop)
        if low < high:
            here = slice(low - held.start, high - held.start)
            there = slice(one.start + low - begin, one.start + high - begin)
            pieces.append(
                Piece(
                    (*local[:dim], here, *local[dim + 1 :]),
                    (*slices[:dim], there, *slices[dim + 1 :]),
                )
            )
        begin = end
    return pieces


def _slices_of(tensor: Any) -> tuple[slice, ...]:
    """The position of `local_part(tensor)` in what FSDP shards."""
    shape, first = tuple(tensor.shape), (0,) * tensor.dim()
    if _is_dtensor(tensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, first = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    return tuple(slice(begin, begin + size) for begin, size in zip(first, shape, strict=True))


def writes_shard(tensor: Any) -> bool:
    """Whether this process writes its shard: of those that hold the same one, the first does."""
    cut = cut_of(tensor)
    if cut is not None and cut.dim is None and cut.group.rank() > 0:
        return False
    if not _is_dtensor(tensor):
        return True
    mesh, coordinates = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    return coordinates is not None and not any(
        placement.is_replicate() and coordinates[dimension]
        for dimension, placement in enumerate(tensor.placements[: mesh.ndim])
    )


def is_sharded(tensor: Any) -> bool:
    """Whether each process holds only its shard of the tensor."""
    cut = cut_of(tensor)
    return _is_dtensor(tensor) or (cut is not None and cut.dim is not None)


def _is_dtensor(tensor: Any) -> bool:
    """Whether FSDP shards it."""
    # An import of its class would cost every start half a second, also without FSDP.
    return hasattr(tensor, "full_tensor")


def cut_of(tensor: Any) -> Cut | None:
    """How a parameter, or what an optimizer keeps of it, is cut; None without tensor parallelism.

    It is an attribute of the tensor. Whoever makes a tensor from another one passes it on
    (`cut_like`): detach, zeros_like and the like do not.
    """
    return getattr(tensor, "cut", None)


def cut_like(tensor: Tensor, other: Any) -> Tensor:
    """The tensor, marked as cut like another one of its whole shape."""
    if (cut := cut_of(other)) is not None:
        tensor.cut = cut  # type: ignore[attr-defined]
    return tensor


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of the whole parameter, over all processes."""
    cut = cut_of(tensor)
    return tuple(tensor.shape) if cut is None else cut.shape


def numbers_in(tensor: Tensor) -> int:
    """How many numbers the whole parameter has, over all processes."""
    return prod(whole_shape(tensor))
