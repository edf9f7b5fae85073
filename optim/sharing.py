"""How the processes of a run share an optimizer's work: owners, shards and exchanges.

A copy of the model is held by S holders, each with a shard of every parameter, and there are D such
copies: (D, S) is (N, 1) under DDP and (1, N) under FSDP on N processes; in hybrid sharding both are
larger than 1. Where tensor parallelism cuts matrices, FSDP shards the rows of each part: there are
as many holders for each part as FSDP has shards. Processes are numbered holder by holder, so that
successive owners are in different copies, and copies send as much as each other.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from model.sharded import cut_of, is_sharded

DONE = object()


@dataclass(frozen=True)
class Work:
    """Where an optimizer computes, and with whom."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    """The dtype of the run's matrix products."""
    group: dist.ProcessGroup | None = None
    """The processes of the run; None if there is one."""


def all_processes() -> dist.ProcessGroup | None:
    """The group of all processes of the run; None if there is one."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    return dist.group.WORLD if several else None


@dataclass(frozen=True)
class Grid:
    """The processes that share the work, and the place of this one."""

    copies: int = 1
    copy: int = 0
    shards: int = 1
    shard: int = 0
    parts: int = 1
    """The processes among which tensor parallelism cuts each matrix."""
    part: int = 0
    across: dist.ProcessGroup | None = None
    """The processes with this shard, one of each copy; None for one copy."""
    within: dist.ProcessGroup | None = None
    """The processes with this copy; None if it is not sharded."""

    @property
    def holders(self) -> int:
        """The processes that hold a copy."""
        return self.shards * self.parts

    @property
    def holder(self) -> int:
        """The number of this one."""
        return self.shard * self.parts + self.part

    @property
    def processes(self) -> int:
        """How many processes there are."""
        return self.copies * self.holders

    def by_copy(self, by_process: Sequence[Any]) -> list[Sequence[Any]]:
        """What the processes of each copy have, from what each process has."""
        return [by_process[copy :: self.copies] for copy in range(self.copies)]

    def rows_of(self, shard: int, rows: int) -> slice:
        """The rows of a shard, of a parameter with `rows`. The last shards have fewer, or none."""
        each = -(-rows // self.shards)
        return slice(min(each * shard, rows), min(each * (shard + 1), rows))


def grid_of(parameter: Any, group: dist.ProcessGroup | None) -> Grid:
    """The processes that hold a parameter: those of its mesh if it is sharded, or of the group.

    Every process of the run must call this, once.
    """
    if not is_sharded(parameter):
        return Grid() if group is None else Grid(group.size(), group.rank(), across=group)
    mesh = parameter.device_mesh
    found: dict[str, Any] = {}
    for dimension, placement in enumerate(parameter.placements):
        names = ("copies", "copy", "across")
        if not placement.is_replicate():
            assert placement.is_shard(0), placement
            names = ("shards", "shard", "within")
        place = mesh.size(dimension), mesh.get_local_rank(dimension), mesh.get_group(dimension)
        found |= dict(zip(names, place, strict=True))
    if (cut := cut_of(parameter)) is not None:
        found |= {"parts": cut.group.size(), "part": cut.group.rank(), "within": group}
        if "copies" in found:  # the holders of a copy are neighbours
            found["within"], _ = dist.new_subgroups(found["shards"] * found["parts"])
    return Grid(**found)


def owners(costs: Sequence[int], processes: int) -> list[int]:
    """Which process does each task, so that the sums of their costs are about equal.

    The tasks go to the process with the least so far, the expensive ones first. It depends on
    nothing else, so that every process finds the same owners.
    """
    loads = [(0, process) for process in range(processes)]
    found = [0] * len(costs)
    for task in sorted(range(len(costs)), key=lambda task: -costs[task]):
        load, found[task] = loads[0]
        heapq.heapreplace(loads, (load + costs[task], found[task]))
    return found


class Exchange:
    """A collective that has begun."""

    def __init__(self, sent: Tensor, received: Tensor, pending: Any) -> None:
        self._sent, self._received, self._pending = sent, received, pending

    def wait(self) -> Tensor:
        """What this process receives. To be called once."""
        self._pending.wait()
        received = self._received
        del self._sent, self._received  # until now they were in use
        return received


def all_to_all(
    sent: Tensor, to_each: list[int], from_each: list[int], group: dist.ProcessGroup
) -> Exchange:
    """Begin to send some numbers of (n) to each process, and to receive some of each.

    Every process of the group must call this, in the same order.
    """
    received = sent.new_empty(sum(from_each))
    pending = dist.all_to_all_single(received, sent, from_each, to_each, group, async_op=True)
    return Exchange(sent, received, pending)


def all_gather(sent: Tensor, group: dist.ProcessGroup) -> Exchange:
    """Begin to gather (N, n) from the (n) of each of N processes.

    Every process of the group must call this, in the same order.
    """
    received = sent.new_empty(group.size(), sent.numel())
    pending = dist.all_gather_single(received.view(-1), sent, group, async_op=True)
    return Exchange(sent, received, pending)


def overlapped(batches: Iterable[Iterator[None]]) -> None:
    """Do all batches, each of which yields where it has begun an exchange.

    It continues after the next one has begun its own, so what one sends overlaps with what another
    computes.
    """
    begun: list[Iterator[None]] = []
    for batch in batches:
        begun = [one for one in (batch, *begun) if next(one, DONE) is not DONE]
    while begun:
        begun = [one for one in begun if next(one, DONE) is not DONE]
