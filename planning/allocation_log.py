"""The allocation log: bytes of live tensors at each allocation and deallocation.

It counts real and fake tensors in the same way, so that a plan's prediction and a run's measurement
are comparable. It sees only what passes torch's dispatcher, not the workspace inside a kernel or
the memory that an allocator or a driver reserves.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")
"""`activations` are all tensors without another kind, temporaries included; `buffers` are copies
for communication between processes, such as FSDP's gathered blocks."""

Place = tuple[Any, ...]
"""Where in a step an event happens, as the caller of the trace names it."""


@dataclass
class Allocation:
    """Memory that is allocated and perhaps freed again."""

    size: int
    kind: str


class LiveBytes(TorchDispatchMode):
    """While active, records every storage that an operation returns, and when it is freed."""

    def __init__(self, granule: int = 1, as_gloo: bool = False) -> None:
        """Sizes are rounded up to the granule of the device's allocator.

        With `as_gloo`, FSDP's reduce-scatter has a copy of its input, which gloo works on.
        """
        super().__init__()
        self._granule, self._as_gloo = granule, as_gloo
        self.place: Place = ()
        self.places: list[Place] = []
        """The place of each event: an allocation or a deallocation."""
        self._events: list[tuple[Allocation, int]] = []
        """1 for an allocation, -1 for a deallocation."""
        self._known: dict[int, tuple[weakref.ref[Any], Allocation]] = {}

    def totals(self) -> np.ndarray:
        """Live bytes (events, kinds) after each event, in the order of `KINDS`."""
        events = [*self._events]  # the garbage collector may add deallocations meanwhile
        changes = np.zeros((len(events), len(KINDS)), dtype=np.int64)
        for row, (allocation, sign) in zip(changes, events, strict=True):
            row[KINDS.index(allocation.kind)] = sign * allocation.size
        return changes.cumsum(axis=0)

    def mark(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Set the kind of these tensors (or of this process's shards of them)."""
        for tensor in tensors:
            if tensor is not None:
                self._record(tensor, kind).kind = kind

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_collective = getattr(func, "namespace", "") in ("c10d", "_c10d_functional", "fsdp")
        for leaf in tree_leaves((args, kwargs, result) if is_collective else result):
            if isinstance(leaf, Tensor):
                allocation = self._record(leaf, "activations")
                if is_collective and allocation.kind == "activations":
                    allocation.kind = "buffers"
        if self._as_gloo and "_reduce_scatter_base_" in str(func):
            self._free(self._allocate(args[1].nbytes, "activations"))
        return result

    def __enter__(self) -> LiveBytes:
        resize_ = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize_(storage, size)
            self._record_resize(storage)
            return result

        # FSDP2 frees and refills its buffers with it, which bypasses the dispatcher.
        self._resizing = patch.object(torch.UntypedStorage, "resize_", resize)
        self._resizing.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._resizing.stop()
        super().__exit__(*error)

    def _record(self, tensor: Tensor, kind: str) -> Allocation:
        local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        # The result of an unfinished collective operation wraps the real tensor.
        storage = getattr(local, "elem", local).untyped_storage()
        key = storage._cdata
        if key in self._known:
            return self._known[key][1]
        allocation = self._allocate(storage.nbytes(), kind)
        freed = weakref.ref(storage, lambda _: self._free(self._known.pop(key)[1]))
        self._known[key] = (freed, allocation)
        return allocation

    def _allocate(self, size: int, kind: str) -> Allocation:
        allocation = Allocation(-(-size // self._granule) * self._granule, kind)
        self._events.append((allocation, 1))
        self.places.append(self.place)
        return allocation

    def _free(self, allocation: Allocation) -> None:
        self._events.append((allocation, -1))
        self.places.append(self.place)

    def _record_resize(self, storage: torch.UntypedStorage) -> None:
        """Record a resize: only FSDP's buffers of gathered parameters are resized."""
        if (known := self._known.get(storage._cdata)) is not None:
            reference, before = known
            self._free(before)
            after = self._allocate(storage.nbytes(), "buffers")
            self._known[storage._cdata] = (reference, after)
