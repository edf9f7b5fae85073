"""The bytes of live tensors, counted as they come and go.

For real and for fake tensors alike, so that what a plan predicts and what a run measures are the
same thing. Counted is what passes torch's dispatcher: not the scratch space inside a kernel, not
what an allocator or a driver keeps beside it.
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

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")
"""`activations` are all that nobody has claimed, temporaries included; `buffers` are copies that
travel between processes: DDP's buckets, FSDP's gathered blocks."""

Place = tuple[Any, ...]
"""Where in an update something happens, as whoever traces it calls it."""


@dataclass
class Lifetime:
    """One allocation: its bytes, and between which events it lived."""

    size: int
    kind: str
    born: int
    died: int | None = None


@dataclass
class AllocationLog:
    """All allocations in order. An event is a birth or a death."""

    granule: int
    lifetimes: list[Lifetime] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    """Of each event."""

    def allocate(self, size: int, kind: str, place: Place) -> Lifetime:
        """A birth. Sizes are rounded up as the device's allocator does it."""
        rounded = -(-size // self.granule) * self.granule
        lifetime = Lifetime(rounded, kind, len(self.places))
        self.places.append(place)
        self.lifetimes.append(lifetime)
        return lifetime

    def free(self, lifetime: Lifetime, place: Place) -> None:
        """A death."""
        if lifetime.died is None:
            lifetime.died = len(self.places)
            self.places.append(place)

    def totals(self) -> np.ndarray:
        """Live bytes (events, kinds) after each event, in the order of `KINDS`."""
        events = len(self.places)  # deaths can still come in meanwhile
        changes = np.zeros((events, len(KINDS)), dtype=np.int64)
        for lifetime in self.lifetimes:
            column = KINDS.index(lifetime.kind)
            changes[lifetime.born, column] += lifetime.size
            if lifetime.died is not None and lifetime.died < events:
                changes[lifetime.died, column] -= lifetime.size
        return changes.cumsum(axis=0)


class LiveBytes(TorchDispatchMode):
    """While active, enters into `ledger` every storage that an operation returns."""

    def __init__(self, granule: int = 1) -> None:
        super().__init__()
        self.log = AllocationLog(granule)
        self.place: Place = ()
        self.traffic: Counter[tuple[Place, str]] = Counter()
        """Bytes by place (its first two words) and kind of collective operation."""
        self._known: dict[int, tuple[weakref.ref[Any], Lifetime]] = {}
        self._resize = torch.UntypedStorage.resize_

    def mark(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Say what these tensors (or this process's shards of them) are."""
        for tensor in tensors:
            if tensor is not None:
                self._see(tensor, kind).kind = kind

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        travels = getattr(func, "namespace", "") in ("c10d", "_c10d_functional", "fsdp")
        for leaf in tree_leaves((args, kwargs, result) if travels else result):
            if isinstance(leaf, Tensor):
                lifetime = self._see(leaf, "activations")
                if travels and lifetime.kind == "activations":
                    lifetime.kind = "buffers"
        if travels:
            self._count_traffic(str(func), args)
        return result

    def __enter__(self) -> LiveBytes:
        tracker = self

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = tracker._resize(storage, size)
            tracker._resized(storage)
            return result

        # FSDP2 frees and refills its buffers by it, past the dispatcher.
        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def _count_traffic(self, name: str, args: tuple[Any, ...]) -> None:
        """Of a collective operation, the bytes of the whole that is gathered or reduced."""
        for word, whole in (("allgather", 0), ("reduce_scatter", 1), ("allreduce", 0)):
            if word in name:
                tensors = [leaf for leaf in tree_leaves(args[whole]) if isinstance(leaf, Tensor)]
                self.traffic[self.place[:2], word] += sum(t.nbytes for t in tensors)

    def _see(self, tensor: Tensor, kind: str) -> Lifetime:
        held = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        # The result of a collective operation on its way wraps the tensor that there is.
        storage = getattr(held, "elem", held).untyped_storage()
        key = storage._cdata
        if key in self._known:
            return self._known[key][1]
        lifetime = self.log.allocate(storage.nbytes(), kind, self.place)
        self._known[key] = (weakref.ref(storage, lambda _: self._freed(key)), lifetime)
        return lifetime

    def _freed(self, key: int) -> None:
        self.log.free(self._known.pop(key)[1], self.place)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Only the gathered parameters of FSDP are ever resized."""
        known = self._known.get(storage._cdata)
        if known is None:
            return
        reference, before = known
        self.log.free(before, self.place)
        after = self.log.allocate(storage.nbytes(), "buffers", self.place)
        self._known[storage._cdata] = (reference, after)
