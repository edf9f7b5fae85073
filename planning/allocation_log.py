"""The allocation log: bytes of live tensors at each allocation and deallocation.

It counts real and fake tensors in the same way, so that a plan's prediction and a run's measurement
are comparable. It sees only what passes torch's dispatcher, not the workspace inside a kernel or
the memory that an allocator or a driver reserves.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "host")
"""`activations` are all tensors without another kind, temporaries included; `buffers` are copies
for communication between processes: DDP's buckets, FSDP's gathered blocks; `host` are activations
in the CPU's memory, of a plan for GPUs."""

FUNCTIONAL = "_c10d_functional"
"""The namespace of torch's collectives that return their result."""
COLLECTIVES: dict[str, tuple[str, int | None]] = {
    "allgather": ("all-gather", 0),
    "reduce_scatter": ("reduce-scatter", 1),
    "allreduce": ("all-reduce", 0),
    "all_gather_into_tensor": ("all-gather", None),
    "alltoall": ("all-to-all", 1),
}
"""Collectives by a part of the name of torch's operation: the kind, and the index of the argument
that is the full tensor (what a process gives to all, of an all-to-all), unless that is the
result."""
UPDATE, CLIP, SUM = "update", "clip", "sum"
"""The places of the optimizer's update, of the clipping before it, and of sums of gradients that
processes with the same matrices have parts of."""
BETWEEN_COPIES = "all-gather of updates"
"""An all-gather in the update: between all processes under DDP, between replicas otherwise."""

OF_CONTEXT = {
    "all_to_all_single": "all-to-all of positions and heads",
    "all_reduce": "all-reduce of chosen experts",
}
"""Collectives of processes that share sequences, by torch's name."""
OF_TENSORS = {
    "all_gather_into_tensor": "all-gather of positions",
    "reduce_scatter_tensor": "reduce-scatter of outputs",
    "all_reduce": "all-reduce of outputs",
}
"""Collectives of processes that share matrices, by torch's name. In a backward pass they gather
gradients of outputs, and add up those of positions."""
OF_VOCABULARY = "all-reduce over the vocabulary"
"""Theirs in the loss: maxima and sums of a position's logits."""
SUMMED, NORMS = "all-reduce of gradients", "all-gather of norms"
"""Theirs once a step: of parameters that each process has whole, and to clip."""
IN_MICRO_BATCHES = (*OF_CONTEXT.values(), *OF_TENSORS.values(), OF_VOCABULARY)
"""The collectives that each micro-batch has, however FSDP accumulates."""


def shared_kind(operation: str, dimensions: int) -> str | None:
    """The kind of a collective of a forward or backward pass; None for one of another library.

    Heads that are exchanged have five dimensions, as sums of a load-balancing loss; outputs of
    layers have three.
    """
    if operation == "all_reduce" and dimensions < 3:
        return OF_VOCABULARY
    return (OF_CONTEXT if dimensions == 5 else OF_TENSORS).get(operation)


Place = tuple[Any, ...]
"""Where in a step an event happens, as the caller of the trace names it."""


@dataclass
class Lifetime:
    """One allocation: its bytes, and the events of its allocation and deallocation."""

    size: int
    kind: str
    allocated_at: int
    freed_at: int | None = None


