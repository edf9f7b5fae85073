"""Does it fit? The strategies for a number of processes, the memory of each, and the advice."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from model.families import build_model
from model.family import ModelConfig, parameter_count
from planning.allocation_log import KINDS
from planning.estimate import peak_bytes
from planning.fake_trace import DTYPES, Shape

GIB = 2**30
OFFLOADED = ("parameters", "gradients", "optimizer")
"""The kinds of tensors that offloading moves to the CPU's memory. FSDP has the same without it."""
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


@dataclass(frozen=True)
class Strategy:
    """A way to distribute a model: the shipped accelerate config file and the memory it takes."""

    name: str
    file: str
    model: ModelConfig
    shape: Shape
    offload: bool = False

    @property
    def communicators(self) -> int:
        """How many NCCL or gloo communicators a process has: one for each group with collectives.

        accelerate's mesh has more groups, without any.
        """
        shape = self.shape
        groups = (shape.shards, shape.copies, shape.context, shape.tensor)
        others = sum(size not in (1, shape.processes) for size in groups)
        return 0 if shape.processes == 1 else 1 + others

    def peak(self, sequences: int, accumulating: bool) -> float:
        """The largest sum of all tensors in the limited memory, in bytes."""
        kinds = [kind for kind in KINDS if not (self.offload and kind in OFFLOADED)]
        return peak_bytes(self.model, self.shape, sequences, accumulating, kinds)

    def outside(self, sequences: int) -> float:
        """Bytes of memory other than traced tensors: an estimate."""
        shape, model = self.shape, self.model
        size = CONTEXT[shape.device] + SLACK[shape.device]
        size += self.communicators * COMMUNICATOR[shape.device]
        if shape.device == "cuda":
            # Flash attention's backward pass has additional float32 sums of the query gradients:
            # with few heads, one for each multiprocessor, for a deterministic order.
            sums = sequences + MULTIPROCESSORS / (model.n_head / shape.tensor)
            size += sums * model.block_size / shape.context * model.n_embd / shape.tensor * 4
        if self.offload:
            # A group's shard in transfer to the GPU, and the shard of its gradients back.
            width = DTYPES[shape.precision].itemsize
            size += _largest_group(model) / shape.shards * (width + 4)
        return size

    def needed(self, sequences: int, accumulating: bool) -> float:
        """Bytes of the limited memory that are needed at a micro-batch."""
        return self.peak(sequences, accumulating) + self.outside(sequences)

    def largest(self, memory: float) -> int:
        """The largest micro-batch that fits, also while gradients accumulate."""
        return largest_that_fits(lambda sequences: self.needed(sequences, True), memory)

    def fit(self, memory: float, micro_batch_size: int, accumulating: bool) -> Fit:
        """The memory at this micro-batch, and whether it is at most `memory` bytes."""
        step = (micro_batch_size, accumulating)
        kinds = {kind: peak_bytes(self.model, self.shape, *step, [kind]) for kind in KINDS}
        peak, outside = self.peak(*step), self.outside(micro_batch_size)
        return Fit(self, kinds, peak, outside, self.largest(memory), peak + outside <= memory)


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
    largest_micro_batch: int
    """Sequences; 0 if not even one fits."""
    fits: bool


