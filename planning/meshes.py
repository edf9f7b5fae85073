"""Which processes share what: the meshes of a number of GPUs, and the smallest one that fits.

A mesh divides the processes into copies of the model, shards of a copy, processes that share each
sequence (context parallelism) and those that share each matrix (tensor parallelism).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from config.schema import equal_chunks
from data.split import Split
from model.family import LanguageModel
from planning.estimate import MemoryEstimate
from planning.fake_trace import Shape
from planning.fits import Candidate, Fit, largest_divisor, mesh_strategy

PER_MACHINE = 8
"""GPUs of a machine, unless it is said otherwise."""


@dataclass(frozen=True)
class Limits:
    """What a model and a batch allow."""

    sequences: int
    """Of a global batch."""
    micro_batch_size: int | None
    """As `train.micro_batch_size`."""
    context: bool
    """Whether processes can share sequences."""
    tensor: bool
    """Whether processes can share matrices."""
    padding: bool = False
    """Whether rows of padding may fill up a step."""

    def split(self, shape: Shape) -> Split:
        """How a step's sequences are divided."""
        return Split.of(self.sequences, self.micro_batch_size, shape.parts)

    def allow(self, shape: Shape, model: LanguageModel) -> bool:
        """Whether a run can have this shape."""
        return (
            (self.padding or not self.split(shape).padding)
            and (self.context or shape.context == 1)
            and (self.tensor or shape.tensor == 1)
            and not any(heads % shape.sharing_heads for heads in model.config.head_counts)
            and model.config.block_size % equal_chunks(shape.context, shape.tensor) == 0
            # Copies of one shard are DDP, where nothing else is shared.
            and (shape.copies == 1 or shape.shards > shape.context or not shape.is_fsdp)
        )


def meshes(shape: Shape, here: int) -> Iterator[list[Shape]]:
    """The shapes of so many processes, by how many of them share the work of a sequence.

    A machine has `here` processes. These many, 1, 2, 4 and so on, share matrices inside a machine,
    or the sequence. Of each the model is sharded over all, then inside a machine, then whole.
    """
    shared = 1
    while shape.processes % shared == 0:
        found = []
        for tensor in dict.fromkeys((min(shared, here), 1)):
            of = replace(shape, tensor=tensor, context=shared // tensor)
            most = shape.processes // tensor
            for shards in dict.fromkeys((most, here // tensor, 1)):
                if shards % of.context == 0 and most % shards == 0 and (shards > 1 or shared == 1):
                    found.append(replace(of, shards=shards))
        yield found
        shared *= 2


def smallest_that_fits(
    model: LanguageModel,
    shape: Shape,
    machines: int,
    limits: Limits,
    memory: float,
    staging_bytes: int,
) -> tuple[list[Fit], Split]:
    """The meshes in which as few processes as possible share the work of a sequence.

    Those that fit come first: by the processes of a copy, then by the bytes that a process sends in
    a step. All that were tried before follow. Each has the largest micro-batch that fits and
    divides its batch; the first one's split is returned. Only if no mesh divides the global batch,
    a step is filled up with padding.
    """
    fitting: list[tuple[Fit, Split]] = []
    others: list[tuple[Fit, Split]] = []
    for shapes in meshes(shape, shape.processes // machines):
        too_large: set[int] = set()
        for one in shapes:
            if not limits.allow(one, model) or one.tensor in too_large:
                continue  # with fewer shards it needs more
            strategy = mesh_strategy(one, machines)
            estimate = MemoryEstimate(model.config, one)
            candidate = Candidate(strategy, model.config, estimate, staging_bytes)
            split = limits.split(one)
            if limits.micro_batch_size is None:
                micro = largest_divisor(split.micro_batch, candidate.largest(memory) or 1)
                split = Split.of(limits.sequences, micro, one.parts)
            fit = candidate.fit(memory, split.micro_batch, split.accumulation)
            (fitting if fit.fits else others).append((fit, split))
            if not fit.fits:
                too_large.add(one.tensor)
        if fitting:
            break
    if not fitting and not others:
        limits = replace(limits, padding=True)
        return smallest_that_fits(model, shape, machines, limits, memory, staging_bytes)
    rows = [*sorted(fitting, key=lambda row: _order(row[0])), *others]
    return [fit for fit, _ in rows], rows[0][1]


def _order(fit: Fit) -> tuple[int, float]:
    """The smallest copy first: between copies only gradients are sent, and only once a step."""
    shape = fit.strategy.shape
    return shape.processes // shape.copies, fit.sent
