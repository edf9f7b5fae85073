"""The numbers in a snapshot's tensors, looked at while their files are read for the hash.

What is listed in a manifest and has the right shapes can still be of no use: one weight that is not
a number makes every loss one.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np

from snapshot.disk.contents import read_header
from snapshot.errors import SnapshotError

LARGEST = 1e18
"""Of a weight or a mean gradient. Squares of such a number, of which a layer norm or an attention
score sums as many as the model is wide, are beyond float32 (3.4e38), so no loss is finite there.
Weights that learn stay below 1e3."""
LARGEST_SQUARE = int(np.array(LARGEST**2, "<f4").view("<u4"))
MOST_COUNTED = 2**24
"""A float32 that counts by ones, as AdamW's step does, stays there."""
TENSORS = ".safetensors"


class Numbers:
    """Of all files of a snapshot; `of` is for `verify` and `atomic_snapshot`."""

    def __init__(self) -> None:
        self.updates: set[float] = set()
        """How many updates the optimizer has counted; one number, in a snapshot that is right."""

    def of(self, path: Path) -> FileNumbers | None:
        """What looks at the numbers of a file as it is read; None for one without tensors."""
        try:
            return FileNumbers(path, self.updates) if path.suffix == TENSORS else None
        except SnapshotError:
            return None  # its header says nothing true, which is reported with the contents

    def check_updates(self, folder: Path, step: int, skipped: int) -> None:
        """Raise SnapshotError unless the optimizer has counted as many updates as the run.

        Steps that fp16's loss scaler has `skipped` are no updates.
        """
        least, most = min(step - skipped, MOST_COUNTED), min(step, MOST_COUNTED)
        for counted in sorted(self.updates):
            if not least <= counted <= most:
                raise SnapshotError(
                    f"{folder} is of step {step}, but its optimizer has counted {counted:g} updates"
                )
        if len(self.updates) > 1:
            raise SnapshotError(f"{folder}: not all weights were updated as often")


class FileNumbers:
    """Takes the bytes of a safetensors file of float32 in order; `fault` is the first fault."""

    def __init__(self, path: Path, updates: set[float]) -> None:
        """Raises SnapshotError where the file's header is not true of it."""
        tensors = [(name, prod(shape)) for name, shape in read_header(path).items()]
        self.fault: str | None = None
        self._path, self._updates = path, updates
        self._skip = path.stat().st_size - 4 * sum(size for _, size in tensors)
        self._tensors = iter(tensors)
        self._name, self._left = "", 0
        self._half = b""
        """The beginning of a number that the last part ended in."""

    def update(self, part: memoryview) -> None:
        """Look at the next bytes of the file."""
        skipped = min(self._skip, len(part))
        self._skip -= skipped
        part = part[skipped:]
        if self._half:
            missing = 4 - len(self._half)
            self._half += bytes(part[:missing])
            part = part[missing:]
            if len(self._half) < 4:
                return
            self._look(np.frombuffer(self._half, "<f4"))
        whole = len(part) // 4 * 4
        self._look(np.frombuffer(part[:whole], "<f4"))
        self._half = bytes(part[whole:])

    def _look(self, numbers: np.ndarray) -> None:
        while len(numbers):
            if not self._left:
                # More than the header has: the file has grown, and its hash is wrong.
                self._name, self._left = next(self._tensors, ("", len(numbers)))
                continue
            mine, numbers = numbers[: self._left], numbers[self._left :]
            self._left -= len(mine)
            if not _surely_sound(mine, self._name):
                self._compare(float(mine.min()), float(mine.max()))  # not a number where one is not

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


def _surely_sound(numbers: np.ndarray, name: str) -> bool:
    """Whether one pass over the numbers shows them to be within their bounds."""
    if name.endswith(".step"):
        return False
    if name.endswith(".exp_avg_sq"):  # as whole numbers, what is negative or no number is larger
        return bool(numbers.view("<u4").max() <= LARGEST_SQUARE)
    with np.errstate(all="ignore"):
        return bool(np.dot(numbers, numbers) <= LARGEST**2)


def _bounds(name: str) -> tuple[float, float]:
    """The least and the most that a number of a tensor may be."""
    if name.endswith(".exp_avg_sq"):
        return 0.0, LARGEST**2
    if name.endswith(".step"):
        return 0.0, float(MOST_COUNTED)
    return -LARGEST, LARGEST