@dataclass
class AllocationLog:
    """All allocations in order. An event is an allocation or a deallocation."""

    granule: int
    lifetimes: list[Lifetime] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    """The place of each event."""

    def allocate(self, size: int, kind: str, place: Place) -> Lifetime:
        """Record an allocation. Its size is rounded up to the granule of the device's allocator."""
        rounded = -(-size // self.granule) * self.granule
        lifetime = Lifetime(rounded, kind, len(self.places))
        self.places.append(place)
        self.lifetimes.append(lifetime)
        return lifetime

    def free(self, lifetime: Lifetime, place: Place) -> None:
        """Record a deallocation."""
        if lifetime.freed_at is None:
            lifetime.freed_at = len(self.places)
            self.places.append(place)

    def totals(self) -> np.ndarray:
        """Live bytes (events, kinds) after each event, in the order of `KINDS`."""
        events = len(self.places)  # the garbage collector may add deallocations meanwhile
        changes = np.zeros((events, len(KINDS)), dtype=np.int64)
        for lifetime in self.lifetimes:
            column = KINDS.index(lifetime.kind)
            changes[lifetime.allocated_at, column] += lifetime.size
            if lifetime.freed_at is not None and lifetime.freed_at < events:
                changes[lifetime.freed_at, column] -= lifetime.size
        return changes.cumsum(axis=0)


class LiveBytes(TorchDispatchMode):
    """While active, records in `log` every storage that an operation returns."""

    def __init__(self, granule: int = 1, as_gloo: bool = False) -> None:
        """With `as_gloo`, FSDP's reduce-scatter has a copy of its input, which gloo works on."""
        super().__init__()
        self._as_gloo = as_gloo
        self.log = AllocationLog(granule)
        self.place: Place = ()
        self.traffic: Counter[tuple[Place, str]] = Counter()
        """Bytes by place (its first two items) and kind of collective, one of `COLLECTIVES`."""
        self.times = 1
        """How often what is computed now would be computed, of which the traffic has all."""
        self._known: dict[int, tuple[weakref.ref[Any], Lifetime]] = {}
        self._resize = torch.UntypedStorage.resize_

    def mark(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Set the kind of these tensors (or of this process's shards of them)."""
        for tensor in tensors:
            if tensor is not None:
                self._record(tensor, kind).kind = kind

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        packed = [kind for kind in types if kind.__module__.startswith("torchao.")]
        if packed:  # what it computes inside is not seen otherwise
            with _Inside(self):
                result = packed[0].__torch_dispatch__(func, types, args, kwargs or {})
        else:
            result = func(*args, **(kwargs or {}))
        is_collective = getattr(func, "namespace", "") in ("c10d", FUNCTIONAL, "fsdp")
        for leaf in tree_leaves((args, kwargs, result) if is_collective else result):
            if isinstance(leaf, Tensor):
                lifetime = self._record(leaf, "activations")
                if is_collective and lifetime.kind == "activations":
                    lifetime.kind = "buffers"
        if is_collective:
            self._count_traffic(str(func), args, result)
            if self._as_gloo and "_reduce_scatter_base_" in str(func):
                copy = self.log.allocate(args[1].nbytes, "activations", self.place)
                self.log.free(copy, self.place)
        return result

    def __enter__(self) -> LiveBytes:
        tracker = self

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = tracker._resize(storage, size)
            tracker._record_resize(storage)
            return result

        # FSDP2 frees and refills its buffers with it, which bypasses the dispatcher.
        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def _count_traffic(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Add the bytes of the full tensor that a collective operation gathers or reduces."""
        namespace, operation, *_ = name.split(".")
        place = self.place[0] if self.place else ""
        if namespace == FUNCTIONAL and place not in (CLIP, UPDATE):  # there they are DTensor's
            if (shared := shared_kind(operation, args[0].dim())) is not None:
                size = max(args[0].nbytes, result.nbytes)
                self.traffic[self.place[:2], shared] += self.times * size
            return
        for word, (kind, index) in COLLECTIVES.items():
            if word in name:
                full = result if index is None else args[index]
                tensors = [leaf for leaf in tree_leaves(full) if isinstance(leaf, Tensor)]
                self.traffic[self.place[:2], kind_at(kind, place)] += sum(t.nbytes for t in tensors)

    def _record(self, tensor: Tensor, kind: str) -> Lifetime:
        local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        local = getattr(local, "_data", local)  # of torchao's tensor of eight bits with a scale
        # The result of an unfinished collective operation wraps the real tensor.
        storage = getattr(local, "elem", local).untyped_storage()
        key = storage._cdata
        if key in self._known:
            return self._known[key][1]
        lifetime = self.log.allocate(storage.nbytes(), kind, self.place)
        self._known[key] = (weakref.ref(storage, lambda _: self._record_free(key)), lifetime)
        return lifetime

    def _record_free(self, key: int) -> None:
        self.log.free(self._known.pop(key)[1], self.place)

    def _record_resize(self, storage: torch.UntypedStorage) -> None:
        """Record a resize: only FSDP's buffers of gathered parameters are resized."""
        known = self._known.get(storage._cdata)
        if known is None:
            return
        reference, before = known
        self.log.free(before, self.place)
        after = self.log.allocate(storage.nbytes(), "buffers", self.place)
        self._known[storage._cdata] = (reference, after)


def kind_at(kind: str, place: str) -> str:
    """The kind of a collective at a place of a step where it is not FSDP's or DDP's own."""
    kinds = {
        ("all-gather", UPDATE): BETWEEN_COPIES,
        ("all-gather", CLIP): NORMS,
        ("all-reduce", SUM): SUMMED,
    }
    return kinds.get((kind, place), kind)


class _Inside(TorchDispatchMode):
    """Hands to the tracker, which is not active in its own calls, what they compute."""

    def __init__(self, tracker: LiveBytes) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._tracker.__torch_dispatch__(func, types, args, kwargs)
