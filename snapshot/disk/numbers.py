"""Checks of the numbers in a snapshot's tensors, made while their files are read for the hash.

What the optimizer has counted is also checked before a snapshot is written.

A snapshot with correct hashes and shapes can still be useless: one weight that is NaN makes every
loss NaN.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch.optim import Optimizer

from model.layout import Layout
from model.sharded import local_part
from optim.optimizers import STEP
from snapshot.disk.files import sha256_of
from snapshot.disk.reading import read_header
from snapshot.errors import SnapshotError, Unresumable

LARGEST = 1e18
"""The largest weight or mean gradient. A layer norm or an attention score sums as many squares as
the model is wide; with larger numbers the sum exceeds float32 (3.4e38) and no loss is finite.
Weights in training stay below 1e3."""
LARGEST_SQUARE = int(np.array(LARGEST**2, "<f4").view("<u4"))
LARGEST_COUNT = 2**24
"""A float32 counter such as AdamW's step cannot count further by ones."""
TENSOR_SUFFIX = ".safetensors"


class NumberChecks:
    """Checks all files of one snapshot. `read` is for `verify` and `atomic_snapshot`."""

    def __init__(self) -> None:
        self.updates: set[float] = set()
        """How many updates the optimizer has counted: one number, in a correct snapshot."""

    def read(self, path: Path) -> tuple[str, str | None]:
        """The sha256 of a file, and what is wrong with its numbers. Raises OSError."""
        check = None
        if path.suffix == TENSOR_SUFFIX:
            with suppress(SnapshotError):  # its header is wrong, which `check_contents` reports
                check = FileNumberCheck(path, self.updates)
        digest = sha256_of(path, None if check is None else check.update)
        return digest, None if check is None else check.fault

    def check_updates(self, folder: Path, step: int, skipped: int) -> None:
        """Raise SnapshotError unless the optimizer has counted the updates of `step` steps.

        The `skipped` steps, which fp16's loss scaler skipped, need not be among them.
        """
        for counted in wrong_counts(self.updates, step, skipped):
            raise SnapshotError(
                f"{folder} is of step {step}, but its optimizer has counted {counted:g} updates"
            )
        if len(self.updates) > 1:
            raise SnapshotError(f"{folder}: not all weights have the same number of updates")


def wrong_counts(updates: Iterable[float], step: int, skipped: int) -> list[float]:
    """Which numbers of updates are not those of `step` steps (see `NumberChecks`)."""
    least, most = min(step - skipped, LARGEST_COUNT), min(step, LARGEST_COUNT)
    return [counted for counted in sorted(updates) if not least <= counted <= most]


def refuse_other_counts(layout: Layout, optimizer: Optimizer, step: int, skipped: int) -> None:
    """Raise Unresumable unless the optimizer has counted an update of all parameters a step.

    fp16's loss scaler has skipped `skipped` of them. This waits for the device.
    """
    states = [optimizer.state.get(one, {}) for one in layout.trained().values()]
    counts = [local_part(state[STEP]).float() for state in states if STEP in state]
    if not counts:
        return
    updates = {*torch.stack([one.to(counts[0].device) for one in counts]).tolist()}
    if wrong_counts(updates, step, skipped) or len(updates) > 1:
        found = " or ".join(f"{counted:g}" for counted in sorted(updates))
        raise Unresumable(
            f"the optimizer has counted {found} updates in {step} steps, so no snapshot could be "
            "resumed from. Call optimizer.step() once in each step, also where the update is to "
            "be left out: set its learning rate to 0, or its gradients to zero. A layer that a "
            "step leaves out needs a gradient of zero: x + 0 * layer(x)"
        )


class FileNumberCheck:
    """Checks the bytes of a safetensors file of float32, in order; `fault` is the first fault."""

    def __init__(self, path: Path, updates: set[float]) -> None:
        """Raises SnapshotError if the file's header is wrong."""
        tensors = [(name, prod(shape)) for name, shape in read_header(path).items()]
        self.fault: str | None = None
        self._path, self._updates = path, updates
        self._skip = path.stat().st_size - 4 * sum(size for _, size in tensors)
        self._tensors = iter(tensors)
        self._name, self._left = "", 0
        self._partial = b""
        """The first bytes of a number whose rest is in the next part."""

    def update(self, part: memoryview) -> None:
        """Check the next bytes of the file."""
        skipped = min(self._skip, len(part))
        self._skip -= skipped
        part = part[skipped:]
        if self._partial:
            missing = 4 - len(self._partial)
            self._partial += bytes(part[:missing])
            part = part[missing:]
            if len(self._partial) < 4:
                return
            self._check(np.frombuffer(self._partial, "<f4"))
        complete = len(part) // 4 * 4
        self._check(np.frombuffer(part[:complete], "<f4"))
        self._partial = bytes(part[complete:])

    def _check(self, numbers: np.ndarray) -> None:
        while len(numbers):
            if not self._left:
                # Beyond the tensors of the header: the file has grown, so its hash is wrong.
                self._name, self._left = next(self._tensors, ("", len(numbers)))
                continue
            part, numbers = numbers[: self._left], numbers[self._left :]
            self._left -= len(part)
            if not _clearly_in_bounds(part, self._name):
                self._compare(float(part.min()), float(part.max()))  # NaN if any number is NaN

    def _compare(self, least: float, most: float) -> None:
        low, high = _bounds(self._name)
        if self._name.endswith(".step"):
            self._updates |= {least, most}
        if self.fault is None and not low <= least <= most <= high:
            wrong = most if low <= least else least
            self.fault = (
                f"{self._path} has {wrong:g} in {self._name[:100]!r}, where only numbers from "
                f"{low:g} to {high:g} make sense"
            )


def _clearly_in_bounds(numbers: np.ndarray, name: str) -> bool:
    """Whether a single fast pass shows that all numbers are within their bounds."""
    if name.endswith(".step"):
        return False
    if name.endswith(".exp_avg_sq"):  # as unsigned integers, negative numbers and NaN are larger
        return bool(numbers.view("<u4").max() <= LARGEST_SQUARE)
    with np.errstate(all="ignore"):
        return bool(np.dot(numbers, numbers) <= LARGEST**2)


def _bounds(name: str) -> tuple[float, float]:
    """The smallest and the largest number that a tensor may hold."""
    if name.endswith(".exp_avg_sq"):
        return 0.0, LARGEST**2
    if name.endswith(".step"):
        return 0.0, float(LARGEST_COUNT)
    return -LARGEST, LARGEST
