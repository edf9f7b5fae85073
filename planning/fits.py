"""Does it fit? The strategies for a number of processes, the memory of each, and the advice."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from omegaconf import OmegaConf

from model.families import build_model
from model.family import ModelConfig, parameter_count
from model.fp8 import FP8
from model.recompute import OFFLOAD
from planning.allocation_log import KINDS
from planning.estimate import MemoryEstimate
from planning.fake_trace import DTYPES, Shape

GIB = 2**30
OFFLOADED = ("parameters", "gradients", "optimizer")
"""The kinds of tensors that offloading moves to the CPU's memory."""
HOST = "host"
"""The kind that is always there: inputs of blocks, by model.activation_checkpointing=offload."""
MOST_SEQUENCES = 4096
"""A larger micro-batch has no advantage."""
MULTIPROCESSORS = 188
"""The largest number of multiprocessors of NVIDIA's GPUs."""
CONTEXT = {"cuda": 0.5 * GIB, "cpu": 0.5 * GIB}
"""Estimated: a process's CUDA context with the kernels that it has loaded (0.3 to 0.6 GiB in public
reports, such as pytorch issues 107667 and 109888); on a CPU, Python with torch."""
COMMUNICATOR = {"cuda": 0.5 * GIB, "cpu": 0.1 * GIB}
"""Estimated: a communicator's buffers in NCCL or gloo. NCCL has 10 + 2 MiB for each of up to 32
channels (NCCL issue 1685), which is 0.38 GiB. Others have measured 0.38 to 0.46 GiB (sglang pull
request 35538), and 0.53 to 0.67 GiB with an NCCL of 2023 between A100s (NCCL issue 964)."""
SLACK = {"cuda": 0.25 * GIB, "cpu": 0.0}
"""Left free for cuBLAS workspaces and the allocator's fragments."""
EXIT_NOTHING_FITS = 3
CONFIGS = "accelerate_configs"


@dataclass(frozen=True)
class Strategy:
    """A way to distribute a run, and the shipped accelerate config file for it."""

    name: str
    config: str
    shape: Shape
    offload: bool = False

    @property
    def communicators(self) -> int:
        """How many NCCL or gloo communicators a process has: one of all processes, and others.

        These are of the shards and of the replicas, and of those that share sequences or matrices.
        torch creates a communicator at the first collective of a group of processes: accelerate's
        mesh has more groups, without any.
        """
        shape = self.shape
        groups = (shape.shards, shape.copies, shape.context, shape.tensor)
        others = sum(size not in (1, shape.processes) for size in groups)
        return 0 if shape.processes == 1 else 1 + others


@dataclass(frozen=True)
class Fit:
    """The memory of each process under a strategy at a micro-batch, in bytes."""

    strategy: Strategy
    kinds: dict[str, float]
    """The most bytes of each kind of tensor, one of `KINDS`."""
    peak: float
    """The largest sum of all tensors in the limited memory."""
    outside: float
    """Estimate of the memory outside tensors."""
    on_cpu: float
    """Tensors that offloading stores in the CPU's memory."""
    largest_micro_batch: int
    """Sequences; 0 if not even one fits."""
    fits: bool


