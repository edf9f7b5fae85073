"""Does it fit? The strategies for so many processes, and what each needs of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from config.schema import SnapshotConfig
from model.gpt import GPTConfig
from planning.allocation_log import KINDS
from planning.estimate import MemoryEstimate, estimate_memory
from planning.fake_trace import DTYPES, Shape
from planning.snapshot_memory import written

GIB = 2**30
KEPT = ("parameters", "optimizer")
"""What a process keeps between updates."""
KEPT_ON_CPU = ("parameters", "gradients", "optimizer")
"""What offloading takes out of the GPU's memory."""
MOST_SEQUENCES = 4096
"""A micro-batch beyond it gains nothing."""
MULTIPROCESSORS = 188
"""The most that a GPU of NVIDIA's has."""
OUTSIDE = {"cuda": 0.75 * GIB, "cpu": 0.5 * GIB}
"""Estimated: a process's CUDA context and cuBLAS workspace, and what the allocator leaves unused;
on a CPU, Python with torch."""
OUTSIDE_TOGETHER = {"cuda": 0.5 * GIB, "cpu": 0.1 * GIB}
"""Estimated: what NCCL or gloo add in each of several processes."""


@dataclass(frozen=True)
class Strategy:
    """One way to run, and the shipped accelerate config for it."""

    name: str
    config: str
    shape: Shape
    offload: bool = False


@dataclass(frozen=True)
class Fit:
    """What a strategy needs of each process, in bytes, at a micro-batch."""

    strategy: Strategy
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    """The most of them at once."""
    buffers: float
    """The most at once of what travels between processes."""
    peak: float
    """The most of all that is in the memory asked about, at once: no more than their sum."""
    peaks: dict[str, float]
    """The same, in each phase of a run."""
    peak_in: str
    """The phase that has it."""
    outside: float
    """Beside tensors; an estimate."""
    on_cpu: float
    """What offloading keeps in the machine's memory instead."""
    writer: float
    """What the main process needs of a GPU's machine's memory to write a snapshot."""
    sent: float
    """Bytes that a process sends in a step."""
    largest_micro_batch: int
    """0 where not even one sequence fits."""
    fits: bool