def strategies(model: ModelConfig, shape: Shape, machines: int) -> Iterator[Strategy]:
    """All strategies, from the fastest to the one with the lowest memory."""
    processes, on_gpu = shape.processes, shape.device == "cuda"

    def of(name: str, file: str, shards: int, offload: bool = False) -> Strategy:
        return Strategy(name, file, model, replace(shape, shards=shards), offload)

    def file(kind: str) -> str:
        where = "_cpu" if not on_gpu else "_multinode" if machines > 1 else ""
        return f"{kind}{where}.yaml"

    if processes == 1:
        yield of("one process", "single_gpu.yaml" if on_gpu else "cpu.yaml", 1)
        return
    if shape.context > 1 or shape.tensor > 1:
        yield mesh_strategy(model, replace(shape, shards=processes // shape.tensor), machines)
        return
    yield of("DDP", file("ddp"), 1)
    if on_gpu and 1 < machines < processes:
        yield of("hybrid", "fsdp_hybrid.yaml", processes // machines)
    yield of("FSDP", file("fsdp"), processes)
    if on_gpu and shape.precision != "fp16" and shape.sync_each:  # train.py refuses the others
        yield of("FSDP, offload", "fsdp_offload.yaml", processes, offload=True)


def mesh_strategy(model: ModelConfig, shape: Shape, machines: int) -> Strategy:
    """The strategy of processes that share something, named by the sizes of its mesh above 1."""
    sizes = {"replicate": shape.copies, "shard": shape.shards // shape.context}
    sizes |= {"cp": shape.context, "tp": shape.tensor}
    name = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    file = "cp" if shape.context > 1 else "tp"
    if machines > 1:
        file = "fsdp_hybrid"
    elif shape.device == "cpu":
        file = "fsdp_tp_cpu" if file == "tp" and shape.shards > 1 else f"{file}_cpu"
    return Strategy(name, f"{file}.yaml", model, shape)


@cache
def _largest_group(config: ModelConfig) -> int:
    """Parameters of FSDP's largest group: a block, or the embeddings with the final norm."""
    with torch.device("meta"):
        model = build_model(config.with_layers(1))
    embeddings = parameter_count(model.get_input_embeddings()) + 2 * config.n_embd
    return max(parameter_count(model.blocks), embeddings)


def micro_batch_that_fits(candidates: Sequence[Strategy], sequences: int, memory: float) -> int:
    """The largest micro-batch that fits the fastest strategy; 1 if nothing fits.

    It divides the `sequences` that each process computes in a step.
    """
    for strategy in candidates:
        if strategy.needed(sequences, False) <= memory:
            return sequences
        if most := strategy.largest(memory):
            return max(size for size in range(1, min(sequences, most) + 1) if sequences % size == 0)
    return 1


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
    fits: Sequence[Fit], requested: int | None, machines: int, words: Sequence[str]
) -> tuple[str, int]:
    """The advice as a sentence, and the exit code. The first strategy that fits is the fastest.

    `requested` is train.micro_batch_size; `words` are the arguments of train.py.
    """
    for row in fits:
        if row.fits:
            return f"It fits: {_command(row.strategy, machines, words)}", 0
    for row in fits:
        if row.largest_micro_batch:
            return (
                f"train.micro_batch_size={requested} does not fit. {row.strategy.name} fits at "
                f"most {row.largest_micro_batch}."
            ), EXIT_NOTHING_FITS
    remedies = ["more processes", "more memory", "a smaller model or data.block_size"]
    if not fits[0].strategy.model.activation_checkpointing:
        remedies.insert(0, "model.activation_checkpointing=true")
    return f"Nothing fits, not even one sequence. Try {', '.join(remedies)}.", EXIT_NOTHING_FITS


def _command(strategy: Strategy, machines: int, words: Sequence[str]) -> str:
    """The command for a strategy. Its options say what was planned, whatever its file has."""
    shape = strategy.shape
    options: dict[str, object] = {"num_processes": shape.processes}
    if machines > 1:
        options["num_machines"] = machines
    options["mixed_precision"] = shape.precision
    if shape.context > 1 or shape.tensor > 1 or 1 < shape.shards < shape.processes:
        options |= {
            "parallelism_config_dp_replicate_size": shape.copies,
            "parallelism_config_dp_shard_size": shape.shards // shape.context,
            "parallelism_config_cp_size": shape.context,
            "parallelism_config_tp_size": shape.tensor,
        }
    command = ["accelerate", "launch", "--config_file", f"accelerate_configs/{strategy.file}"]
    command += [f"--{name}={value}" for name, value in options.items()]
    return shlex.join([*command, "train.py", *words])
