"""Copies of the tensors that a snapshot writes, so that the next update need not wait for the disk.

The thread that writes begins with the first part. Where the update comes before the last one is
written, the parts that are left are copied, as far as there is memory for copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Condition

import torch
from torch import Tensor

from snapshot.disk.entries import Part
from snapshot.disk.tensor_files import TensorFiles


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