def strategies(shape: Shape, machines: int) -> Iterator[Strategy]:
    """All strategies, from the fastest to the one with the lowest memory."""
    device, precision, processes = shape.device, shape.precision, shape.processes

    def of(shards: int) -> Shape:
        return replace(shape, shards=shards)

    if processes == 1:
        config = "single_gpu.yaml" if device == "cuda" else "cpu.yaml"
        yield Strategy("one process", config, of(1))
        return
    if shape.context > 1 or shape.tensor > 1:
        yield mesh_strategy(of(processes // shape.tensor), machines)
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
    if precision != "fp16" and shape.sync_each:  # train.py refuses it
        yield Strategy("FSDP, offload", "fsdp_offload.yaml", of(processes), offload=True)


def mesh_strategy(shape: Shape, machines: int) -> Strategy:
    """The strategy of processes that share something, named by the sizes of its mesh above 1."""
    sizes = {"replicate": shape.copies, "shard": shape.shards // shape.context}
    sizes |= {"cp": shape.context, "tp": shape.tensor}
    name = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    config = "cp" if shape.context > 1 else "tp"
    if machines > 1:
        config = "fsdp_hybrid"
    elif shape.device == "cpu":
        config = "fsdp_tp_cpu" if config == "tp" and shape.shards > 1 else f"{config}_cpu"
    return Strategy(name, f"{config}.yaml", shape)


@dataclass(frozen=True)
class Candidate:
    """A strategy with the memory estimate of a model under it."""

    strategy: Strategy
    estimate: MemoryEstimate

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """The kinds of tensors in the machine's memory."""
        return (*OFFLOADED, HOST) if self.strategy.offload else (HOST,)

    def outside(self, sequences: int) -> float:
        """Bytes of memory other than traced tensors: an estimate."""
        shape, config = self.strategy.shape, self.estimate.config
        size = CONTEXT[shape.device] + SLACK[shape.device]
        size += self.strategy.communicators * COMMUNICATOR[shape.device]
        if shape.device == "cuda":
            # Flash attention's backward pass has additional float32 sums of the query gradients:
            # with few heads, one for each multiprocessor, for a deterministic order.
            sums = sequences + MULTIPROCESSORS / (config.n_head / shape.tensor)
            queries = config.block_size / shape.context * config.n_embd / shape.tensor
            size += sums * queries * 4
        if self.strategy.offload:
            # A group's shard in transfer to the GPU, and the shard of its gradients back.
            width = DTYPES[shape.precision].itemsize
            size += _largest_group(config) / shape.shards * (width + 4)
        return size

    def needed(self, sequences: int, accumulating: bool) -> float:
        """Bytes of the limited memory that are needed at a micro-batch."""
        peak = self.estimate.peak(sequences, accumulating, self.elsewhere)
        return peak + self.outside(sequences)

    def largest(self, memory: float) -> int:
        """The largest micro-batch that fits, also while gradients accumulate."""
        return largest_that_fits(lambda sequences: self.needed(sequences, True), memory)

    def fit(self, memory: float, micro_batch_size: int, accumulation: int) -> Fit:
        """The memory at this micro-batch, and whether it is at most `memory` bytes."""
        micro, accumulating = micro_batch_size, accumulation > 1
        kinds = {kind: self.estimate.largest(kind, micro, accumulating) for kind in KINDS}
        return Fit(
            self.strategy,
            kinds,
            peak=self.estimate.peak(micro, accumulating, self.elsewhere),
            outside=self.outside(micro),
            on_cpu=sum(kinds[kind] for kind in self.elsewhere),
            largest_micro_batch=self.largest(memory),
            fits=self.needed(micro, accumulating) <= memory,
        )


def candidates(
    config: ModelConfig,
    shape: Shape,
    machines: int,
) -> list[Candidate]:
    """All strategies with their memory estimates, from the fastest to the lowest memory."""
    # FSDP has the same shape with and without offloading: one estimate serves both.
    estimate = lru_cache(MemoryEstimate)
    return [
        Candidate(strategy, estimate(config, strategy.shape))
        for strategy in strategies(shape, machines)
    ]


def micro_batch_that_fits(strategies: list[Candidate], sequences: int, memory: float) -> int:
    """The largest micro-batch that fits the fastest strategy; 1 if nothing fits.

    It divides the `sequences` that each process computes in a step.
    """
    for candidate in strategies:
        if candidate.needed(sequences, False) <= memory:
            return sequences
        if largest := candidate.largest(memory):
            return largest_divisor(sequences, largest)
    return 1


def largest_divisor(sequences: int, most: int) -> int:
    """The largest divisor of `sequences` that is at most `most`."""
    return max(size for size in range(1, min(sequences, most) + 1) if sequences % size == 0)


def _largest_group(config: ModelConfig) -> int:
    """Parameters of FSDP's largest group: a block, or the embeddings with the final norm."""
    with torch.device("meta"):
        model = build_model(config.with_layers(1))
    embeddings = parameter_count(model.get_input_embeddings()) + 2 * config.n_embd
    return max(parameter_count(model.blocks), embeddings)


def largest_that_fits(needed: Callable[[int], float], memory: float) -> int:
    """The largest number of sequences whose bytes fit; 0 if one does not.

    Bytes are nearly a line over sequences, so the place where it crosses `memory` is asked next,
    until a number that fits is next to one that does not.
    """
    low, high, before = 0, MOST_SEQUENCES + 1, (0, 0.0)
    ask = 1
    while high - low > 1:
        size = needed(ask)
        low, high = (ask, high) if size <= memory else (low, ask)
        slope = (size - before[1]) / (ask - before[0])
        before = ask, size
        crossing = ask + (memory - size) / slope if low and slope > 0 else 2 * ask
        ask = min(max(low + 1, int(crossing)), high - 1)
    return low


def advise(
    fits: list[Fit],
    model: ModelConfig,
    requested: int | None,
    chosen: int | None,
    here: int,
    overrides: Sequence[str] = (),
) -> tuple[str, int]:
    """The advice as a sentence, and the exit code. The first strategy that fits is the fastest.

    `requested` is train.micro_batch_size; `chosen` is the one that fits, if train.py would take
    another. A machine has `here` processes. `overrides` are the arguments of train.py.
    """
    for row in fits:
        if row.fits:
            words = [*overrides]
            if chosen is not None and requested is None:
                words.append(f"train.micro_batch_size={chosen}")
            return f"It fits{_where(row, here)}: {_command(row, here, words)}", 0
    for row in fits:
        if row.largest_micro_batch:
            return (
                f"train.micro_batch_size={requested} does not fit. {row.strategy.name} fits at "
                f"most {row.largest_micro_batch}."
            ), EXIT_NOTHING_FITS
    remedies = ["more processes", "more memory", "a smaller model or data.block_size"]
    if model.activation_checkpointing != OFFLOAD:
        stronger = OFFLOAD if model.activation_checkpointing is True else "true"
        remedies.insert(0, f"model.activation_checkpointing={stronger}")
    return f"Nothing fits, not even one sequence. Try {', '.join(remedies)}.", EXIT_NOTHING_FITS


def _command(row: Fit, here: int, words: list[str]) -> str:
    """The command for a strategy, with options where the plan differs from its config file."""
    config, shape = f"{CONFIGS}/{row.strategy.config}", row.strategy.shape
    machines = shape.processes // here
    planned = {
        "num_processes": shape.processes,
        "num_machines": machines,
        "mixed_precision": shape.precision if shape.fp8 is None else FP8,
        "parallelism_config_dp_replicate_size": shape.copies,
        "parallelism_config_dp_shard_size": shape.shards // shape.context,
        "parallelism_config_cp_size": shape.context,
        "parallelism_config_tp_size": shape.tensor,
    }
    file = OmegaConf.to_container(OmegaConf.load(Path(__file__).parent.parent / config))
    assert isinstance(file, dict)
    sizes = file.get("parallelism_config", {})
    unwritten = {name: 1 for name in planned if sizes and name.startswith("parallelism_config")}
    written = unwritten | file | sizes
    options = [
        f"--{name}={planned[name]}"
        for name in planned.keys() & written.keys()
        if written[name] != planned[name]
    ]
    command = ["accelerate", "launch", "--config_file", config, *sorted(options, reverse=True)]
    return shlex.join([*command, "train.py", *words])


def _where(row: Fit, here: int) -> str:
    """The condition for offloading, which takes the machine's memory."""
    if not row.on_cpu:
        return ""
    needed = here * row.on_cpu / GIB
    return f" where each machine has {needed:,.1f} GiB of memory left for its {here} processes"
