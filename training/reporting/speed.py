"""Where the time of an attempt goes, and how much of the machine a run uses (MFU).

The model FLOP utilisation of Chowdhery et al. (2022, appendix B) counts what the model needs, not
what is computed: a recomputed block counts once. The peak is that of 16 bits, with fp8 as well.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from accelerate import Accelerator

from config.schema import Config
from model.family import LanguageModel

Item = TypeVar("Item")
START, DATA, PASSES, UPDATE = "start", "data", "forward and backward", "update"
SNAPSHOT, EVALUATION, UPLOAD, END = "snapshot", "evaluation and sample", "upload", "end"
PHASES = (START, DATA, PASSES, UPDATE, SNAPSHOT, EVALUATION, UPLOAD, END)
"""The phase of the upload is the wait for the last one; others run in the background."""
STEP = (DATA, PASSES, UPDATE)
"""The phases of a step."""

PEAKS = (
    (r"\bB200\b", 2250e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100 NVL\b", 835e12),
    (r"\b(H100|H200|GH200)\b", 989e12),
    (r"\bA100\b", 312e12),
    (r"\bL40S\b", 362e12),
    (r"\bL4\b", 121e12),
    (r"\bA10G\b", 70e12),
    (r"\bRTX 4090\b", 165e12),
    (r"\bRTX 3090\b", 71e12),
)
"""FLOP/s by the name of a GPU, as NVIDIA publishes them: 16-bit tensor cores with float32 sums and
without sparsity."""


class PhaseClock:
    """Divides the wall time of this process among the phases; their sum is all of it.

    A GPU computes behind the host. Its time counts for the phase in which the host waits for it.
    """

    def __init__(self, seconds_before: float) -> None:
        """Begin in the phase of the start, which has lasted so long already."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._phase, self._since = START, time.perf_counter() - seconds_before

    def enter(self, phase: str) -> None:
        """Begin a phase, one of `PHASES`; the one before it ends."""
        now = time.perf_counter()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Enter a phase, and return to the one before it afterwards."""
        before = self._phase
        self.enter(phase)
        yield
        self.enter(before)

    @property
    def seconds_of_steps(self) -> float:
        """Seconds of all steps so far, without evaluations and snapshots."""
        self.enter(self._phase)
        return sum(self.seconds[phase] for phase in STEP)

    def timed(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Yield the batches; the wait for each counts as the phase of the data."""
        iterator = iter(batches)
        while True:
            self.enter(DATA)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.enter(PASSES)
            yield batch

    def table(self) -> list[str]:
        """A line for each phase: seconds and share."""
        self.enter(self._phase)
        total = sum(self.seconds.values())
        rows = [*self.seconds.items(), ("all", total)]
        return [f"{name:<22} {took:>9,.1f} s {took / total:>7.1%}" for name, took in rows]


def speed_at_peak(model: LanguageModel, config: Config, accelerator: Accelerator) -> float | None:
    """Tokens/s of all processes at the peak of their GPUs; None for a mixture, and if unknown."""
    device, flops = accelerator.device, model.flops_per_token(config.data.block_size)
    if device.type != "cuda" or flops is None:
        return None
    peak = published_peak(torch.cuda.get_device_name(device), accelerator.mixed_precision)
    return None if peak is None else peak * accelerator.num_processes / flops


def published_peak(name: str, precision: str) -> float | None:
    """FLOP/s of a GPU by its name; None in float32, and if it is unknown."""
    peaks = (peak for pattern, peak in PEAKS if re.search(pattern, name))
    return None if precision == "no" else next(peaks, None)