def strategies(shape: Shape, machines: int) -> Iterator[Strategy]:
    """From the fastest to the one that needs least."""
    device, precision, processes = shape.device, shape.precision, shape.processes

    def of(shards: int) -> Shape:
        return Shape(device, precision, processes, shards)

    if processes == 1:
        config = "single_gpu.yaml" if device == "cuda" else "cpu.yaml"
        yield Strategy("one process", config, of(1))
        return
    if device == "cpu":
        yield Strategy("DDP", "ddp_cpu.yaml", of(1))
        yield Strategy("FSDP", "fsdp_cpu.yaml", of(processes))
        return
    several = machines > 1
    yield Strategy("DDP", "ddp_multinode.yaml" if several else "ddp.yaml", of(1))
    if several and processes > machines:
        yield Strategy("hybrid", "fsdp_hybrid.yaml", of(processes // machines))
    yield Strategy("FSDP", "fsdp_multinode.yaml" if several else "fsdp.yaml", of(processes))
    if precision != "fp16":  # which train.py refuses
        yield Strategy("FSDP, offload", "fsdp_offload.yaml", of(processes), offload=True)


class Candidate:
    """A strategy with the survey of a model under it."""

    def __init__(
        self, strategy: Strategy, config: GPTConfig, surveyed: MemoryEstimate, piece_bytes: int
    ) -> None:
        self.strategy = strategy
        self.config = config
        self.surveyed = surveyed
        self.elsewhere = KEPT_ON_CPU if strategy.offload else ()
        self.written = written(config, strategy.shape, piece_bytes, strategy.offload)

    def outside(self, sequences: int) -> float:
        """Bytes beside the traced tensors: an estimate."""
        shape, config = self.strategy.shape, self.config
        beside = OUTSIDE[shape.device]
        if shape.processes > 1:
            beside += OUTSIDE_TOGETHER[shape.device]
        if shape.device == "cuda":
            # Flash attention's backward sums the gradients of queries in float32, beside them. To
            # do so in one order it has a sum for each of the multiprocessors, where heads are few.
            sums = sequences + MULTIPROCESSORS / config.n_head
            beside += sums * config.block_size * config.n_embd * 4
        if self.strategy.offload:
            # The share of a group on its way to the GPU, and its gradients' on their way back.
            width = DTYPES[shape.precision].itemsize
            beside += _largest_group(config) / shape.shards * (width + 4)
        return beside

    def peaks(self, sequences: int, accumulating: bool) -> dict[str, float]:
        """Bytes of tensors in the memory asked about, at most, in each phase of a run."""
        shape = self.strategy.shape
        # DDP's gradients stay in the buckets that they are sent from.
        kept = KEPT if shape.processes == 1 or shape.shards > 1 else (*KEPT, "gradients")
        resting = sum(
            self.surveyed.largest(kind, sequences, accumulating)
            for kind in kept
            if kind not in self.elsewhere
        )
        traced = self.surveyed.peaks(sequences, accumulating, self.elsewhere)
        return {**traced, "snapshot": resting + self.written.on_device}

    def needed(self, sequences: int, accumulating: bool) -> float:
        """Bytes of the memory asked about, at a micro-batch."""
        return max(self.peaks(sequences, accumulating).values()) + self.outside(sequences)

    def largest(self, memory: float) -> int:
        """The largest micro-batch that fits, also while gradients accumulate."""
        return _largest(lambda sequences: self.needed(sequences, True) <= memory)

    def fit(self, memory: float, micro_batch_size: int, accumulation: int) -> Fit:
        """What it needs at this micro-batch, and whether that is at most `memory` bytes."""
        micro, accumulating, found = micro_batch_size, accumulation > 1, self.surveyed
        most = {kind: found.largest(kind, micro, accumulating) for kind in KINDS}
        peaks = self.peaks(micro, accumulating)
        return Fit(
            self.strategy,
            **most,
            peak=max(peaks.values()),
            peaks=peaks,
            peak_in=max(peaks, key=peaks.__getitem__),
            outside=self.outside(micro),
            on_cpu=sum(most[kind] for kind in self.elsewhere),
            writer=self.written.on_host,
            sent=found.sent(accumulation),
            largest_micro_batch=self.largest(memory),
            fits=self.needed(micro, accumulating) <= memory,
        )


def candidates(
    config: GPTConfig,
    shape: Shape,
    machines: int,
    piece_bytes: int = SnapshotConfig.piece_bytes,
) -> list[Candidate]:
    """All strategies that there are, surveyed: the fastest first, then by what they need."""
    surveyed = cache(estimate_memory)  # offloading is FSDP, kept elsewhere
    return [
        Candidate(strategy, config, surveyed(config, strategy.shape), piece_bytes)
        for strategy in strategies(shape, machines)
    ]


def micro_batch_that_fits(found: list[Candidate], share: int, memory: float) -> int:
    """The largest micro-batch that divides a process's share and fits the fastest strategy.

    Where none fits any: 1.
    """
    for candidate in found:
        if candidate.needed(share, False) <= memory:
            return share
        largest = candidate.largest(memory)
        if largest:
            return max(size for size in range(1, min(share, largest) + 1) if share % size == 0)
    return 1


def _largest_group(config: GPTConfig) -> int:
    """Parameters that FSDP gathers at once: a block, or the embedding with the last norm."""
    width = config.n_embd
    return max(12 * width * width + 13 * width, config.vocab_size * width + 2 * width)


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, where all smaller ones do."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= MOST_SEQUENCES and fits(high):
        low, high = high, 2 * high
    if high > MOST_SEQUENCES:
        return MOST_SEQUENCES
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
