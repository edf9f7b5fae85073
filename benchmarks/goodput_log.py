"""What all trainers of goodput.py share: their sizes, and a log of what each step computes."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time

import torch
from torch import Tensor

T, WIDTH, LAYERS, HEADS, RATE, SEED = 32, 64, 2, 2, 1e-3, 7
BATCH = 12
GONE_SECONDS = 10
"""After which a process that is silent is given up, in all trainers."""


class Log:
    """What this process computes, step by step: a file that no lost disk takes away."""

    def __init__(self, options: argparse.Namespace, machines: int) -> None:
        """`machines`: as many as share a step."""
        self.seconds = options.seconds / machines
        path = options.folder / f"{options.machine}-{os.getpid()}-{time.time():.3f}.jsonl"
        self._file = path.open("w", buffering=1)
        self._rows: list[str] = []
        self._begin = time.time()

    def begin(self) -> None:
        """A step begins."""
        self._begin, self._rows = time.time(), []

    def rows(self, inputs: Tensor) -> None:
        """The step trains on these rows (B, T)."""
        for row in inputs.to(torch.int64).cpu():
            digest = hashlib.blake2b(row.numpy().tobytes(), digest_size=6)
            self._rows.append(digest.hexdigest())

    def pace(self) -> None:
        """Wait until the step has taken its time."""
        time.sleep(max(0.0, self._begin + self.seconds - time.time()))

    def end(self, step: int, loss: float) -> None:
        """The step is done."""
        line = {"step": step, "begin": self._begin, "end": time.time(), "rows": self._rows}
        self._file.write(json.dumps({**line, "loss": loss}) + "\n")
        self.begin()


def world_size() -> int:
    """As the launcher says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def finish(options: argparse.Namespace) -> None:
    """The run has its last step."""
    (options.folder / "finished").touch()
